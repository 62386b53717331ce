# SPDX-License-Identifier: Apache-2.0
"""Relay programs whose extents coincide: depthwise weights with a multiplier, and weight gradients written out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.importer import corpus
from tests.importer.test_programs import HEADER
from tvm_convgrad import ConvProblem
from tvm_convgrad.core import reference
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import from_relay, import_relay

RNG = np.random.default_rng(3)
Shape = tuple[int, ...]


def whole(shape: Shape) -> Any:
    return RNG.integers(-3, 4, shape).astype("float32")


def main_of(first: Shape, second: Shape, body: str) -> str:
    return f"{HEADER}def @main(%a: Tensor[{first}, float32], %b: Tensor[{second}, float32]) {{\n{body}\n}}\n"


def moved(array: Any, source: str, target: str) -> Any:
    return np.ascontiguousarray(array.transpose([source.index(letter) for letter in target]))


@pytest.mark.parametrize(
    ("layout", "kernel_layout", "channels", "multiplier"),
    [
        ("NCHW", "OIHW", 2, 2),  # every extent is 2
        ("NHWC", "HWOI", 2, 2),
        ("NHWC", "HWIO", 2, 2),
        ("NHWC", "HWIO", 3, 2),
        ("NCDHW", "OIDHW", 2, 3),
    ],
)
def test_depthwise_with_the_multiplier_on_the_i_axis(
    layout: str, kernel_layout: str, channels: int, multiplier: int
) -> None:
    rank, out = len(layout) - 2, channels * multiplier
    axes = "DHW"[3 - rank :]
    problem = ConvProblem(2, channels, out, (2,) * rank, (2,) * rank, padding=((1, 0),) * rank, groups=channels)
    x, w = whole(problem.data_shape), whole((channels, multiplier, *problem.kernel))
    given = moved(x, f"NC{axes}", layout), moved(w, f"OI{axes}", kernel_layout)
    stated = f"groups={channels}, channels={out}, kernel_size={[2] * rank}"
    form = f'padding={[1] * rank + [0] * rank}, data_layout="{layout}", kernel_layout="{kernel_layout}"'
    text = main_of(given[0].shape, given[1].shape, f"nn.conv{rank}d(%a, %b, {form}, {stated})")
    (found,) = corpus.run(from_relay(text), list(given), "llvm")
    want = reference.forward(problem, x, w.reshape(problem.weight_shape))
    np.testing.assert_array_equal(found, moved(want, f"NC{axes}", layout))
    with pytest.raises(ModelError, match="input channels of the weight"):
        from_relay(text.replace(f"channels={out}, ", ""))


def chain(problem: ConvProblem, *, flat: bool) -> str:
    """dW as Relay 0.8 to 0.19 legalized it; with `flat` both operands were vectors before."""
    n, c, o, group = problem.batch, problem.in_channels, problem.out_channels, problem.groups
    (dy, dx) = (problem.grad_shape, problem.data_shape)
    k = list(problem.kernel)
    shapes = ((int(np.prod(dy)),), (int(np.prod(dx)),)) if flat else (dy, dx)
    pads = [low for low, _ in problem.padding] + [high for _, high in problem.padding]
    attributes = f"strides={list(problem.dilation)}, padding={pads}, dilation={list(problem.strides)}, groups={n * c}"
    grad, data = (f"reshape(%a, newshape={list(dy)})", f"reshape(%b, newshape={list(dx)})") if flat else ("%a", "%b")
    return main_of(
        *shapes,
        f"""%0 = tile({grad}, reps=[1, {c // group}, 1, 1]);
      %1 = reshape(%0, newshape=[-1, 1, 0, 0]);
      %2 = reshape({data}, newshape=[1, -1, 0, 0]);
      %3 = nn.conv2d(%2, %1, {attributes});
      %4 = reshape(%3, newshape=[{n}, {c // group}, {o}, {k[0]}, {k[1]}]);
      %5 = sum(%4, axis=[0]);
      transpose(%5, axes=[1, 0, 2, 3])""",
    )


@pytest.mark.parametrize("flat", [False, True], ids=["", "flat"])
@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem(3, 3, 3, (3, 3), (3, 3), padding=((1, 1),) * 2),
        ConvProblem(3, 3, 3, (3, 3), (3, 3), padding=((1, 1),) * 2, groups=3),
        ConvProblem(1, 3, 3, (3, 3), (3, 3), padding=((1, 1),) * 2),
        ConvProblem(1, 1, 1, (1, 1), (1, 1)),
        ConvProblem(4, 4, 4, (4, 4), (1, 1), (2, 2), ((1, 2),) * 2, groups=4),
    ],
    ids=str,
)
def test_weight_gradients_are_lifted(problem: ConvProblem, flat: bool, tmp_path: Any) -> None:
    path = tmp_path / "chain.relay"
    path.write_text(chain(problem, flat=flat))
    imported = import_relay(path)
    assert sum(imported.lifted.values()) == 1
    grad, data = whole(problem.grad_shape), whole(problem.data_shape)
    given = [grad.ravel(), data.ravel()] if flat else [grad, data]
    (found,) = corpus.run(imported.module, given, "llvm")
    np.testing.assert_array_equal(found, reference.backward_weight(problem, grad, data))


def test_groups_in_between_are_left_as_written(tmp_path: Any) -> None:
    """Two channels a group, two groups, two samples: the chain is not a weight gradient, though its shapes are."""
    problem = ConvProblem(2, 4, 4, (2, 2), (2, 2), padding=((1, 0),) * 2, groups=2)
    path = tmp_path / "chain.relay"
    path.write_text(chain(problem, flat=False))
    assert not import_relay(path).lifted
