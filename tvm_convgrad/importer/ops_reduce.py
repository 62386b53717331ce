# SPDX-License-Identifier: Apache-2.0
"""Reductions, sums along axes that were broadcast, sorting, running sums."""

from __future__ import annotations

from types import SimpleNamespace

import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.attributes import axis_of, integers
from tvm_convgrad.importer.context import Context, extent_product, same_extents
from tvm_convgrad.importer.ops_elementwise import checked_shape
from tvm_convgrad.importer.table import op
from tvm_convgrad.training.ir.graph import Shape


def reduced_axes(attrs: SimpleNamespace, rank: int) -> list[int]:
    """The axes that go: those listed, or all; with `exclude` all but those listed."""
    listed = () if attrs.axis is None else integers("axis", attrs.axis)
    if not listed:
        return list(range(rank))
    axes = {axis_of(attrs.op_name, axis, rank) for axis in listed}
    return [axis for axis in range(rank) if (axis in axes) != attrs.exclude]


@op("sum", "mean", "max", "min", "prod", attributes="ReduceAttrs")
def _reduce(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    axes = reduced_axes(attrs, context.rank(args[0]))
    if not axes:
        return args[0]
    return context.emit(getattr(relax.op, attrs.op_name)(args[0], axes, keepdims=attrs.keepdims))


@op("all", "any", attributes="ReduceAttrs")
def _truth(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    if context.dtype(args[0]) != "bool":
        raise ModelError(f"the operand is {context.dtype(args[0])}, not bool")
    axes = reduced_axes(attrs, context.rank(args[0]))
    if not axes:
        return args[0]
    reduce = relax.op.min if attrs.op_name == "all" else relax.op.max
    number = context.cast(args[0], "int8")
    return context.cast(context.emit(reduce(number, axes, keepdims=attrs.keepdims)), "bool")


@op("variance", attributes="VarianceAttrs", operands=2, note="the mean is the second operand")
def _variance(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    axes = reduced_axes(attrs, context.rank(args[0]))
    shape = context.shape(args[0])
    count = extent_product([shape[axis] for axis in axes])
    if not isinstance(count, int):
        raise ModelError("the extents must be known")
    if count - attrs.unbiased < 1:
        raise ModelError(f"{count} values have no such variance")
    centred = context.emit(relax.op.subtract(args[0], args[1]))
    square = context.emit(relax.op.multiply(centred, centred))
    total = context.emit(relax.op.sum(square, axes, keepdims=attrs.keepdims)) if axes else square
    return context.emit(relax.op.multiply(total, context.scalar_like(1.0 / (count - attrs.unbiased), args[0])))


@op("argmax", "argmin", attributes="ArgReduceAttrs", note="over one axis or all axes; the first index of equal values")
def _arg(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = context.rank(args[0])
    axes = reduced_axes(attrs, rank)
    if attrs.select_last_index:
        raise ModelError("select_last_index is not imported")
    if len(axes) != 1 and len(axes) != rank:
        raise ModelError(f"several axes {axes} but not all")
    function = relax.op.argmax if attrs.op_name == "argmax" else relax.op.argmin
    axis = axes[0] if len(axes) == 1 else None
    return context.cast(context.emit(function(args[0], axis, attrs.keepdims)), "int32")


def collapsed(context: Context, value: relax.Expr, shape: Shape) -> relax.Expr:
    """`value` summed over the axes that broadcasting from `shape` made."""
    have = context.shape(value)
    lead = len(have) - len(shape)
    if lead < 0:
        raise ModelError(f"{list(map(str, have))} does not collapse to {list(map(str, shape))}")
    if same_extents(have, shape):
        return value
    ones = []
    for place, (extent, wanted) in enumerate(zip(have[lead:], shape, strict=True)):
        if isinstance(wanted, int) and wanted == 1 and not (isinstance(extent, int) and extent == 1):
            ones.append(place)
        elif isinstance(wanted, int) and isinstance(extent, int) and wanted != extent:
            raise ModelError(f"{list(map(str, have))} does not collapse to {list(map(str, shape))}")
    if lead:
        value = context.emit(relax.op.sum(value, list(range(lead))))
    return context.emit(relax.op.sum(value, ones, keepdims=True)) if ones else value


@op("collapse_sum_like", operands=2)
def _collapse_like(context: Context, args: list[relax.Expr], _attrs: SimpleNamespace) -> relax.Expr:
    return collapsed(context, args[0], context.shape(args[1]))


@op("collapse_sum_to", attributes="InitOpAttrs", operands=(1, 2), note="the shape must be static")
def _collapse_to(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    given = context.constant(args[1]) if len(args) == 2 and args[1] is not None else None
    shape = attrs.shape if given is None else tuple(given.ravel().tolist())
    return collapsed(context, args[0], checked_shape(context, "the shape", shape))


@op("cumsum", "cumprod", attributes="ScanopAttrs")
def _scan(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    value = args[0]
    if attrs.axis is None:
        value, axis = context.reshape(value, [extent_product(context.shape(value))]), 0
    else:
        axis = axis_of(attrs.op_name, attrs.axis, context.rank(value))
    function = relax.op.cumsum if attrs.op_name == "cumsum" else relax.op.cumprod
    return context.emit(function(value, axis, attrs.dtype or context.dtype(value), bool(attrs.exclusive)))


@op("sort", "argsort", attributes="ArgsortAttrs")
def _sort(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    axis = axis_of(attrs.op_name, attrs.axis, context.rank(args[0]))
    if attrs.op_name == "sort":
        return context.emit(relax.op.sort(args[0], axis, not attrs.is_ascend))
    return context.emit(relax.op.argsort(args[0], axis, not attrs.is_ascend, attrs.dtype or "int32"))


@op("topk", attributes="TopkAttrs", note="k must be a constant")
def _topk(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr | list[relax.Expr]:
    axis = axis_of("topk", attrs.axis, context.rank(args[0]))
    extent = context.static(args[0], "topk")[axis]
    (count,) = integers("k", attrs.k, count=(1,))
    count = count if count > 0 else extent
    if count > extent or attrs.ret_type not in ("both", "values", "indices"):
        raise ModelError(f"k = {count} of {extent}, {attrs.ret_type!r}")
    call = relax.op.topk(args[0], count, axis, attrs.ret_type, not attrs.is_ascend, attrs.dtype or "int32")
    return context.fields(call, 2) if attrs.ret_type == "both" else context.emit(call)


@op("shape_of", attributes="ShapeOfAttrs")
@op("ndarray_size", attributes="NdarraySizeAttrs", note="extents must be static")
def _shape_of(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    shape = context.shape(args[0])
    dtype = attrs.dtype or "int32"
    if attrs.op_name == "ndarray_size":
        return context.const(extent_product(context.static(args[0], "ndarray_size")), dtype)
    if all(isinstance(extent, int) for extent in shape):
        return context.const(list(shape), dtype)
    parts = relax.ShapeExpr([tvm.tirx.IntImm("int64", e) if isinstance(e, int) else e for e in shape])
    return context.cast(context.emit(relax.op.shape_to_tensor(parts)), dtype)
