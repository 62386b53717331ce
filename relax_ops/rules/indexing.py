# SPDX-License-Identifier: Apache-2.0
"""Operators with an operand of places: take, index_tensor, gather_elements, scatter_elements, index_put, one_hot.

Stock differentiates `take` by a vector along an axis only. In TVM negative places are wrapped by scatter_elements,
index_tensor and index_put, and by `take` in the mode "wrap"; gather_elements reads out of bounds there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import relax, te
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from relax_ops.expressions import known_extents, ndim_of
from relax_ops.gpu.take_backward import legalize_take_backward
from relax_ops.gradients.common import cast, count, dtype_of, fit, no_grads, scalar, shape_of, widened
from relax_ops.layouts.algebra import initial, position, without
from relax_ops.layouts.site import Decision, Site, is_tensor, unconverted
from relax_ops.per_sample.states import Summed, apart
from relax_ops.rules.contract import Legalization, OperatorRules, named, on_gpus
from relax_ops.rules.elementwise import no_gradients
from relax_ops.rules.slicing import put_back
from relax_ops.vmap.common import along_one_axis, same_axis
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, Unknown
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.errors import UnsupportedError


def take_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x at places of one axis, or of the flattened x: dx is dy summed at each place, 0 elsewhere.

    A constant place is one slice, at which dy is put; any other number of places is a scatter.
    """
    x, places = orig_call.args
    shape, axis = shape_of(x, "relax.take"), orig_call.attrs.axis
    axis = None if axis is None else int(axis) % len(shape)
    whole = x if axis is not None else ctx.emit(op.reshape(x, relax.ShapeExpr([-1])))
    along, extents = axis or 0, shape_of(whole)
    place = _constant_place(places, extents[along], str(orig_call.attrs.mode))
    if place is not None:
        grad = ctx.emit(op.expand_dims(output_grad, [along]))
        grad = grad if extents[along] == 1 else put_back(ctx, grad, whole, along, place, 1)
    else:
        places = _inside(ctx, places, extents[along], str(orig_call.attrs.mode))
        flat = ctx.emit(op.reshape(places, relax.ShapeExpr([-1])))
        rows = [*extents[:along], shape_of(flat)[0], *extents[along + 1 :]]
        grad = ctx.emit(op.reshape(output_grad, relax.ShapeExpr(rows)))
        grad = ctx.emit(op.grad.take_backward(grad, whole, flat, along))
    if axis is None:
        grad = ctx.emit(op.reshape(grad, relax.ShapeExpr(list(shape))))
    return [grad, *no_grads([orig_call.args[1]])]


def _constant_place(places: relax.Expr, extent: Any, mode: str) -> int | None:
    """The place that a scalar constant names, if it and the extent of its axis are numbers."""
    if not isinstance(places, Constant) or array_of(places).ndim or not isinstance(extent, int):
        return None
    place = int(array_of(places))
    if mode == "clip":
        return min(max(place, 0), extent - 1)
    return place + extent if place < 0 else place


def _inside(ctx: relax.BlockBuilder, places: relax.Expr, extent: Any, mode: str) -> relax.Expr:
    """The places that `take` reads in this mode."""
    if mode == "fast":
        return places
    if not isinstance(extent, int):
        raise UnsupportedError(f"relax.take: the gradient in mode {mode!r} needs the extent of the axis, not {extent}")
    dtype = dtype_of(places)
    if mode == "clip":
        return ctx.emit(op.minimum(ctx.emit(op.maximum(places, scalar(0, dtype))), scalar(extent - 1, dtype)))
    return ctx.emit(op.floor_mod(places, scalar(extent, dtype)))


def _take_legalization(stock: Legalization) -> Legalization:
    """Lowering of `take` as stock's, but without the warning that it writes for each call in the mode "fast".

    That mode does not check whether places are in bounds.
    """

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        x, places = call.args
        extents = getattr(call.ty.shape, "values", None)
        is_served = str(call.attrs.mode) == "fast" and call.attrs.axis is not None
        if not is_served or not is_tensor(places.ty) or extents is None:
            return stock(block_builder, call)
        axis, ndim = int(call.attrs.axis) % ndim_of(x), ndim_of(places)

        def take(data: te.Tensor, at: te.Tensor) -> te.Tensor:
            def element(*place: Any) -> Any:
                chosen = at(*place[axis : axis + ndim])
                return data(*place[:axis], chosen, *place[axis + ndim :])

            return te.compute(extents, element, name="take")

        return block_builder.call_te(take, x, places, primfunc_name_hint="take")

    return legalize


