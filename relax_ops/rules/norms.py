# SPDX-License-Identifier: Apache-2.0
"""layer_norm, group_norm, instance_norm, rms_norm and batch_norm.

Gradients are emitted as sums and products. All but rms_norm are y = gamma·n + beta with n = (x − m)/σ,
σ = √(v + eps), m and v mean and biased variance over a set of axes. With e = dy·gamma:
dx = (e − mean(e) − n·mean(e·n))/σ,  dgamma = Σ dy·n,  dbeta = Σ dy.
16-bit floats are computed in float32. layer_norm, group_norm and instance_norm apply gamma and beta whatever the
attributes `scale` and `center` say, since TVM's lowering does; batch_norm heeds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax
from tvm.relax import op
from tvm.relax.op.grad import no_grad

from legalize.builder import Extent
from relax_ops.expressions import axes_of, ndim_of
from relax_ops.gradients.common import cast, divide_by_count, dtype_of, scalar, shape_of, sum_to, widened
from relax_ops.ir import spec_of
from relax_ops.layouts.algebra import layout_of, position, storage_order
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import channelwise, separate_channels
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, Unknown

_BATCH_NORM, _GROUP_NORM, _RMS_NORM = "relax.nn.batch_norm", "relax.nn.group_norm", "relax.nn.rms_norm"
WRITTEN_OUT = (_GROUP_NORM, "relax.nn.instance_norm")
"""Operators that `written_out` takes."""


def _reshape(ctx: relax.BlockBuilder, expr: relax.Expr, shape: Sequence[Extent]) -> relax.Expr:
    return ctx.emit(op.reshape(expr, relax.ShapeExpr(list(shape))))


def _mean(ctx: relax.BlockBuilder, expr: relax.Expr, axes: list[int]) -> relax.Expr:
    return ctx.emit(op.mean(expr, axis=axes, keepdims=True))


def _inverse_deviation(ctx: relax.BlockBuilder, variance: relax.Expr, epsilon: float) -> relax.Expr:
    """1/√(v + eps); by sqrt and divide, as CPU rsqrt may be an approximation."""
    dtype = dtype_of(variance)
    return ctx.emit(op.divide(scalar(1, dtype), op.sqrt(op.add(variance, scalar(epsilon, dtype)))))


def _standardised(
    ctx: relax.BlockBuilder, x: relax.Expr, axes: list[int], epsilon: float
) -> tuple[relax.Expr, relax.Expr]:
    """(n, 1/σ) over `axes`."""
    deviation = ctx.emit(op.subtract(x, _mean(ctx, x, axes)))
    inverse = _inverse_deviation(ctx, _mean(ctx, op.multiply(deviation, deviation), axes), epsilon)
    return ctx.emit(op.multiply(deviation, inverse)), inverse


def _through(ctx: relax.BlockBuilder, e: relax.Expr, n: relax.Expr, inverse: relax.Expr, axes: list[int]) -> relax.Expr:
    """(e − mean(e) − n·mean(e·n))/σ."""
    centred = op.subtract(e, _mean(ctx, e, axes))
    projected = op.multiply(n, _mean(ctx, op.multiply(e, n), axes))
    return ctx.emit(op.multiply(op.subtract(centred, projected), inverse))


def _affine(x: relax.Expr, axes: Sequence[int]) -> list[relax.Expr]:
    """The shape in which gamma, given over `axes`, broadcasts to x."""
    return [extent if i in axes else 1 for i, extent in enumerate(shape_of(x))]


def _parameter(
    ctx: relax.BlockBuilder, partial: relax.Expr, affine: Sequence[Extent], parameter: relax.Expr
) -> relax.Expr:
    """The partial of gamma or beta: summed to its broadcast shape, then in its own shape and dtype."""
    total = _reshape(ctx, sum_to(ctx, partial, affine), shape_of(parameter))
    return cast(total, dtype_of(parameter), ctx)


def _normalisation(
    ctx: relax.BlockBuilder, call: relax.Call, grad: relax.Expr, axes: list[int], affine_axes: Sequence[int]
) -> list[relax.Expr]:
    """The rule common to layer_norm and instance_norm: statistics over `axes`, gamma and beta over `affine_axes`."""
    x, gamma, beta = call.args
    wide_x, wide_gamma, wide_grad = widened(ctx, x, gamma, grad)
    affine = _affine(x, affine_axes)
    n, inverse = _standardised(ctx, wide_x, axes, float(call.attrs.epsilon))
    e = ctx.emit(op.multiply(wide_grad, _reshape(ctx, wide_gamma, affine)))
    return [
        cast(_through(ctx, e, n, inverse, axes), dtype_of(x), ctx),
        _parameter(ctx, op.multiply(wide_grad, n), affine, gamma),
        _parameter(ctx, wide_grad, affine, beta),
    ]


def layer_norm(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Statistics over `axes`, with one gamma and beta for each place of them."""
    axes = axes_of(orig_call.attrs.axes, len(shape_of(orig_call.args[0], "relax.nn.layer_norm")))
    return _normalisation(ctx, orig_call, output_grad, axes, axes)


