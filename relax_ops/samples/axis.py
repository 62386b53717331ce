# SPDX-License-Identifier: Apache-2.0
"""Operators that keep the samples apart: where each leaves their axis, or why it does not.

A rule is `rule(call, axes) -> axis | reason`: `axes` has for each argument the axis of its samples, or None; the result
is the axis in the call's value (the same for all fields of a tuple), or a clause that says why there is none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Union

from tvm import relax

from relax_ops.ir import AnalyzerProver, extents_of
from relax_ops.samples.state import Own, ndim_of, shape_of

Axes = Sequence["int | None"]
Rule = Callable[[Any, Axes], Union[int, str]]


def broadcast(call: Any, axes: Axes) -> int | str:
    """Operands broadcast against each other: axes are counted from the end."""
    ndim = ndim_of(call)
    found = {ndim - ndim_of(arg) + axis for arg, axis in zip(call.args, axes, strict=True) if axis is not None}
    return found.pop() if len(found) == 1 else "its operands have the samples along different axes"


def same_shape(call: Any, axes: Axes) -> int | str:
    """One tensor, and others along the same axes if at all; the value has its shape."""
    found = {axis for axis in axes if axis is not None}
    return found.pop() if len(found) == 1 else "its operands have the samples along different axes"


def along_axis(call: Any, axes: Axes) -> int | str:
    """An operator along one axis that keeps the shape."""
    if call.attrs.axis is None:
        return "it runs over all elements"
    axis = _one(axes)
    return "it runs along the samples" if int(call.attrs.axis) % ndim_of(call) == axis else axis


def reduction(call: Any, axes: Axes) -> int | str:
    """A reduction over other axes. Sums over the samples have a rule of their own."""
    axis = _one(axes)
    reduced = axes_of(call.attrs.axis, ndim_of(call.args[0]))
    if axis in reduced:
        return "it reduces over the samples"
    return axis if call.attrs.keepdims else axis - sum(other < axis for other in reduced)


def permute_dims(call: Any, axes: Axes) -> int | str:
    """A transpose."""
    ndim = ndim_of(call)
    order = call.attrs.axes
    moved = list(reversed(range(ndim))) if order is None else [int(a) % ndim for a in order]
    return moved.index(_one(axes))


def reshape(call: Any, own: Own) -> Own | str:
    """A reshape that leaves as many elements before the samples, whose axis may take in or give up entries."""
    prover, before, after = AnalyzerProver(), shape_of(call.args[0]), shape_of(call)
    outer, passed = math.prod(before[: own.axis]), 1
    rest = [own.inner, *before[own.axis + 1 :]]
    for place, extent in enumerate(after):
        behind = after[place + 1 :]
        known = all(isinstance(e, int) for e in (*rest, *behind)) and math.prod(behind) > 0
        if known and prover.equal(passed, outer) is True and math.prod(rest) % math.prod(behind) == 0:
            return Own(place, math.prod(rest) // math.prod(behind))
        # Where extents behind are symbolic, the samples are found only if they keep an axis of their own.
        if not known and own.inner == 1 and prover.equal(passed, outer) and prover.equal(extent, before[own.axis]):
            return Own(place)
        passed = passed * extent
    return "it merges the axis of the samples with others"


def expand_dims(call: Any, axes: Axes) -> int | str:
    """New axes of one element."""
    ndim = ndim_of(call)
    new = {int(a) % ndim for a in call.attrs.axis}
    return [place for place in range(ndim) if place not in new][_one(axes)]


def squeeze(call: Any, axes: Axes) -> int | str:
    """Axes of one element go away."""
    axis, shape = _one(axes), shape_of(call.args[0])
    if call.attrs.axis is None:
        gone = [place for place, extent in enumerate(shape) if isinstance(extent, int) and extent == 1]
    else:
        gone = [int(a) % len(shape) for a in call.attrs.axis]
    return "it removes the axis of the samples" if axis in gone else axis - sum(other < axis for other in gone)


def broadcast_to(call: Any, axes: Axes) -> int | str:
    """To a larger shape, whose last axes are those of the operand."""
    return _one(axes) + ndim_of(call) - ndim_of(call.args[0])


def concat(call: Any, axes: Axes) -> int | str:
    """Tensors put together along another axis."""
    axis = _one(axes)
    along = 0 if call.attrs.axis is None else int(call.attrs.axis) % ndim_of(call)
    return "it puts samples behind each other" if along == axis else axis


def split(call: Any, axes: Axes) -> int | str:
    """One tensor in parts along another axis."""
    axis = _one(axes)
    return "it takes the samples apart" if int(call.attrs.axis) % ndim_of(call.args[0]) == axis else axis


def strided_slice(call: Any, axes: Axes) -> int | str:
    """A part of other axes."""
    axis = _one(axes)
    cut = {int(place) % ndim_of(call) for place in extents_of(call.args[1].fields)}
    return "it selects samples" if axis in cut else axis


def pad(call: Any, axes: Axes) -> int | str:
    """A border along other axes."""
    axis = _one(axes)
    return "it pads the samples" if any(int(w) for w in call.attrs.pad_width[2 * axis : 2 * axis + 2]) else axis


def take(call: Any, axes: Axes) -> int | str:
    """Elements of another axis at places that are the same for all samples."""
    if axes[0] is None or axes[1] is not None or call.attrs.axis is None:
        return "its places depend on the sample"
    axis, along = axes[0], int(call.attrs.axis) % ndim_of(call.args[0])
    if along == axis:
        return "it selects samples"
    return axis + (ndim_of(call.args[1]) - 1 if along < axis else 0)


def one_hot(call: Any, axes: Axes) -> int | str:
    """A new axis of classes."""
    axis, along = _one(axes), int(call.attrs.axis) % ndim_of(call)
    return axis + (along <= axis)


def window(call: Any, axes: Axes) -> int | str:
    """Pools, their gradients, and resampling: the samples are N of the layout, in every operand that has them."""
    batch = str(call.attrs.layout).find("N")
    out = str(getattr(call.attrs, "out_layout", "") or call.attrs.layout).find("N")
    if any(axis not in (None, batch) for axis in axes):
        return "the samples are not its batch"
    return out


def convolution(call: Any, axes: Axes) -> int | str:
    """A (transposed) convolution of the samples by weights that are the same for all."""
    layout = str(call.attrs.data_layout)
    if axes[1] is not None or axes[0] != layout.index("N"):
        return "the samples are not its batch"
    return (str(call.attrs.out_layout) or layout).index("N")


def backward_data(call: Any, axes: Axes) -> int | str:
    """dgrad of the samples by weights that are the same for all."""
    if axes[1] is not None or axes[0] != str(call.attrs.grad_layout).index("N"):
        return "the samples are not its batch"
    return str(call.attrs.data_layout).index("N")


def normalisation(call: Any, axes: Axes) -> int | str:
    """layer_norm, group_norm and their kind, over other axes."""
    axis, ndim = axes[0], ndim_of(call)
    if axis is None or any(other is not None for other in axes[1:]):
        return "its scale depends on the sample"
    over = {int(a) % ndim for a in call.attrs.axes}
    over |= {int(call.attrs.channel_axis) % ndim} if hasattr(call.attrs, "channel_axis") else set()
    return "it normalises over the samples" if axis in over else axis


def matmul(call: Any, axes: Axes) -> int | str:
    """A product in which the samples are rows, columns or entries of a batch. Sums over them have their own rule."""
    ndim, found = ndim_of(call), set()
    for position, (arg, axis) in enumerate(zip(call.args, axes, strict=True)):
        if axis is None:
            continue
        own = ndim_of(arg)
        kept = own - 2 if position == 0 else own - 1
        if own == 1 or axis not in (*range(own - 2), kept):
            return "it sums over the samples with what is the same for all of them"
        found.add(ndim - own + axis if ndim_of(call.args[1 - position]) > 1 else axis)
    return found.pop() if len(found) == 1 else "it multiplies each sample by every other"


def axes_of(given: Any, ndim: int) -> list[int]:
    """The axes of a reduction, all for None, counted from the front."""
    return list(range(ndim)) if given is None else sorted({int(axis) % ndim for axis in given})


def _one(axes: Axes) -> int:
    return next(axis for axis in axes if axis is not None)


ELEMENTWISE = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power", "atan2", "logaddexp"),
    *("maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_xor", "where"),
)
UNARY = (
    *("abs", "acos", "asin", "atan", "ceil", "cos", "cosh", "erf", "exp", "floor", "isfinite", "isinf", "isnan", "log"),
    *("logical_not", "negative", "round", "rsqrt", "sigmoid", "sign", "sin", "sinh", "sqrt", "square", "tan", "tanh"),
    *("astype", "clip", "zeros_like", "ones_like", "full_like", "grad.no_grad"),
    *("nn.relu", "nn.leakyrelu", "nn.gelu", "nn.gelu_tanh", "nn.selu", "nn.silu", "nn.softplus", "nn.dropout"),
    *("nn.dropout_mask",),
)
POOLS = tuple(f"nn.{kind}_pool{rank}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max") for rank in (1, 2, 3))

RULES: dict[str, Rule] = {
    **{f"relax.{name}": broadcast for name in ELEMENTWISE},
    **{f"relax.{name}": same_shape for name in UNARY},
    **{f"relax.{name}": reduction for name in ("sum", "mean", "max", "min", "prod", "variance", "std")},
    **{f"relax.{name}": along_axis for name in ("cumsum", "cumprod", "flip", "nn.log_softmax", "nn.softmax")},
    **{f"relax.{name}": window for name in (*POOLS, "image.resize2d", "nn.max_pool_backward", "nn.avg_pool_backward")},
    **{f"relax.grad.{kind}_pool2d_backward": window for kind in ("max", "avg")},
    **{f"relax.nn.conv{rank}d{kind}": convolution for rank in (1, 2, 3) for kind in ("", "_transpose")},
    **{f"relax.nn.conv{rank}d_backward_data": backward_data for rank in (1, 2, 3)},
    **{f"relax.nn.{name}": normalisation for name in ("layer_norm", "group_norm", "instance_norm", "rms_norm")},
    "relax.permute_dims": permute_dims,
    "relax.expand_dims": expand_dims,
    "relax.squeeze": squeeze,
    "relax.broadcast_to": broadcast_to,
    "relax.concat": concat,
    "relax.split": split,
    "relax.strided_slice": strided_slice,
    "relax.nn.pad": pad,
    "relax.take": take,
    "relax.one_hot": one_hot,
    "relax.matmul": matmul,
}
"""Rules by operator."""

RESHAPES = ("relax.reshape", "relax.flatten", "relax.nn.batch_flatten")
"""Operators whose rule is `reshape`."""


def is_shape(value: Any) -> bool:
    """Whether an argument is no tensor, so that it has no samples."""
    return not isinstance(value.ty, (relax.TensorType, relax.TupleType))
