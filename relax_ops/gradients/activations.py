# SPDX-License-Identifier: Apache-2.0
"""Gradients of activations: clip (relu6), leakyrelu, prelu, gelu, gelu_tanh, selu, softplus, silu.

At a kink the derivative is PyTorch's: clip passes the gradient on both borders, leakyrelu and prelu take the negative
side at 0. Hardswish and hardsigmoid are compositions of these and have no operator of their own.
"""

from __future__ import annotations

import math
from typing import Any

from tvm import relax
from tvm.relax import op

from relax_ops.gradients.common import cast, dtype_of, elementwise, no_grads, scalar, shape_of, sum_to, widened

_SELU_ALPHA = 1.6732632423543772848170429916717
_SELU_SCALE = 1.0507009873554804934193349852946
_GELU_CUBIC = 0.044715


def clip(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = min(max(x, lo), hi): dx = dy where lo ≤ x ≤ hi, else 0."""
    x, low, high = orig_call.args
    dtype = dtype_of(x)
    inside = op.logical_and(
        op.greater_equal(x, scalar(_number(low), dtype)), op.less_equal(x, scalar(_number(high), dtype))
    )
    return [op.where(inside, output_grad, scalar(0, dtype)), *no_grads([low, high])]


def _number(value: Any) -> float:
    return float(getattr(value, "value", value))


def leakyrelu(_orig_var: Any, orig_call: Any, output_grad: Any, _ctx: Any) -> list[Any]:
    """y = x for x > 0, else alpha·x."""
    x = orig_call.args[0]
    dtype = dtype_of(x)
    small = op.multiply(output_grad, scalar(float(orig_call.attrs.alpha), dtype))
    return [op.where(op.greater(x, scalar(0, dtype)), output_grad, small)]


def prelu(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
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


def _gelu(ctx: Any, x: Any, _y: Any) -> Any:
    """y = x·Φ(x), Φ the normal distribution: y' = Φ(x) + x·φ(x)."""
    dtype = dtype_of(x)
    cdf = op.multiply(
        scalar(0.5, dtype), op.add(scalar(1, dtype), op.erf(op.multiply(x, scalar(math.sqrt(0.5), dtype))))
    )
    bell = op.exp(op.multiply(scalar(-0.5, dtype), op.multiply(x, x)))
    return op.add(cdf, op.multiply(op.multiply(x, bell), scalar(1 / math.sqrt(2 * math.pi), dtype)))


def _gelu_tanh(ctx: Any, x: Any, _y: Any) -> Any:
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


def _selu(ctx: Any, x: Any, _y: Any) -> Any:
    """y = scale·(x for x > 0, else alpha(eˣ − 1))."""
    dtype = dtype_of(x)
    zero = scalar(0, dtype)
    # exp of a large positive x would overflow in the branch that is not taken.
    falling = op.multiply(scalar(_SELU_SCALE * _SELU_ALPHA, dtype), op.exp(op.minimum(x, zero)))
    return op.where(op.greater(x, zero), scalar(_SELU_SCALE, dtype), falling)


def _silu(ctx: Any, x: Any, y: Any) -> Any:
    """y = x·s with s = sigmoid(x): y' = s + y(1 − s)."""
    s = ctx.emit(op.sigmoid(x))
    return op.add(s, op.multiply(y, op.subtract(scalar(1, dtype_of(x)), s)))


def softplus(_orig_var: Any, orig_call: Any, output_grad: Any, ctx: Any) -> list[Any]:
    """y = log(1 + exp(beta·x))/beta, or x where beta·x > threshold: dx = dy·sigmoid(beta·x), or dy."""
    x, attrs = orig_call.args[0], orig_call.attrs
    wide_x, grad = widened(ctx, x, output_grad)
    dtype = dtype_of(wide_x)
    scaled = ctx.emit(op.multiply(wide_x, scalar(float(attrs.beta), dtype)))
    linear = op.greater(scaled, scalar(float(attrs.threshold), dtype))
    return [cast(op.where(linear, grad, op.multiply(grad, op.sigmoid(scaled))), dtype_of(x), ctx)]


GRADIENTS = {
    "relax.clip": clip,
    "relax.nn.leakyrelu": leakyrelu,
    "relax.nn.prelu": prelu,
    "relax.nn.gelu": elementwise(_gelu),
    "relax.nn.gelu_tanh": elementwise(_gelu_tanh),
    "relax.nn.selu": elementwise(_selu),
    "relax.nn.silu": elementwise(_silu),
    "relax.nn.softplus": softplus,
}
"""Gradient rules by operator."""
