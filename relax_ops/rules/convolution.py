# SPDX-License-Identifier: Apache-2.0
"""conv{1,2,3}d and conv{1,2,3}d_transpose.

Gradients come from one table, `Direction.gradients` of the catalogue: the family is closed under differentiation. A
transposed convolution is dgrad read forwards (its data is grad, its result is data), so it needs no rule of its own. A
partial has the type of the operand it belongs to, whatever `out_dtype` was.

Legalization takes our kernels, or TVM's own by way of NCHW in layouts that TVM does not lower, or lowers wrongly: it
leaves a convolution unlowered, so that the build fails, if its result has another layout than its data, and a
transposed one in any layout but NCHW/IOHW; 1-d ones must be NCW or NWC. With spatial axes in another order than DHW it
gives each axis another one's stride and padding, without a word. ConvertLayout makes all of these. Every other call
goes to the stock function.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from legalize.builder import Extent
from relax_ops.gradients.common import shape_of
from relax_ops.ir import PREFIX, TRANSPOSED, pairs_of, part, spec_of
from relax_ops.ir import dtype_of as dtype_of_type
from relax_ops.lowering import with_kernels
from relax_ops.program import Convolution
from relax_ops.rules.contract import Legalization, OperatorRules
from relax_ops.vmap.convolution import transposed_arguments, vmap_call
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, Unknown
from tvm_convgrad.core.arguments import refuse_packed
from tvm_convgrad.core.catalogue import BACKWARD_DATA, DIRECTIONS, FORWARD, Direction, OpEntry
from tvm_convgrad.core.geometry import SPATIAL, check_layout, data_layout_of, kernel_layout_of, swapped_kernel_layout


def convolution_gradient(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of conv{1,2,3}d: [dX, dW].

    Raises:
        UnsupportedError: a packed layout, or a shape that is not known at compile time.
    """
    return partials_of(FORWARD, orig_call, _stock_convolution(orig_call), output_grad, builder)


def transpose_gradient(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, builder: relax.BlockBuilder
) -> list[relax.Expr]:
    """Gradient of conv{1,2,3}d_transpose: [dX, dW].

    The transposed convolution is the dgrad of a convolution that maps its result to its data; what it calls I and O of
    the weight are that convolution's O and I. Output padding is the floor division's remainder, implied by the shapes.

    Raises:
        UnsupportedError: a packed layout, or a shape that is not known at compile time.
    """
    return partials_of(BACKWARD_DATA, orig_call, _transposed_convolution(orig_var, orig_call), output_grad, builder)


def partials_of(
    direction: Direction,
    call: relax.Call,
    convolution: Convolution,
    output_grad: relax.Expr,
    builder: relax.BlockBuilder,
) -> list[relax.Expr]:
    """Walk the catalogue's table: one partial for each operand of `direction`, in that operand's type."""
    values = dict(zip(direction.operands, call.args, strict=False))
    values["result"] = output_grad
    partials = []
    for operand, (gradient_direction, (first, second)) in zip(direction.operands, direction.gradients, strict=True):
        out_dtype = dtype_of_type(values[operand].ty)
        partials.append(
            convolution.call(DIRECTIONS[gradient_direction], values[first], values[second], out_dtype, builder)
        )
    return partials


def _stock_convolution(call: relax.Call) -> Convolution:
    name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
    rank = len(attrs.strides)
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    layouts = {"data": data_layout, "weight": kernel_layout, "grad": str(attrs.out_layout) or data_layout}
    return convolution_of(name, rank, attrs, layouts, shape_of(call.args[0], name), shape_of(call.args[1], name))


def _transposed_convolution(orig_var: relax.Var, call: relax.Call) -> Convolution:
    name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
    rank = len(attrs.strides)
    swapped = swapped_kernel_layout(str(attrs.kernel_layout))
    grad_layout = str(attrs.data_layout)
    layouts = {"grad": grad_layout, "weight": swapped, "data": str(attrs.out_layout) or grad_layout}
    return convolution_of(name, rank, attrs, layouts, shape_of(orig_var, name), shape_of(call.args[1], name))


def convolution_of(
    name: str,
    rank: int,
    attrs: tvm.ir.Attrs,
    layouts: dict[str, str],
    data_shape: Sequence[Extent] | None,
    weight_shape: Sequence[Extent],
) -> Convolution:
    """The convolution of a call, after checks of its layouts.

    Raises:
        UnsupportedError: a packed layout.
    """
    for tensor, layout in layouts.items():
        kind = "kernel" if tensor == "weight" else "data"
        refuse_packed(name, rank, [layout])
        check_layout(layout, rank, kind, f"{name}: layout of {tensor}")
    return Convolution(
        rank=rank,
        strides=tuple(int(s) for s in attrs.strides),
        padding=pairs_of(attrs.padding, rank),
        dilation=tuple(int(d) for d in attrs.dilation),
        groups=int(attrs.groups),
        layouts=layouts,
        kernel=tuple(int(weight_shape[layouts["weight"].index(axis)]) for axis in SPATIAL[rank]),
        data_shape=data_shape,
    )


