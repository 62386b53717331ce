# SPDX-License-Identifier: Apache-2.0
"""Draws test digits with what a trained step takes them for, the mistaken ones first, and shows the Python API.

python examples/show_digits.py STEP.so DIGITS.npz CHECKPOINT_FOLDER PICTURE.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from tvm_convgrad.training import Session, load_latest

ROWS, COLUMNS = 4, 10


def main() -> None:
    step, data, checkpoints, picture = map(Path, sys.argv[1:])
    session = Session(step)
    checkpoint, _ = load_latest(checkpoints)
    if checkpoint is None:
        sys.exit(f"{checkpoints}: no checkpoints; train with `convgrad run --checkpoint-dir` first.")
    session.state = checkpoint.state
    with np.load(data) as arrays:
        digits, labels = arrays["x_test"], arrays["y_test"]
    taken_for = session.predict(digits).argmax(axis=1)
    mistakes_first = np.argsort(taken_for == labels, kind="stable")[: ROWS * COLUMNS]

    figure = Figure(figsize=(COLUMNS, ROWS * 1.25), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, index in zip(figure.subplots(ROWS, COLUMNS).flat, mistakes_first, strict=True):
        axes.imshow(digits[index, 0], cmap="gray_r")
        right = taken_for[index] == labels[index]
        title = f"{taken_for[index]}" if right else f"{taken_for[index]}, is {labels[index]}"
        axes.set_title(title, fontsize=9, color="black" if right else "red")
        axes.set_axis_off()
    figure.savefig(picture, dpi=120)
    print(f"{picture}: {int((taken_for != labels).sum())} of {len(labels)} test digits mistaken, in red")


if __name__ == "__main__":
    main()