def take_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """Elements of the same places for all indices."""
    axis = int(call.attrs.axis) % m.own_ndim(args[0], True) + 1
    return op.take(args[0], args[1], axis, str(call.attrs.mode))


def gather_elements(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y[..., i, ...] = x[..., places[..., i, ...], ...]: dx is dy summed at each place."""
    x, places = orig_call.args
    zeros = ctx.emit(op.zeros_like(x))
    axis = int(orig_call.attrs.axis)
    return [op.scatter_elements(zeros, places, output_grad, axis, "add"), *no_grads([places])]


def gather_elements_axis(call: relax.Call, axes: Axes) -> int | str:
    """Data and places have the samples on the same axis, which is not the one along which is gathered."""
    axis = axes.first
    if axes[0] != axes[1]:
        return Unknown("its data and its places have the samples on different axes")
    return "it selects samples" if int(call.attrs.axis) % ndim_of(call.args[0]) == axis else axis


def scatter_elements_axis(call: relax.Call, axes: Axes) -> int | str:
    """Data, places and values have the samples on one axis, if at all, which is not that along which is written."""
    axis = same_axis(call, axes)
    return "it writes samples" if int(call.attrs.axis) % ndim_of(call) == axis else axis


def scatter_elements(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x with values written ("update") or added at places: dv is dy there, dx is dy, 0 where it is overwritten.

    Products ("mul") and extrema ("max", "min") of x and values: see the functions below.

    Raises:
        UnsupportedError: another reduction.
    """
    _, places, values = orig_call.args
    mode, axis = str(orig_call.attrs.reduction), int(orig_call.attrs.axis)
    if mode in ("max", "min"):
        return _scattered_extremum(orig_var, orig_call, output_grad, ctx)
    if mode == "mul":
        return _scattered_product(orig_call, output_grad, ctx)
    if mode not in ("update", "add"):
        raise UnsupportedError(
            f"relax.scatter_elements: the gradient is of 'update', 'add', 'mul', 'max' and 'min', not of {mode!r}"
        )
    dx = output_grad
    if mode == "update":
        dx = ctx.emit(op.scatter_elements(output_grad, places, ctx.emit(op.zeros_like(values)), axis))
    return [dx, *no_grads([places]), op.gather_elements(output_grad, places, axis)]


def _scattered_extremum(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """dy is divided evenly among x and the values that reach y at a place, as torch.scatter_reduce does."""
    x, places, values = orig_call.args
    axis = int(orig_call.attrs.axis)
    (grad,) = widened(ctx, output_grad)
    best = ctx.emit(op.gather_elements(orig_var, places, axis))
    own, reached = (ctx.emit(op.astype(op.equal(*pair), dtype_of(grad))) for pair in ((x, orig_var), (values, best)))
    share = ctx.emit(op.divide(grad, op.scatter_elements(own, places, reached, axis, "add")))
    dv = op.multiply(op.gather_elements(share, places, axis), reached)
    dx = op.multiply(share, own)
    return [cast(dx, dtype_of(x), ctx), *no_grads([places]), cast(dv, dtype_of(values), ctx)]


def _scattered_product(orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder) -> list[relax.Expr]:
    """A factor's slope is the product of the others: of all that are not 0, over itself, and 0 if another one is 0."""
    x, places, values = orig_call.args
    axis = int(orig_call.attrs.axis)
    grad, *factors = widened(ctx, output_grad, x, values)
    one, zero = (scalar(number, dtype_of(grad)) for number in (1, 0))
    zeros = [ctx.emit(op.astype(op.equal(factor, zero), dtype_of(grad))) for factor in factors]
    filled = [ctx.emit(op.where(op.equal(factor, zero), one, factor)) for factor in factors]
    product = ctx.emit(op.scatter_elements(filled[0], places, filled[1], axis, "mul"))
    count = ctx.emit(op.scatter_elements(zeros[0], places, zeros[1], axis, "add"))

    def partial(number: int, grad: relax.Expr, product: relax.Expr, count: relax.Expr) -> relax.Expr:
        others = op.where(op.equal(count, zeros[number]), op.divide(product, filled[number]), zero)
        return cast(op.multiply(grad, others), dtype_of((x, values)[number]), ctx)

    there = [ctx.emit(op.gather_elements(each, places, axis)) for each in (grad, product, count)]
    return [partial(0, grad, product, count), *no_grads([places]), partial(1, *there)]


def index_tensor(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x[places of the first axes, broadcast against each other]: dx is dy summed at each place.

    Not by index_put, which adds in parallel in TVM: of two threads that add to one place one's sum is lost.
    """
    x, places = orig_call.args
    zeros = ctx.emit(op.zeros_like(x))
    stacked = stacked_places(ctx, x, places)
    return [op.scatter_nd(zeros, stacked, output_grad, "add"), op.grad.no_grad(places)]


def index_put(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x with values written or added at places: dv is dy there, dx is dy, 0 where it is overwritten."""
    _, places, values = orig_call.args
    dx = output_grad
    if not orig_call.attrs.accumulate:
        dx = ctx.emit(op.index_put(output_grad, places, ctx.emit(op.zeros_like(values))))
    found = ctx.emit(op.index_tensor(output_grad, places))
    return [dx, op.grad.no_grad(places), fit(ctx, found, values)]


def stacked_places(ctx: relax.BlockBuilder, x: relax.Expr, places: relax.Expr) -> relax.Expr:
    """The places of index_tensor or index_put as scatter_nd reads them: vectors along a last axis, none negative."""
    fields = list(places) if isinstance(places, relax.Tuple) else [ctx.emit(each) for each in _items(places)]
    wrapped = []
    for axis, field in enumerate(fields):
        place, number = cast(field, "int64", ctx), count(ctx, x, [axis], "float32")
        extent = scalar(number, "int64") if isinstance(number, int) else cast(number, "int64", ctx)
        last = ctx.emit(op.add(place, extent))
        wrapped.append(ctx.emit(op.where(op.less(place, scalar(0, "int64")), last, place)))
    whole = wrapped[0]
    for each in wrapped[1:]:
        whole = ctx.emit(op.add(whole, each))
    shape = relax.ShapeExpr(list(shape_of(whole)))
    columns = [ctx.emit(op.expand_dims(ctx.emit(op.broadcast_to(each, shape)), [-1])) for each in wrapped]
    return columns[0] if len(columns) == 1 else ctx.emit(op.concat(columns, -1))


def _items(places: relax.Expr) -> list[relax.Expr]:
    return [relax.TupleGetItem(places, number) for number in range(len(places.ty.fields))]


def index_put_written(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """index_put that adds, as scatter_nd, whose threads share no place; one that writes as it is."""
    x, places, values = call.args
    if not call.attrs.accumulate:
        return call
    stacked = stacked_places(builder, x, places)
    *whole, indexed = shape_of(stacked)
    given = [*whole, *shape_of(x)[int(indexed) :]]
    return op.scatter_nd(x, stacked, builder.emit(op.broadcast_to(values, relax.ShapeExpr(given))), "add")


def take_layout(site: Site) -> Decision:
    """Elements along one axis at the places of a vector (or at one place, where the axis goes away)."""
    ndim = int(site.call.args[1].ty.ndim) if is_tensor(site.call.args[1].ty) else -1
    if site.attrs.axis is None or ndim not in (0, 1):
        return unconverted(site.call)
    layout = site.tensor(0)
    axis = int(site.attrs.axis) % len(layout)
    output = layout if ndim else without(layout, [axis])
    return Decision([layout, initial(ndim)], output, site.changed_attrs(axis=position(layout, axis)))


def take_axis(call: relax.Call, axes: Axes) -> int | str:
    """Elements of another axis at places that are the same for all samples, or of the same at those of each sample."""
    if call.attrs.axis is None or None not in axes.places:
        return Unknown("its places depend on the sample")
    axis, along = axes[0], int(call.attrs.axis) % ndim_of(call.args[0])
    if axis is None:
        return along + axes.first
    if along == axis:
        return "it selects samples"
    return axis + (ndim_of(call.args[1]) - 1 if along < axis else 0)


def take_backward_axis(call: relax.Call, axes: Axes) -> int | str:
    """The gradient of `take` at places that are the same for all samples, put back along another axis."""
    if axes[0] is None or axes[1] is None or axes[2] is not None or call.attrs.axis is None:
        return Unknown("its places depend on the sample")
    axis, along = axes[1], int(call.attrs.axis) % ndim_of(call)
    if along == axis:
        return "it writes samples"
    if axes[0] != axis + (ndim_of(call.args[2]) - 1 if along < axis else 0):
        return "its operands have the samples along different axes"
    return axis


def take_backward_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """Gradients of all indices, put back at places that are the same for them, one axis further."""
    grad, table, places = args
    axis = int(call.attrs.axis) % ndim_of(call) + 1
    return m.call(call, [grad, m.everywhere(table, mapped[1]), places], axis=axis)


def terms_of_rows(call: relax.Call, axes: Axes) -> Summed | None:
    """The gradient of rows of a table, (places, columns) put back at places of each sample: what a sample adds.

    A term is a product with the sample's places as one-hot rows. Its norm needs no term: it is the sum of the products
    of any two rows of the sample that are put to the same place.
    """
    grad, table, places = call.args
    extents = known_extents(table)
    numbers = [extent for extent in extents if isinstance(extent, int)]
    if not _has_axis(call) or int(call.attrs.axis) % ndim_of(call) or axes.places != (0, None, 0):
        return None
    if len(numbers) < len(extents):
        return None
    own, width, dtype = axes.at(0), math.prod(numbers[1:]), wide_dtype(dtype_of(grad))

    def parts(builder: relax.BlockBuilder) -> tuple[relax.Expr, relax.Expr]:
        """The places (samples, entries), and what is put there: (samples, entries, elements of a row)."""
        found = apart(builder, builder.emit(op.reshape(grad, relax.ShapeExpr([shape_of(grad)[0], width]))), own)
        return apart(builder, places, own), cast(found, dtype, builder)

    def terms(builder: relax.BlockBuilder) -> relax.Expr:
        where, added = parts(builder)
        every = relax.const(np.arange(numbers[0]).reshape(1, -1, 1), dtype_of(places))
        hot = cast(builder.emit(op.equal(builder.emit(op.expand_dims(where, 1)), every)), dtype, builder)
        product = cast(builder.emit(op.matmul(hot, added)), dtype_of(call), builder)
        return builder.emit(op.reshape(product, relax.ShapeExpr([shape_of(product)[0], *numbers])))

    def norm(builder: relax.BlockBuilder) -> relax.Expr:
        where, added = parts(builder)
        pairs = (builder.emit(op.expand_dims(where, axis)) for axis in (1, 2))
        products = builder.emit(op.matmul(added, builder.emit(op.permute_dims(added, [0, 2, 1]))))
        same = cast(builder.emit(op.equal(*pairs)), dtype, builder)
        return builder.emit(op.sum(builder.emit(op.multiply(products, same)), [1, 2]))

    return Summed(terms, norm if axes.each <= numbers[0] else None)


def one_hot_axis(call: relax.Call, axes: Axes) -> int | str:
    """A new axis of classes."""
    axis, along = axes.first, int(call.attrs.axis) % ndim_of(call)
    return axis + (along <= axis)


def _adds_or_writes(call: relax.Call) -> bool:
    return str(call.attrs.reduction) in ("add", "update")


def _has_axis(call: relax.Call) -> bool:
    return call.attrs.axis is not None


RULES = (
    OperatorRules(
        named("take"),
        gradient=take_gradient,
        layout=take_layout,
        mapped_axis=take_axis,
        vmap=take_vmap,
        linear=((0,),),
        legalize=_take_legalization,
    ),
    OperatorRules(
        named("grad.take_backward"),
        mapped_axis=take_backward_axis,
        vmap=take_backward_vmap,
        linear=((0,),),
        linear_if=_has_axis,
        sums=terms_of_rows,
        legalize=on_gpus(legalize_take_backward, _has_axis),
    ),
    OperatorRules(named("one_hot"), gradient=no_gradients, mapped_axis=one_hot_axis),
    OperatorRules(named("nonzero"), gradient=no_gradients),
    OperatorRules(
        named("gather_elements"),
        gradient=gather_elements,
        mapped_axis=gather_elements_axis,
        vmap=along_one_axis,
        linear=((0,),),
    ),
    OperatorRules(
        named("scatter_elements"),
        gradient=scatter_elements,
        mapped_axis=scatter_elements_axis,
        vmap=along_one_axis,
        linear=((0, 2),),
        linear_if=_adds_or_writes,
    ),
    OperatorRules(named("index_tensor"), gradient=index_tensor),
    OperatorRules(named("index_put"), gradient=index_put),
)
