# SPDX-License-Identifier: Apache-2.0
"""Hessian-vector products of a small convolutional network, and with them the largest curvature of its loss.

    python examples/hessian_vector.py [--iterations N] [--plot PICTURE.png]

The product H v is the gradient of <gradient of the loss, v>, so relax.transform.Gradient is applied twice. The second
time it differentiates the operators that the first one made, whose gradients are of the same family (docs/CLOSURE.md).
Power iteration on v -> H v then finds the eigenvalue of H of largest size; the end compares it with finite differences.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tvm import relax

SHAPES = {"images": (4, 1, 8, 8), "first": (6, 1, 3, 3), "second": (3, 6, 3, 3)}
WEIGHTS = ("first", "second")


def variable(name: str, suffix: str = "") -> Any:
    return relax.Var(name + suffix, relax.TensorType(SHAPES[name], "float64"))


def network() -> Any:
    """An IRModule whose `main(images, first, second)` is the loss: conv, tanh, strided conv, mean of squares."""
    images, first, second = (variable(name) for name in SHAPES)
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            hidden = builder.emit(relax.op.tanh(relax.op.nn.conv2d(images, first, padding=1)))
            scores = builder.emit(relax.op.nn.conv2d(hidden, second, strides=2))
            loss = builder.emit_output(relax.op.mean(relax.op.multiply(scores, scores)))
        builder.emit_func_output(loss, [images, first, second])
    return builder.get()


def gradients(module: Any) -> Any:
    """The module with `main_adjoint`, which returns the value of `main` and its gradients in the two weights."""
    return relax.transform.Gradient("main", require_grads=list(module["main"].params[1:3]))(module)


def along(module: Any) -> Any:
    """A module whose `main` has one more parameter v for each weight, and gives <gradients of the old one, v>."""
    adjoint = module["main_adjoint"]
    directions = [variable(name, "_direction") for name in WEIGHTS]
    builder = relax.BlockBuilder()
    with builder.function("main"):
        with builder.dataflow():
            for binding in adjoint.body.blocks[0].bindings:
                builder.emit_normalized(binding)
            pairs = zip(adjoint.body.body.fields[1].fields, directions, strict=True)
            terms = [builder.emit(relax.op.sum(relax.op.multiply(gradient, v))) for gradient, v in pairs]
            value = builder.emit_output(relax.op.add(*terms))
        builder.emit_func_output(value, [*adjoint.params, *directions])
    return builder.get()


def compiled(module: Any) -> Any:
    """A function on arrays that gives what `main_adjoint` does: a value, and a list of gradients."""
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())

    def call(*arrays: Any) -> tuple[float, list[Any]]:
        value, found = machine["main_adjoint"](*map(tvm.runtime.tensor, arrays))
        return float(value.numpy()), [gradient.numpy() for gradient in found]

    return call


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--plot", type=Path, help="draw how the iteration converges")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    images, *weights = (rng.normal(0, 0.5, shape) for shape in SHAPES.values())

    once = gradients(network())
    gradient, product = compiled(once), compiled(gradients(along(once)))
    v = [rng.normal(size=weight.shape) for weight in weights]
    curvature = 0.0
    found = []
    for _ in range(options.iterations):
        length = np.sqrt(sum((part**2).sum() for part in v))
        v = [part / length for part in v]
        _, hv = product(images, *weights, *v)
        curvature = sum(float((a * b).sum()) for a, b in zip(hv, v, strict=True))
        found.append(curvature)
        v, unit = hv, v

    if options.plot:
        figure = Figure(figsize=(6, 3), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.plot(range(1, len(found) + 1), found, color="#0072b2")
        axes.set(xlabel="iteration", ylabel="curvature along v")
        figure.savefig(options.plot, dpi=100)

    step = 1e-5
    ahead, behind = (
        gradient(images, *(w + sign * step * u for w, u in zip(weights, unit, strict=True)))[1] for sign in (1, -1)
    )
    differences = [(a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True)]
    error = max(float(np.abs(a - b).max()) for a, b in zip(v, differences, strict=True))
    print(f"largest curvature {curvature:.6f}; H v and finite differences differ by {error:.1e} at most")
    if error > 1e-7:
        raise SystemExit("the Hessian-vector product is wrong")


if __name__ == "__main__":
    main()
