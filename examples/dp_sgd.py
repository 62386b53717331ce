# SPDX-License-Identifier: Apache-2.0
"""DP-SGD on handwritten digits: each sample's gradient is clipped, noise is added to their sum (Abadi et al., 2016).

python examples/dp_sgd.py [--epochs 8] [--clip 1.0] [--noise 0.8] [--lr 0.5] [--plot PICTURE.png]

The compiled program gives the sum of the clipped gradients of a batch; it never holds the gradient of each sample.
Noise and update are a few lines of numpy here: where privacy matters, the noise must come from a secure source, batches
must be drawn by Poisson sampling, and a privacy accountant must turn noise and steps into (epsilon, delta).
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

from tvm_convgrad.training import compile_module, load_model, per_sample_module


def load_network(batch: int):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.onnx"
        onnx.save(make_model(batch), path)
        return load_model(path)


def draw(norms: list[list[float]], clip: float, path: Path) -> None:
    """The norms of all samples' gradients in the first and the last epoch."""
    figure = Figure(figsize=(6, 3), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    edges = np.linspace(0, np.quantile(norms[0] + norms[-1], 0.99), 40)
    for name, values in (("first epoch", norms[0]), ("last epoch", norms[-1])):
        axes.hist(values, edges, alpha=0.6, label=name)
    axes.axvline(clip, color="black", label="bound")
    axes.set(xlabel="norm of a sample's gradient", ylabel="samples")
    axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of a sample's gradient")
    parser.add_argument("--noise", type=float, default=0.8, help="standard deviation of the noise, in units of --clip")
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--require-accuracy", type=float, default=0.0, help="fail below this test accuracy")
    parser.add_argument("--plot", type=Path, help="draw the norms of the gradients in the first and the last epoch")
    options = parser.parse_args()

    model = load_network(options.batch)
    module = per_sample_module(model, loss="cross_entropy", result="clipped")
    step = relax.VirtualMachine(compile_module(module, "native"), tvm.cpu())["main_per_sample"]
    parameters = [value.copy() for value in model.parameters.values()]
    digits, rng = make_data(), np.random.default_rng(0)
    images, labels = digits["x_train"], digits["y_train"]

    def run(x, y):
        """Losses, scores, gradient norms, and the clipped sum for each parameter."""
        arrays = [x, y, *parameters, *model.states.values(), np.float32(options.clip)]
        return [part.numpy() for part in step(*map(tvm.runtime.tensor, arrays))]

    seen: list[list[float]] = []
    for epoch in range(options.epochs):
        seen.append([])
        order = rng.permutation(len(images))
        losses, clipped = [], 0
        for start in range(0, len(order) - options.batch + 1, options.batch):
            chosen = order[start : start + options.batch]
            found, _, norms, *sums = run(images[chosen], labels[chosen])
            losses.append(found.mean())
            seen[-1] += norms.tolist()
            clipped += int((norms > options.clip).sum())
            for parameter, total in zip(parameters, sums, strict=True):
                noise = rng.normal(0.0, options.noise * options.clip, total.shape).astype("float32")
                parameter -= options.lr * (total + noise) / options.batch
        share = clipped / (len(losses) * options.batch)
        print(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}, {share:.0%} of the gradients clipped")

    if options.plot:
        draw(seen, options.clip, options.plot)
    x_test, y_test = digits["x_test"], digits["y_test"]
    right = 0
    for start in range(0, len(x_test), options.batch):
        rows = np.arange(start, start + options.batch) % len(x_test)  # a whole batch each time
        scores = run(x_test[rows], y_test[rows])[1]
        given = min(options.batch, len(x_test) - start)
        right += int((scores.argmax(1) == y_test[rows])[:given].sum())
    accuracy = right / len(x_test)
    print(f"test accuracy {accuracy:.3f}")
    if accuracy < options.require_accuracy:
        raise SystemExit(f"below the {options.require_accuracy} of --require-accuracy")


if __name__ == "__main__":
    main()