def instance_norm(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Statistics over `axes`, with one gamma and beta for each channel."""
    ndim = len(shape_of(orig_call.args[0], "relax.nn.instance_norm"))
    axes = axes_of(orig_call.attrs.axes, ndim)
    return _normalisation(ctx, orig_call, output_grad, axes, [int(orig_call.attrs.channel_axis) % ndim])


def _groups(call: relax.Call) -> tuple[list[Extent], list[int]]:
    """The shape of a group_norm's data with the channels of a group as an axis, and the axes of its statistics."""
    attrs, shape = call.attrs, shape_of(call.args[0], _GROUP_NORM)
    channel, groups = int(attrs.channel_axis) % len(shape), int(attrs.num_groups)
    split = [*shape[:channel], groups, shape[channel] // groups, *shape[channel + 1 :]]
    return split, sorted([a if a < channel else a + 1 for a in axes_of(attrs.axes, len(shape))] + [channel + 1])


def group_norm(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Statistics over `axes` and the channels of one group, with one gamma and beta for each channel."""
    x, gamma, beta = orig_call.args
    attrs, shape, (split, axes) = orig_call.attrs, shape_of(x, _GROUP_NORM), _groups(orig_call)
    wide_x, wide_gamma, wide_grad = widened(ctx, x, gamma, output_grad)
    affine = _affine(x, [int(attrs.channel_axis) % len(shape)])
    n, inverse = _standardised(ctx, _reshape(ctx, wide_x, split), axes, float(attrs.epsilon))
    e = op.multiply(wide_grad, _reshape(ctx, wide_gamma, affine))
    dx = _reshape(ctx, _through(ctx, _reshape(ctx, e, split), n, inverse, axes), shape)
    return [
        cast(dx, dtype_of(x), ctx),
        _parameter(ctx, op.multiply(wide_grad, _reshape(ctx, n, shape)), affine, gamma),
        _parameter(ctx, wide_grad, affine, beta),
    ]


def written_out(ctx: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """A group_norm or instance_norm as sums and products, the same ones as in its gradient.

    TVM's lowering takes the variance as mean(x²) − m², which loses the digits of data far from zero.
    """
    x, gamma, beta = call.args
    wide_x, wide_gamma, wide_beta = widened(ctx, x, gamma, beta)
    shape, affine = shape_of(x, call.op.name), _affine(x, [int(call.attrs.channel_axis) % len(shape_of(x))])
    epsilon = float(call.attrs.epsilon)
    if call.op.name == _GROUP_NORM:
        split, axes = _groups(call)
        n = _reshape(ctx, _standardised(ctx, _reshape(ctx, wide_x, split), axes, epsilon)[0], shape)
    else:
        n, _ = _standardised(ctx, wide_x, axes_of(call.attrs.axes, len(shape)), epsilon)
    scaled = ctx.emit(op.multiply(n, _reshape(ctx, wide_gamma, affine)))
    return cast(op.add(scaled, _reshape(ctx, wide_beta, affine)), dtype_of(x), ctx)


def rms_norm(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = w·x·r with r = 1/√(mean x² + eps): dx = r(e − x·r²·mean(e·x)) with e = dy·w, dw = Σ dy·x·r."""
    x, weight = orig_call.args
    axes = axes_of(orig_call.attrs.axes, len(shape_of(x, "relax.nn.rms_norm")))
    wide_x, wide_weight, grad = widened(ctx, x, weight, output_grad)
    affine = _affine(x, axes)
    r = _inverse_deviation(ctx, _mean(ctx, op.multiply(wide_x, wide_x), axes), float(orig_call.attrs.epsilon))
    n = ctx.emit(op.multiply(wide_x, r))
    e = ctx.emit(op.multiply(grad, _reshape(ctx, wide_weight, affine)))
    dx = op.multiply(op.subtract(e, op.multiply(n, _mean(ctx, op.multiply(e, n), axes))), r)
    return [cast(dx, dtype_of(x), ctx), _parameter(ctx, op.multiply(grad, n), affine, weight)]


def batch_norm(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """(y, new mean, new variance): statistics of the batch when training, else the moving ones.

    The gradients that arrive at the two new statistics count too: new = (1 − momentum)·moving + momentum·batch.
    """
    x, gamma, beta, moving_mean, moving_var = orig_call.args
    attrs, ndim = orig_call.attrs, len(shape_of(x, "relax.nn.batch_norm"))
    channel = int(attrs.axis) % ndim
    axes, affine = [i for i in range(ndim) if i != channel], _affine(x, [channel])
    grads = [ctx.emit(relax.TupleGetItem(output_grad, i)) for i in range(3)]
    wide_x, wide_gamma, grad = widened(ctx, x, gamma, grads[0])
    new_mean, new_var = (_reshape(ctx, part, affine) for part in widened(ctx, *grads[1:]))
    dtype, epsilon = dtype_of(wide_x), float(attrs.epsilon)
    e = ctx.emit(op.multiply(grad, _reshape(ctx, wide_gamma, affine))) if attrs.scale else grad
    if attrs.training:
        n, inverse = _standardised(ctx, wide_x, axes, epsilon)
        momentum = scalar(float(attrs.momentum), dtype)
        # d(batch mean)/dx = 1/N and d(batch variance)/dx = 2(x − m)/N = 2·n·σ/N, per channel.
        to_mean = divide_by_count(ctx, op.multiply(new_mean, momentum), x, axes)
        to_var = divide_by_count(ctx, op.multiply(op.divide(new_var, inverse), momentum), x, axes)
        direct = op.add(to_mean, op.multiply(n, op.multiply(to_var, scalar(2, dtype))))
        dx = op.add(_through(ctx, e, n, inverse, axes), direct)
        keep = scalar(1.0 - float(attrs.momentum), dtype)
        dmean, dvar = op.multiply(new_mean, keep), op.multiply(new_var, keep)
    else:
        wide_mean, wide_var = widened(ctx, moving_mean, moving_var)
        inverse = _inverse_deviation(ctx, _reshape(ctx, wide_var, affine), epsilon)
        n = ctx.emit(op.multiply(op.subtract(wide_x, _reshape(ctx, wide_mean, affine)), inverse))
        dx = op.multiply(e, inverse)
        dmean = op.subtract(new_mean, op.multiply(sum_to(ctx, e, affine), inverse))
        slope = op.multiply(op.multiply(inverse, inverse), scalar(-0.5, dtype))
        dvar = op.add(new_var, op.multiply(sum_to(ctx, op.multiply(e, n), affine), slope))
    return [
        cast(dx, dtype_of(x), ctx),
        _parameter(ctx, op.multiply(grad, n), affine, gamma) if attrs.scale else no_grad(gamma),
        _parameter(ctx, grad, affine, beta) if attrs.center else no_grad(beta),
        _parameter(ctx, dmean, affine, moving_mean),
        _parameter(ctx, dvar, affine, moving_var),
    ]


def affine_layout(site: Site) -> Decision:
    """layer_norm and rms_norm: scale and shift have the normalised axes in the order in which the data is stored.

    TVM's own rule leaves them as they are, so that with several axes its lowering reads them in a wrong order, and
    beyond their ends. It lowers rms_norm over the last axes only.
    """
    layout = site.tensor(0)
    axes = [int(axis) % len(layout) for axis in site.attrs.axes]
    if site.name == _RMS_NORM and set(storage_order(layout)[-len(axes) :]) != set(axes):
        layout = site.initial(0)
    places = sorted(position(layout, axis) for axis in axes)
    own = layout_of(axes.index(storage_order(layout)[place]) for place in places)
    return Decision([layout, *[own] * (len(site.call.args) - 1)], layout, site.changed_attrs(axes=places))


def normalisation_axis(call: relax.Call, axes: Axes) -> int | str:
    """layer_norm, group_norm and their kind, over other axes."""
    axis, ndim = axes[0], ndim_of(call)
    if axis is None or any(other is not None for other in axes.places[1:]):
        return Unknown("its scale depends on the sample")
    over = {int(a) % ndim for a in call.attrs.axes}
    over |= {int(call.attrs.channel_axis) % ndim} if hasattr(call.attrs, "channel_axis") else set()
    return "it normalises over the samples" if axis in over else axis


def channel_norm_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """batch_norm, group_norm, instance_norm: the mapped axis becomes part of the channels."""
    data, *vectors = (m.everywhere(arg, own) for arg, own in zip(args, mapped, strict=True))
    attrs, name = call.attrs, str(call.op.name)
    channel = int(attrs.channel_axis if hasattr(attrs, "channel_axis") else attrs.axis) % m.own_ndim(data, True)
    changes = {"num_groups": int(attrs.num_groups) * m.count} if name == _GROUP_NORM else {}
    found = channelwise(m, call, data, vectors, channel, **changes)
    if name != _BATCH_NORM:
        return separate_channels(m, found, channel)
    fields = [m.emit(relax.TupleGetItem(found, index)) for index in range(3)]
    result = separate_channels(m, fields[0], channel)
    return relax.Tuple([result, *(m.rearrange(field, "(k c) -> k c") for field in fields[1:])])


def layer_norm_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """layer_norm and rms_norm: scale and shift of one (1 and 0), then those of each index."""
    data, *own = (m.everywhere(arg, own_axis) for arg, own_axis in zip(args, mapped, strict=True))
    ndim = m.own_ndim(data, True)
    over = sorted(int(a) % ndim for a in call.attrs.axes)
    dtype = spec_of(data, "data", str(call.op.name)).dtype
    extents = m.shape(own[0])[1:]
    neutral = [m.emit(make(relax.ShapeExpr(list(extents)), dtype)) for make in (relax.op.ones, relax.op.zeros)]
    result = m.emit(m.call(call, [data, *neutral[: len(own)]], axes=[place + 1 for place in over]))
    shape = [m.count, *(extents[over.index(place)] if place in over else 1 for place in range(ndim))]
    for combine, vector in zip((relax.op.multiply, relax.op.add), own, strict=False):
        result = m.emit(combine(result, m.emit(relax.op.reshape(vector, relax.ShapeExpr(shape)))))
    return result


RULES = (
    OperatorRules(
        named("nn.layer_norm"),
        gradient=layer_norm,
        layout=affine_layout,
        mapped_axis=normalisation_axis,
        vmap=layer_norm_vmap,
    ),
    OperatorRules(
        named("nn.rms_norm"),
        gradient=rms_norm,
        layout=affine_layout,
        mapped_axis=normalisation_axis,
        vmap=layer_norm_vmap,
    ),
    OperatorRules(named("nn.group_norm"), gradient=group_norm, mapped_axis=normalisation_axis, vmap=channel_norm_vmap),
    OperatorRules(
        named("nn.instance_norm"), gradient=instance_norm, mapped_axis=normalisation_axis, vmap=channel_norm_vmap
    ),
    OperatorRules(named("nn.batch_norm"), gradient=batch_norm, vmap=channel_norm_vmap),
)
