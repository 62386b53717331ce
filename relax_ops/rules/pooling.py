# SPDX-License-Identifier: Apache-2.0
"""Max, average and adaptive average pools of 1 to 3 spatial axes, any layout and attributes, and their gradients.

2-D pools that stock TVM differentiates rightly keep its operators, which other passes recognise; the rest goes to
max_pool_backward and avg_pool_backward of relax_ops.pool_backward. Ties in a max pool go to the first element, as in
PyTorch.

Max pools and their gradients are legalized to a CPU kernel where one covers the call, else to tensor expressions: TVM
lowers the gradient of a 2-D pool to a loop over all windows for each element, and the kernel takes 30 times less. Its
own pools lose NaN, and give the lowest finite number for windows of -inf; they serve packed layouts and integers only.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op
from tvm.relax.op.grad import avg_pool2d_backward, max_pool2d_backward, no_grad

from legalize.builder import Extent
from relax_ops import pool_backward
from relax_ops.compat import SBlock, SBlockRealize
from relax_ops.expressions import same_extent
from relax_ops.gpu.adaptive_pool import covers, legalize_adaptive_pool
from relax_ops.gradients.common import FLOATS, cast, divide_by_count, dtype_of, shape_of
from relax_ops.gradients.separable import apply_transposed, identity, multiply_transposed
from relax_ops.ir import constant_extents, shape_values
from relax_ops.layouts.algebra import stored
from relax_ops.layouts.site import Decision, Site, unconverted
from relax_ops.rules.contract import Legalization, OperatorRules, named, on_gpus
from relax_ops.vmap.common import window, window_axis
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.codegen.loops import MAX_INDEX
from tvm_convgrad.core.dtypes import SHORT_FLOATS, wide_dtype
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.core.switches import KERNELS, disabled
from tvm_convgrad.kernels.pool.channels import channels_last_backward_kernel, channels_last_kernel
from tvm_convgrad.kernels.pool.geometry import MaxPool, Triple
from tvm_convgrad.kernels.pool.planes import max_pool_backward_kernel, max_pool_kernel

_AVERAGE = {1: op.nn.avg_pool1d, 2: op.nn.avg_pool2d, 3: op.nn.avg_pool3d}
_ADAPTIVE = {1: op.nn.adaptive_avg_pool1d, 2: op.nn.adaptive_avg_pool2d, 3: op.nn.adaptive_avg_pool3d}


def _check_layout(name: str, attrs: tvm.ir.Attrs, rank: int) -> str:
    layout = str(attrs.layout)
    if sorted(layout) != sorted("NC" + SPATIAL[rank]):
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


def stock_gradient_fails(call: relax.Call) -> str:
    """Why TVM's gradient of this 2-D max or average pool is wrong; "" where it is right."""
    attrs, dtype = call.attrs, dtype_of(call.args[0])
    if any(int(d) != 1 for d in attrs.dilation):
        return "TVM's gradient of a pool ignores dilation"
    if "avg_pool" in str(call.op.name) and bool(attrs.ceil_mode) and bool(attrs.count_include_pad):
        return "TVM's gradient of an average pool with ceil_mode and count_include_pad divides by other counts"
    if dtype in SHORT_FLOATS:
        return f"TVM's gradient of a pool sums in {dtype}"
    return ""


