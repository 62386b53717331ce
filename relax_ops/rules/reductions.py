# SPDX-License-Identifier: Apache-2.0
"""Reductions: sum, mean, variance, std, max, min, prod, arg max and arg min; any axes, keepdims, symbolic extents.

Stock gradients of mean and variance need static extents, and its layout rule gives a scalar a layout that TVM takes for
another one. Variance and std are the biased ones (divided by the count), as in Relax. TVM lowers max and min of floats
to instructions that lose NaN; the legalization here keeps it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from tvm import relax, te, tirx
from tvm.relax import op

from relax_ops.expressions import axes_of, ndim_of
from relax_ops.gradients.common import FLOATS, cast, divide_by_count, dtype_of, restore_axes, scalar, shape_of, widened
from relax_ops.layouts.algebra import initial, position, without
from relax_ops.layouts.site import Decision, Site
from relax_ops.per_sample.states import Summed, apart
from relax_ops.rules.contract import Legalization, LegalizationRule, OperatorRules, named
from relax_ops.rules.elementwise import no_gradients
from relax_ops.vmap.common import shifted_axes
from relax_ops.vmap.mapped_axis import Axes
from tvm_convgrad.codegen.extrema import maximum, minimum

Combine: TypeAlias = "Callable[[tirx.Expr, tirx.Expr], tirx.Expr]"
"""Combines two elements."""


def _spread(ctx: relax.BlockBuilder, expr: relax.Expr, x: relax.Expr) -> relax.Expr:
    """`expr`, of extent 1 on the reduced axes, repeated to the shape of `x`, in x's dtype."""
    return op.broadcast_to(cast(expr, dtype_of(x), ctx), relax.ShapeExpr(list(shape_of(x))))


def _axes(call: relax.Call) -> list[int]:
    return axes_of(call.attrs.axis, len(shape_of(call.args[0], str(call.op.name))))


