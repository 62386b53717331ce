# SPDX-License-Identifier: Apache-2.0
"""Activations: clip (relu6), leakyrelu, prelu, gelu_tanh, selu, softplus, silu.

At a kink the derivative is PyTorch's: clip passes the gradient on both borders, relu6, which is clip to 0 and 6, on
none of them, leakyrelu and prelu take the negative side at 0. TVM lowers clip to instructions that lose NaN, and
softplus with a logarithm that loses small results; the legalizations here do not. Hardswish and hardsigmoid are
compositions of these and have no operator of their own.
"""

from __future__ import annotations

import math

from tvm import relax, te, tirx
from tvm.relax import op

from relax_ops.gradients.common import (
    FLOATS,
    cast,
    dtype_of,
    elementwise_gradient,
    no_grads,
    scalar,
    shape_of,
    sum_to,
    widened,
)
from relax_ops.layouts.common import unary_layout
from relax_ops.rules.contract import Legalization, OperatorRules, named
from relax_ops.rules.elementwise import unary_rules
from relax_ops.rules.near_zero import computed, log1p_of
from relax_ops.vmap.common import channelwise, separate_channels
from relax_ops.vmap.emitter import Vmap
from tvm_convgrad.codegen.extrema import at_least, at_most
from tvm_convgrad.core.dtypes import wide_dtype

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
_GELU_CUBIC = 0.044715

RELU6 = (0.0, 6.0)
"""The bounds of clip that are ReLU6, which Relax has no operator for."""