def pool(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """A max or average pool.

    Raises:
        UnsupportedError: a packed layout, or a result of another layout than the data.
    """
    name, x, attrs = str(orig_call.op.name), orig_call.args[0], orig_call.attrs
    rank = len(attrs.pool_size)
    layout = _check_layout(name, attrs, rank)
    is_max = "max_pool" in name
    if rank == 2 and not stock_gradient_fails(orig_call):
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
    own = pool_backward.max_pool_backward if is_max else pool_backward.avg_pool_backward
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


def average_backward(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
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


def max_backward(
    _orig_var: relax.Var, orig_call: relax.Call, _output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Second derivatives of max pools.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        f"{orig_call.op.name}: the gradient of a max pool's gradient is not served; use an average pool where second "
        f"derivatives are needed"
    )


def adaptive(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Result place o averages source places ⌊o·n/m⌋ … ⌈(o+1)·n/m⌉ − 1, along each axis by itself.

    Raises:
        UnsupportedError: a packed layout, or a result of another layout than the data.
    """
    name, x, attrs = str(orig_call.op.name), orig_call.args[0], orig_call.attrs
    shape, result = shape_of(x, name), shape_of(orig_var, name)
    rank = len(shape) - 2
    layout = _check_layout(name, attrs, rank)
    grad = cast(output_grad, wide_dtype(dtype_of(x)), ctx)
    axes = [layout.index(letter) for letter in SPATIAL[rank]]
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


def _probe(ctx: relax.BlockBuilder, x: relax.Expr, axis: int, want: Extent) -> relax.Expr:
    """A along one axis, of shape (result, source): the forward operator applied to the unit matrix."""
    unit = identity(ctx, x, axis)
    extent = shape_of(x)[axis]
    image = ctx.emit(op.reshape(unit, relax.ShapeExpr([1, extent, extent])))
    pooled = ctx.emit(_ADAPTIVE[1](image, want, layout="NCW"))
    return ctx.emit(op.permute_dims(ctx.emit(op.squeeze(pooled, [0])), [1, 0]))


def pool_backward_layout(site: Site) -> Decision:
    """(grad, data) of a pool, both stored as the gradient is, since that is the younger of the two."""
    layout = site.tensor(0)
    names = "".join(stored(str(site.attrs.layout), layout))
    changes: dict[str, Any] = {"layout": names}
    if hasattr(site.attrs, "out_layout"):
        changes["out_layout"] = names
        # Stock gives a tie to the element that is stored first: another one where W comes before H.
        tied = "max" in site.name and names.index("W") < names.index("H")
        if tied or str(site.attrs.out_layout) not in ("", str(site.attrs.layout)):
            return unconverted(site.call)
    return Decision([layout, layout], layout, site.changed_attrs(**changes))


def _layouts(rank: int) -> tuple[str, str]:
    """Channels first and channels last."""
    return "NC" + SPATIAL[rank], "N" + SPATIAL[rank] + "C"


def _pool_of(call: relax.Call, data: relax.Expr, result: Any) -> MaxPool | None:
    """The pool of a call, or None where there is no kernel for it."""
    attrs, rank = call.attrs, len(call.attrs.pool_size)
    shape, results, dtype = constant_extents(data), constant_extents(result), str(data.ty.dtype)
    layout = str(attrs.layout)
    plain = layout in _layouts(rank) and layout == str(getattr(attrs, "out_layout", "") or layout)
    if shape is None or results is None or not plain or dtype not in FLOATS:
        return None
    if any(int(dilation) != 1 for dilation in attrs.dilation) or math.prod(shape) > MAX_INDEX:
        return None

    def triple(values: Any, fill: int) -> Triple:
        filled = [fill] * (3 - rank) + [int(value) for value in values]
        return filled[0], filled[1], filled[2]

    first = layout.index("C") % (rank + 1)  # of the spatial axes, less one
    pool = MaxPool(
        planes=shape[0] * shape[layout.index("C")],
        extents=triple(shape[1 + first : 1 + first + rank], 1),
        results=triple(results[1 + first : 1 + first + rank], 1),
        kernel=triple(attrs.pool_size, 1),
        strides=triple(attrs.strides, 1),
        low=triple(list(attrs.padding)[:rank], 0),
        dtype=dtype,
    )
    return None if pool.refusal else pool


def _is_plain(call: relax.Call, data: relax.Expr) -> bool:
    """Whether the tensor expressions of relax_ops.pool_backward cover the call: floats in a plain layout."""
    attrs, rank = call.attrs, len(call.attrs.pool_size)
    layout = str(attrs.layout)
    same = layout == str(getattr(attrs, "out_layout", "") or layout)
    known = all(each.ty.shape is not None and shape_values(each.ty.shape) is not None for each in (*call.args, call))
    return same and known and sorted(layout) == sorted("NC" + SPATIAL[rank]) and str(data.ty.dtype) in FLOATS


def _max_pool_legalization(stock: Legalization) -> Legalization:
    return _legalization(stock, is_forward=True)


def _max_pool_backward_legalization(stock: Legalization | None) -> Legalization:
    return _legalization(stock or pool_backward.legalize, is_forward=False)


def _own_legalization(_stock: Legalization) -> Legalization:
    return pool_backward.legalize


def _legalization(stock: Legalization, is_forward: bool) -> Legalization:
    fallback = pool_backward.legalize_max_pool if is_forward else pool_backward.legalize

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        data, result = (call.args[0], call) if is_forward else (call.args[1], call.args[0])
        machine = None if disabled(KERNELS) else machine_of(tvm.target.Target.current(allow_none=True))
        pool = _pool_of(call, data, result) if machine is not None else None
        if pool is None or machine is None:
            return fallback(block_builder, call) if _is_plain(call, data) else stock(block_builder, call)
        name = "max_pool" if is_forward else "max_pool_backward"
        shapes = [shape for argument in (*call.args, call) if (shape := constant_extents(argument)) is not None]
        if str(call.attrs.layout).endswith("C"):
            make_last = channels_last_kernel if is_forward else channels_last_backward_kernel
            function = make_last(pool, shapes, machine.lanes(pool.wide), "")
        else:
            make = max_pool_kernel if is_forward else max_pool_backward_kernel
            function = make(pool, shapes, machine.lanes(pool.wide), "")
        function = _in_root_block(function)
        variable = block_builder.add_func(function, name)
        return relax.op.call_tir(variable, list(call.args), call.ty)

    legalize.__doc__ = "FLegalize of a max pool, or of its gradient."
    return legalize


def _in_root_block(function: relax.Function) -> Any:
    """The function with its body in a block: TVM's search for reshapes fails on functions of one operand without."""
    block = SBlock([], [], [], "root", function.body)
    return function.with_body(SBlockRealize([], tvm.tirx.IntImm("bool", 1), block))


def _pools(kind: str) -> tuple[str, ...]:
    return tuple(f"relax.nn.{kind}_pool{rank}d" for rank in SPATIAL)


def _rules(names: tuple[str, ...], **rules: Any) -> OperatorRules:
    return OperatorRules(names, mapped_axis=window_axis, **rules)


RULES = (
    _rules(
        _pools("max"),
        gradient=pool,
        stock_fails=stock_gradient_fails,
        vmap=window,
        legalize=_max_pool_legalization,
    ),
    _rules(_pools("avg"), gradient=pool, stock_fails=stock_gradient_fails, vmap=window),
    _rules(_pools("adaptive_avg"), gradient=adaptive, vmap=window, legalize=on_gpus(legalize_adaptive_pool, covers)),
    _rules(
        named("grad.max_pool2d_backward"),
        gradient=max_backward,
        layout=pool_backward_layout,
        legalize=_max_pool_backward_legalization,
    ),
    _rules(
        (pool_backward.MAX,),
        gradient=max_backward,
        layout=pool_backward_layout,
        legalize=_max_pool_backward_legalization,
        declare=pool_backward.declare,
    ),
    _rules(named("grad.avg_pool2d_backward"), gradient=average_backward, layout=pool_backward_layout),
    _rules(
        (pool_backward.AVG,),
        gradient=average_backward,
        layout=pool_backward_layout,
        legalize=_own_legalization,
        declare=pool_backward.declare,
    ),
)