def sum_(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = Σ x: dx = dy."""
    x, axes = orig_call.args[0], _axes(orig_call)
    return [_spread(ctx, restore_axes(ctx, output_grad, axes, bool(orig_call.attrs.keepdims)), x)]


def mean(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = Σ x / n: dx = dy/n."""
    x, axes = orig_call.args[0], _axes(orig_call)
    (grad,) = widened(ctx, restore_axes(ctx, output_grad, axes, bool(orig_call.attrs.keepdims)))
    return [_spread(ctx, divide_by_count(ctx, grad, x, axes), x)]


def variance(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = Σ (x − m)²/n: dx = dy·2(x − m)/n; the mean's own share cancels."""
    x, axes = orig_call.args[0], _axes(orig_call)
    grad, wide_x = widened(ctx, restore_axes(ctx, output_grad, axes, bool(orig_call.attrs.keepdims)), x)
    factor = divide_by_count(ctx, op.multiply(grad, scalar(2, dtype_of(wide_x))), x, axes)
    return [cast(op.multiply(_deviation(ctx, wide_x, axes), factor), dtype_of(x), ctx)]


def std(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = √variance: dx = dy·(x − m)/(n·y), infinite or NaN where y = 0."""
    x, axes, keep = orig_call.args[0], _axes(orig_call), bool(orig_call.attrs.keepdims)
    grad, result, wide_x = widened(
        ctx, restore_axes(ctx, output_grad, axes, keep), restore_axes(ctx, orig_var, axes, keep), x
    )
    factor = divide_by_count(ctx, op.divide(grad, result), x, axes)
    return [cast(op.multiply(_deviation(ctx, wide_x, axes), factor), dtype_of(x), ctx)]


def _deviation(ctx: relax.BlockBuilder, x: relax.Expr, axes: list[int]) -> relax.Expr:
    return ctx.emit(op.subtract(x, op.mean(x, axis=axes, keepdims=True)))


def extremum(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = max x or min x: dy is divided evenly among the elements that reach y, as torch.amax does."""
    x, axes, keep = orig_call.args[0], _axes(orig_call), bool(orig_call.attrs.keepdims)
    best = restore_axes(ctx, orig_var, axes, keep)
    reached = ctx.emit(op.astype(op.equal(x, best), wide_type(x)))
    ties = op.sum(reached, axis=axes, keepdims=True)
    (grad,) = widened(ctx, restore_axes(ctx, output_grad, axes, keep))
    # A product and no choice: where y is NaN nothing equals it, and dy / 0 * 0 is NaN for all of x, as in PyTorch.
    return [cast(op.multiply(op.divide(grad, ties), reached), dtype_of(x), ctx)]


def wide_type(x: relax.Expr) -> str:
    """The dtype in which ties of `x` are counted."""
    return "float64" if dtype_of(x) == "float64" else "float32"


def reduction_layout(site: Site) -> Decision:
    """Sum, mean and the like over some axes, or all of them."""
    layout, ndim = site.tensor(0), len(site.initial(0))
    given = site.attrs.axis
    axes = range(ndim) if given is None else sorted({int(axis) % ndim for axis in given})
    output = layout if site.attrs.keepdims else without(layout, axes)
    return Decision([layout], output, site.changed_attrs(axis=sorted(position(layout, axis) for axis in axes)))


def arg_extremum_layout(site: Site) -> Decision:
    """Arg max or arg min along one axis; over all elements the index is one into the program's order."""
    if site.attrs.axis is None:
        return Decision([site.initial(0)], initial(int(site.call.ty.ndim)))
    layout = site.tensor(0)
    axis = int(site.attrs.axis) % len(layout)
    output = layout if site.attrs.keepdims else without(layout, [axis])
    return Decision([layout], output, site.changed_attrs(axis=position(layout, axis)))


def reduction_axis(call: relax.Call, axes: Axes) -> int | str:
    """A reduction over other axes. Sums over the samples have a rule of their own."""
    axis = axes.first
    reduced = axes_of(call.attrs.axis, ndim_of(call.args[0]))
    if axis in reduced:
        return "it reduces over the samples"
    return axis if call.attrs.keepdims else axis - sum(other < axis for other in reduced)


def _terms_of_sum(call: relax.Call, axes: Axes) -> Summed | None:
    """A sum over the samples, and over other axes too."""
    (axis, *_), value = axes, call.args[0]
    reduced = axes_of(call.attrs.axis, ndim_of(value))
    if axis is None or axis not in reduced:
        return None
    own = axes.at(axis)

    def terms(builder: relax.BlockBuilder) -> relax.Expr:
        """The axis of the samples split in two, of which the first comes to the front and the second is summed over."""
        found = apart(builder, value, own)
        order = [own.axis, *(other for other in range(ndim_of(found)) if other != own.axis)]
        found = builder.emit(relax.op.permute_dims(found, order)) if own.axis else found
        return builder.emit(relax.op.sum(found, [other + 1 for other in reduced], keepdims=bool(call.attrs.keepdims)))

    return Summed(terms)


def _legalization(combine: Combine, start: float) -> LegalizationRule:
    """Legalization of a maximum or minimum over axes; `start` is that of no elements."""

    def make(stock: Legalization) -> Legalization:
        def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            name = str(call.op.name).rpartition(".")[2]
            data, keep = call.args[0], bool(call.attrs.keepdims)
            shape = getattr(data.ty.shape, "values", None)
            if dtype_of(call) not in FLOATS or not shape:
                return stock(block_builder, call)
            axes = axes_of(call.attrs.axis, len(shape))
            if not axes or any(isinstance(shape[axis], tirx.IntImm) and int(shape[axis]) == 0 for axis in axes):
                return stock(block_builder, call)

            def compute(x: te.Tensor) -> te.Tensor:
                reduce = te.comm_reducer(combine, lambda dtype: tirx.const(start, dtype), name=name)
                over = [te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes]
                left = [axis for axis in range(len(x.shape)) if axis not in axes]

                def element(*place: tirx.Expr) -> tirx.Expr:
                    kept = [place[axis] for axis in left] if keep else list(place)
                    at: list[Any] = [None] * len(x.shape)
                    for axis, index in [*zip(left, kept, strict=True), *zip(axes, over, strict=True)]:
                        at[axis] = index
                    return reduce(x(*at), axis=over)

                extents = [x.shape[axis] if axis in left else 1 for axis in range(len(x.shape))]
                return te.compute(extents if keep else [extents[axis] for axis in left], element, name=name)

            return block_builder.call_te(compute, data, primfunc_name_hint=name)

        return legalize

    return make


def _count_is_symbolic(call: relax.Call) -> str:
    shape = shape_of(call.args[0], str(call.op.name))
    symbolic = [axis for axis in _axes(call) if not isinstance(shape[axis], int)]
    return (
        f"TVM's rule needs the number of elements, and the extent of axis {symbolic[0]} is symbolic" if symbolic else ""
    )


def _rules(*names: str, **rules: Any) -> OperatorRules:
    return OperatorRules(named(*names), layout=reduction_layout, mapped_axis=reduction_axis, vmap=shifted_axes, **rules)


RULES = (
    _rules("sum", gradient=sum_, sums=_terms_of_sum, linear=((0,),)),
    _rules("mean", gradient=mean, stock_fails=_count_is_symbolic, linear=((0,),)),
    _rules("variance", gradient=variance, stock_fails=_count_is_symbolic),
    _rules("std", gradient=std),
    _rules("max", gradient=extremum, legalize=_legalization(maximum, -math.inf)),
    _rules("min", gradient=extremum, legalize=_legalization(minimum, math.inf)),
    _rules("prod"),
    OperatorRules(named("argmax", "argmin"), gradient=no_gradients, layout=arg_extremum_layout),
)
