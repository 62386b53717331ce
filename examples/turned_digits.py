# SPDX-License-Identifier: Apache-2.0
"""Other data for a trained digits network: its digits turned by a quarter; and a check of an exported ONNX file.

    python examples/turned_digits.py make DIGITS.npz TURNED.npz
    python examples/turned_digits.py check BEFORE.onnx AFTER.onnx TURNED.npz PICTURE.png

`check` runs both files by ONNX's own reference implementation, which knows nothing of TVM, compares their parameters,
and draws how often they are right.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator


def make(digits: Path, turned: Path) -> None:
    with np.load(digits) as data:
        arrays = {name: np.rot90(data[name], axes=(2, 3)) if name.startswith("x_") else data[name] for name in data}
    np.savez_compressed(turned, **arrays)
    print(f"{turned}: the digits of {digits}, turned by a quarter")


def check(before: Path, after: Path, data: Path, picture: Path) -> None:
    models = [onnx.load(path) for path in (before, after)]
    values = [{each.name: numpy_helper.to_array(each) for each in model.graph.initializer} for model in models]
    changed = [name for name, array in values[0].items() if not np.array_equal(array, values[1][name])]
    print(f"changed: {', '.join(changed)}; the same to the bit: {len(values[0]) - len(changed)} tensors")
    batch = models[0].graph.input[0].type.tensor_type.shape.dim[0].dim_value
    with np.load(data) as arrays:
        x, y = arrays["x_test"][:batch], arrays["y_test"][:batch]
    right = [float((ReferenceEvaluator(model).run(None, {"image": x})[0].argmax(1) == y).mean()) for model in models]
    print(f"of {batch} turned digits, {before} knows {right[0]:.0%}, {after} {right[1]:.0%}")
    figure = Figure(figsize=(4, 2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.barh(["before", "fine-tuned"], right, color=["#7f8792", "#d55e00"])
    axes.set(xlabel="turned digits recognised", xlim=(0, 1))
    figure.savefig(picture, dpi=100)


if __name__ == "__main__":
    command, *paths = sys.argv[1:]
    {"make": make, "check": check}[command](*map(Path, paths))
