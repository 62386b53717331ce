# SPDX-License-Identifier: Apache-2.0
"""An ensemble on handwritten digits: five networks that differ in their initial values, trained by one compiled step.

python examples/ensemble.py [--members 5] [--epochs 3] [--plot PICTURE.png]

The members' convolutions become grouped convolutions of one program. Their mean is right more often than most of them.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import numpy as np
import onnx
import tvm
from digits_cnn import make_data, make_model
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tvm import relax

from tvm_convgrad.training import build_step, compile_step, ensemble, load_model


def load_members(count: int, batch: int) -> list:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.onnx"
        models = []
        for seed in range(count):
            onnx.save(make_model(batch, seed), path)
            models.append(load_model(path))
        return models


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()

    step = build_step(ensemble(load_members(options.members, options.batch)), lr=0.05, momentum=0.9)
    machine = relax.VirtualMachine(compile_step(step, "native"), tvm.cpu())
    state = machine["init"]()
    digits, rng = make_data(), np.random.default_rng(0)
    images, labels = digits["x_train"], digits["y_train"]
    rate = tvm.runtime.tensor(np.float32(0.05))
    for epoch in range(options.epochs):
        order, losses = rng.permutation(len(images)), []
        for start in range(0, len(order) - options.batch + 1, options.batch):
            chosen = order[start : start + options.batch]
            loss, _, state = machine["step"](*map(tvm.runtime.tensor, (images[chosen], labels[chosen])), rate, state)
            losses.append(float(loss.numpy()) / options.members)
        print(f"epoch {epoch + 1}: mean loss of a member {np.mean(losses):.3f}")

    tested = len(digits["x_test"]) // options.batch * options.batch
    scores = [
        machine["predict"](tvm.runtime.tensor(digits["x_test"][start : start + options.batch]), state).numpy()
        for start in range(0, tested, options.batch)
    ]
    whole, truth = np.concatenate(scores), digits["y_test"][:tested]  # (samples, members, classes)
    probabilities = np.exp(whole - whole.max(axis=2, keepdims=True))
    probabilities /= probabilities.sum(axis=2, keepdims=True)
    own = (whole.argmax(axis=2) == truth[:, None]).mean(axis=0)
    together = (probabilities.mean(axis=1).argmax(axis=1) == truth).mean()
    print(f"members {', '.join(f'{each:.3f}' for each in own)}; their mean {together:.3f} of {tested} test digits")
    if options.plot:
        figure = Figure(figsize=(6, 3), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        names = [*(f"member {number}" for number in range(options.members)), "their mean"]
        axes.bar(names, 1 - np.append(own, together), color=["#7f8792"] * options.members + ["#d55e00"])
        axes.set(ylabel="test error")
        axes.tick_params(axis="x", rotation=20)
        figure.savefig(options.plot, dpi=100)


if __name__ == "__main__":
    main()
