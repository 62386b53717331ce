# SPDX-License-Identifier: Apache-2.0
"""Gradients of max, average and adaptive average pools of 1 to 3 spatial axes, any layout and attributes.

2-D pools that stock TVM differentiates rightly keep its operators, which other passes know; the rest goes to
max_pool_backward and avg_pool_backward of this package. Ties in a max pool go to the first element, as in PyTorch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op
from tvm.relax.op.grad import avg_pool2d_backward, max_pool2d_backward, no_grad

from relax_ops import pooling
from relax_ops.gradients.common import Rule, cast, divide_by_count, dtype_of, same_extent, shape_of, wide
from relax_ops.gradients.separable import apply_transposed, identity, multiply_transposed
from tvm_convgrad.errors import UnsupportedError

_AVERAGE = {1: op.nn.avg_pool1d, 2: op.nn.avg_pool2d, 3: op.nn.avg_pool3d}
_ADAPTIVE = {1: op.nn.adaptive_avg_pool1d, 2: op.nn.adaptive_avg_pool2d, 3: op.nn.adaptive_avg_pool3d}
_LETTERS = {1: "W", 2: "HW", 3: "DHW"}


def declare_ops() -> None:
    """Register the operators that these rules emit."""
    pooling.declare()


def _check_layout(name: str, attrs: Any, rank: int) -> str:
    layout = str(attrs.layout)
    if sorted(layout) != sorted("NC" + _LETTERS[rank]):
        raise UnsupportedError(
            f"{name}: the gradient of packed layout {layout!r} is not served; take the gradient in a plain layout and "
            f"convert afterwards with relax.transform.ConvertLayout"
        )
    if str(attrs.out_layout) != layout:
        raise UnsupportedError(
            f"{name}: out_layout {attrs.out_layout!r} differs from layout {layout!r}, which TVM does not lower; "
            f"permute the result instead"
        )
    return layout


def pool(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """A max or average pool.

    Raises:
        UnsupportedError: a packed layout, or a result of another layout than the data.
    """
    name, x, attrs = str(orig_call.op.name), orig_call.args[0], orig_call.attrs
    rank = len(attrs.pool_size)
    layout = _check_layout(name, attrs, rank)
    is_max = "max_pool" in name
    dilated = any(int(d) != 1 for d in attrs.dilation)
    odd_count = not is_max and bool(attrs.ceil_mode) and bool(attrs.count_include_pad)
    if rank == 2 and not dilated and not odd_count and dtype_of(x) not in ("float16", "bfloat16"):
        stock = max_pool2d_backward if is_max else avg_pool2d_backward
        return [
            stock(
                output_grad,
                x,
                attrs.pool_size,
                attrs.strides,
                attrs.padding,
                attrs.dilation,
                attrs.ceil_mode,
                attrs.count_include_pad,
                attrs.layout,
                attrs.out_layout,
            )
        ]
    own = pooling.max_pool_backward if is_max else pooling.avg_pool_backward
    return [
        own(
            output_grad,
            x,
            pool_size=attrs.pool_size,
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            layout=layout,
            count_include_pad=bool(attrs.count_include_pad),
        )
    ]


def average_backward(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """dX is linear in dY: the gradient in dY is the average pool of what arrives, none in the data.

    Raises:
        UnsupportedError: the pool is one whose windows ceil_mode added, so that the forward pool cannot be told.
    """
    grad, data = orig_call.args
    attrs = orig_call.attrs
    rank = len(attrs.pool_size)
    arguments = {
        "pool_size": list(attrs.pool_size),
        "strides": list(attrs.strides),
        "padding": list(attrs.padding),
        "dilation": list(attrs.dilation),
        "count_include_pad": bool(attrs.count_include_pad),
        "layout": str(attrs.layout),
    }
    for ceil_mode in (False, True):
        forward = ctx.normalize(_AVERAGE[rank](output_grad, ceil_mode=ceil_mode, **arguments))
        if all(same_extent(a, b) for a, b in zip(shape_of(forward), shape_of(grad), strict=True)):
            return [ctx.emit(forward), no_grad(data)]
    raise UnsupportedError(
        f"{orig_call.op.name}: grad's extents {shape_of(grad)} are not proven to be those of a pool of {shape_of(data)}"
    )


def max_backward(_orig_var: Any, orig_call: Any, _output_grad: Any, _ctx: Any) -> list[Any]:
    """Second derivatives of max pools.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{orig_call.op.name}: the gradient of a max pool's gradient is not served; use an average pool where second "
        f"derivatives are needed"
    )


def adaptive(orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """Result place o averages source places ⌊o·n/m⌋ … ⌈(o+1)·n/m⌉ − 1, along each axis by itself.

    Raises:
        UnsupportedError: a packed layout, or a result of another layout than the data.
    """
    name, x, attrs = str(orig_call.op.name), orig_call.args[0], orig_call.attrs
    shape, result = shape_of(x, name), shape_of(orig_var, name)
    rank = len(shape) - 2
    layout = _check_layout(name, attrs, rank)
    grad = cast(output_grad, wide(dtype_of(x)), ctx)
    axes = [layout.index(letter) for letter in _LETTERS[rank]]
    if all(same_extent(result[axis], 1) for axis in axes):
        share = cast(divide_by_count(ctx, grad, x, axes), dtype_of(x), ctx)
        return [op.broadcast_to(share, relax.ShapeExpr(list(shape)))]
    for axis in axes:
        have, want = shape[axis], result[axis]
        if same_extent(have, want):
            continue
        if isinstance(have, int) and isinstance(want, int):
            grad = apply_transposed(ctx, grad, axis, adaptive_matrix(have, want))
        else:
            grad = multiply_transposed(ctx, grad, axis, _probe(ctx, x, axis, want))
    return [cast(grad, dtype_of(x), ctx)]


def adaptive_matrix(source: int, result: int) -> NDArray[np.float64]:
    """A with Y = A·X along one axis, of shape (result, source)."""
    matrix = np.zeros((result, source))
    for o in range(result):
        start, end = o * source // result, -((o + 1) * source // -result)
        matrix[o, start:end] = 1.0 / (end - start)
    return matrix


def _probe(ctx: Any, x: Any, axis: int, want: Any) -> Any:
    """A along one axis, of shape (result, source): the forward operator applied to the unit matrix."""
    unit = identity(ctx, x, axis)
    extent = shape_of(x)[axis]
    image = ctx.emit(op.reshape(unit, relax.ShapeExpr([1, extent, extent])))
    pooled = ctx.emit(_ADAPTIVE[1](image, want, layout="NCW"))
    return ctx.emit(op.permute_dims(ctx.emit(op.squeeze(pooled, [0])), [1, 0]))


GRADIENTS: dict[str, Rule] = {
    **{f"relax.nn.{kind}_pool{rank}d": pool for kind in ("max", "avg") for rank in _LETTERS},
    **{f"relax.nn.adaptive_avg_pool{rank}d": adaptive for rank in _LETTERS},
    pooling.AVG: average_backward,
    "relax.grad.avg_pool2d_backward": average_backward,
    pooling.MAX: max_backward,
    "relax.grad.max_pool2d_backward": max_backward,
}
"""Gradient rules by operator."""