def clip(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = min(max(x, lo), hi): dx = dy where lo ≤ x ≤ hi, else 0; of relu6 where 0 < x < 6."""
    x, low, high = orig_call.args
    dtype, bounds = dtype_of(x), (_number(low), _number(high))
    above, below = (op.greater, op.less) if bounds == RELU6 else (op.greater_equal, op.less_equal)
    inside = op.logical_and(above(x, scalar(bounds[0], dtype)), below(x, scalar(bounds[1], dtype)))
    return [op.where(inside, output_grad, scalar(0, dtype)), *no_grads([low, high])]


def _number(value: relax.Expr) -> float:
    return float(getattr(value, "value", value))


def leakyrelu(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x for x > 0, else alpha·x."""
    x = orig_call.args[0]
    dtype = dtype_of(x)
    small = op.multiply(output_grad, scalar(float(orig_call.attrs.alpha), dtype))
    return [op.where(op.greater(x, scalar(0, dtype)), output_grad, small)]


def prelu(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x for x > 0, else alpha_c·x with one alpha for each place on `axis`, or one for all."""
    x, alpha = orig_call.args
    dtype, shape = dtype_of(x), shape_of(x, "relax.nn.prelu")
    axis = int(orig_call.attrs.axis) % len(shape)
    wide_shape = [shape_of(alpha)[0] if i == axis else 1 for i in range(len(shape))]
    slope = ctx.emit(op.reshape(alpha, relax.ShapeExpr(wide_shape)))
    positive = ctx.emit(op.greater(x, scalar(0, dtype)))
    dx = op.where(positive, output_grad, op.multiply(output_grad, slope))
    dslope = op.where(positive, scalar(0, dtype), op.multiply(output_grad, x))
    dalpha = op.reshape(sum_to(ctx, dslope, wide_shape), relax.ShapeExpr(list(shape_of(alpha))))
    return [dx, dalpha]


def _gelu_tanh(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = x(1 + tanh u)/2 with u = √(2/π)(x + 0.044715 x³): y' = (1 + t)/2 + x(1 − t²)u'/2."""
    dtype = dtype_of(x)
    root = math.sqrt(2 / math.pi)
    one, half = scalar(1, dtype), scalar(0.5, dtype)
    square = ctx.emit(op.multiply(x, x))
    inner = op.add(one, op.multiply(scalar(_GELU_CUBIC, dtype), square))
    t = ctx.emit(op.tanh(op.multiply(op.multiply(scalar(root, dtype), x), inner)))
    slope = op.multiply(scalar(root, dtype), op.add(one, op.multiply(scalar(3 * _GELU_CUBIC, dtype), square)))
    curve = op.multiply(op.multiply(x, op.subtract(one, op.multiply(t, t))), slope)
    return op.multiply(half, op.add(op.add(one, t), curve))


def _selu(ctx: relax.BlockBuilder, x: relax.Expr, _y: relax.Expr) -> relax.Expr:
    """y = scale·(x for x > 0, else alpha(eˣ − 1))."""
    dtype = dtype_of(x)
    zero = scalar(0, dtype)
    # exp of a large positive x would overflow in the branch that is not taken.
    falling = op.multiply(scalar(_SELU_SCALE * _SELU_ALPHA, dtype), op.exp(op.minimum(x, zero)))
    return op.where(op.greater(x, zero), scalar(_SELU_SCALE, dtype), falling)


def _silu(ctx: relax.BlockBuilder, x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """y = x·s with s = sigmoid(x): y' = s + y(1 − s)."""
    s = ctx.emit(op.sigmoid(x))
    return op.add(s, op.multiply(y, op.subtract(scalar(1, dtype_of(x)), s)))


def softplus(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = log(1 + exp(beta·x))/beta, or x where beta·x > threshold: dx = dy·sigmoid(beta·x), or dy."""
    x, attrs = orig_call.args[0], orig_call.attrs
    wide_x, grad = widened(ctx, x, output_grad)
    dtype = dtype_of(wide_x)
    scaled = ctx.emit(op.multiply(wide_x, scalar(float(attrs.beta), dtype)))
    linear = op.greater(scaled, scalar(float(attrs.threshold), dtype))
    return [cast(op.where(linear, grad, op.multiply(grad, op.sigmoid(scaled))), dtype_of(x), ctx)]


def _clip_legalization(stock: Legalization) -> Legalization:
    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        dtype = dtype_of(call)
        bounds = [float(getattr(bound, "value", math.nan)) for bound in call.args[1:]]
        if dtype not in FLOATS or any(map(math.isnan, bounds)):
            return stock(block_builder, call)
        low, high = (tirx.const(bound, dtype) for bound in bounds)

        def compute(x: te.Tensor) -> te.Tensor:
            return te.compute(x.shape, lambda *place: at_most(at_least(x(*place), low), high), name="clip")

        return block_builder.call_te(compute, call.args[0], primfunc_name_hint="clip")

    return legalize


def _softplus_legalization(_stock: Legalization) -> Legalization:
    """log1p(exp(beta·x))/beta, as in PyTorch; TVM's log(1 + exp(beta·x)) is 0 from about −16.6 on in float32."""

    def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        beta, threshold = float(call.attrs.beta), float(call.attrs.threshold)
        dtype = wide_dtype(dtype_of(call))

        def element(x: tirx.Expr) -> tirx.Expr:
            scaled = x * tirx.const(beta, dtype)
            curve = log1p_of(tirx.exp(scaled)) * tirx.const(1 / beta, dtype)
            return tirx.Select(scaled > tirx.const(threshold, dtype), x, curve)

        return computed(block_builder, call.args[0], "softplus", element)

    return legalize


def _prelu_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """The mapped axis becomes part of the channels; one slope may be that of all channels."""
    data, slopes = (m.everywhere(arg, own) for arg, own in zip(args, mapped, strict=True))
    channel = int(call.attrs.axis) % m.own_ndim(data, True)
    wide_slopes = m.emit(relax.op.broadcast_to(slopes, relax.ShapeExpr([m.count, m.shape(data)[channel + 1]])))
    return separate_channels(m, channelwise(m, call, data, [wide_slopes], channel), channel)


RULES = (
    unary_rules("clip", gradient=clip, layout=unary_layout, legalize=_clip_legalization),
    unary_rules("nn.leakyrelu", gradient=leakyrelu, layout=unary_layout),
    unary_rules("nn.softplus", gradient=softplus, layout=unary_layout, legalize=_softplus_legalization),
    unary_rules("nn.gelu_tanh", gradient=elementwise_gradient(_gelu_tanh)),
    unary_rules("nn.selu", gradient=elementwise_gradient(_selu)),
    unary_rules("nn.silu", gradient=elementwise_gradient(_silu)),
    OperatorRules(named("nn.prelu"), gradient=prelu, vmap=_prelu_vmap),
)