def convolution_axis(call: relax.Call, axes: Axes) -> int | str:
    """A (transposed) convolution of the samples by weights that are the same for all."""
    layout = str(call.attrs.data_layout)
    if axes[1] is not None or axes[0] != layout.index("N"):
        return Unknown("the samples are not its batch")
    return (str(call.attrs.out_layout) or layout).index("N")


def convolution_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """conv{r}d and conv{r}d_transpose by the batching table."""
    name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
    rank = len(attrs.strides)
    dims = [0 if own else None for own in mapped]
    geometry: dict[str, Any] = {
        "strides": tuple(int(s) for s in attrs.strides),
        "padding": pairs_of(attrs.padding, rank),
        "dilation": tuple(int(d) for d in attrs.dilation),
        "groups": int(attrs.groups),
        "data_layout": str(attrs.data_layout),
        "kernel_layout": str(attrs.kernel_layout),
        "out_dtype": spec_of(call, "result", name).dtype,
    }
    out_layout = str(attrs.out_layout) or str(attrs.data_layout)
    if name in TRANSPOSED:
        levels = [dict(zip(BACKWARD_DATA.operands, dims, strict=True))]
        extra = [int(e) for e in attrs.output_padding]
        own = transposed_arguments(
            m.builder, rank, levels, *args, output_padding=extra, out_layout=out_layout, **geometry
        )
        return vmap_call(m.builder, OpEntry(BACKWARD_DATA, rank), levels, args, **own)
    levels = [dict(zip(FORWARD.operands, dims, strict=True))]
    return vmap_call(m.builder, OpEntry(FORWARD, rank), levels, args, grad_layout=out_layout, **geometry)


_OPS = {
    **{f"conv{rank}d": getattr(relax.op.nn, f"conv{rank}d") for rank in SPATIAL},
    **{f"conv{rank}d_transpose": getattr(relax.op.nn, f"conv{rank}d_transpose") for rank in SPATIAL},
}


def _canonical(name: str) -> tuple[str, str]:
    rank = int(name[len("conv")])
    kernel = kernel_layout_of(rank)
    return data_layout_of(rank), "IO" + SPATIAL[rank] if name.endswith("_transpose") else kernel


def _is_served(name: str, data: str, kernel: str, out: str) -> bool:
    """Whether stock TVM lowers these layouts rightly. Packed ones are left to it."""
    canonical_data, canonical_kernel = _canonical(name)
    if len(data) != len(canonical_data) or len(kernel) != len(canonical_kernel) or len(out) != len(canonical_data):
        return True
    if name.endswith("_transpose"):
        return (data, kernel, out) == (canonical_data, canonical_kernel, canonical_data)
    spatial = canonical_data[2:]
    in_order = all("".join(a for a in layout if a in spatial) == spatial for layout in (data, kernel))
    return in_order and out == data and (len(spatial) > 1 or data in ("NCW", "NWC"))


def _legalization(stock: Legalization) -> Legalization:
    return with_kernels(_by_canonical_layouts(stock))


def _by_canonical_layouts(stock: Legalization) -> Legalization:
    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
        canonical_data, canonical_kernel = _canonical(name)
        data, kernel = str(attrs.data_layout), str(attrs.kernel_layout)
        out = str(attrs.out_layout) or data
        if _is_served(name, data, kernel, out):
            return stock(block_builder, call)
        own = {"output_padding": attrs.output_padding} if name.endswith("_transpose") else {}
        out_dtype = attrs.out_dtype or None
        result = _OPS[name](
            _permuted(block_builder, call.args[0], data, canonical_data),
            _permuted(block_builder, call.args[1], kernel, canonical_kernel),
            strides=attrs.strides,
            padding=attrs.padding,
            dilation=attrs.dilation,
            groups=attrs.groups,
            data_layout=canonical_data,
            kernel_layout=canonical_kernel,
            out_dtype=out_dtype,
            **own,
        )
        return _permuted(block_builder, block_builder.emit(part(result)), canonical_data, out)

    return legalize


def _permuted(block_builder: relax.BlockBuilder, value: relax.Expr, layout: str, wanted: str) -> relax.Expr:
    if layout == wanted:
        return value
    return block_builder.emit(relax.op.permute_dims(value, [layout.index(letter) for letter in wanted]))


def _stock_gradient_fails(_call: relax.Call) -> str:
    return (
        "TVM's rule of conv2d leaves dilation out of the kernel's extent, takes no layout but NCHW with OIHW, and no "
        "symbolic extent"
    )


RULES = (
    OperatorRules(
        tuple(f"{PREFIX}conv{rank}d" for rank in SPATIAL),
        gradient=convolution_gradient,
        stock_fails=_stock_gradient_fails,
        mapped_axis=convolution_axis,
        vmap=convolution_vmap,
        legalize=_legalization,
        always=True,
    ),
    OperatorRules(
        tuple(f"{PREFIX}conv{rank}d_transpose" for rank in SPATIAL),
        gradient=transpose_gradient,
        mapped_axis=convolution_axis,
        vmap=convolution_vmap,
        legalize=_legalization,
        always=True,
    ),
)
