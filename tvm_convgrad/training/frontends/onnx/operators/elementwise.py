# SPDX-License-Identifier: Apache-2.0
"""Elementwise operators of ONNX, written so that values and gradients are finite for all arguments.

TVM's importer lowers Clip by tensors to loops, and writes Elu, Selu and Mish with an exp that overflows in the branch
that is not taken, where 0 times infinity makes the gradient NaN.
"""

from __future__ import annotations

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.activations import bounded, clamped, elu
from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.ir.graph import element_type

_LINEAR = 20.0
"""From here on, log(1 + exp(x)) is x in float32; PyTorch's threshold, too."""


def clip(node: Node) -> relax.Expr | None:
    """Clip, whose bounds were attributes up to opset 10."""
    if not node.is_float():
        return None
    data, bounds = node.tensor(), []
    for position, name, none in ((1, "min", -np.inf), (2, "max", np.inf)):
        if node.given(position) and node.value(position) is None:
            low, high = (node.tensor(place) if node.given(place) else None for place in (1, 2))
            return clamped(node.builder, data, low, high)
        value = node.value(position)
        bounds.append(node.number(name, none) if value is None else float(value.item()))
    if np.isnan(bounds).any():
        return None
    return op.clip(data, bounds[0], bounds[1])


def _elu(node: Node) -> relax.Expr:
    return elu(node.builder, node.tensor(), node.number("alpha", 1.0))


def _hard_sigmoid(node: Node) -> relax.Expr:
    """As PyTorch's, which has no gradient on its bounds."""
    x, emit = node.tensor(), node.builder.emit
    numbers = [relax.const(node.number(*given), element_type(x)) for given in (("alpha", 0.2), ("beta", 0.5))]
    return bounded(node.builder, emit(op.add(emit(op.multiply(x, numbers[0])), numbers[1])), 0.0, 1.0)


def _celu(node: Node) -> relax.Expr:
    alpha = node.number("alpha", 1.0)
    return elu(node.builder, node.tensor(), alpha, 1.0, 1 / alpha)


def _selu(node: Node) -> relax.Expr:
    alpha, gamma = node.number("alpha", 1.67326319217681884765625), node.number("gamma", 1.05070102214813232421875)
    return elu(node.builder, node.tensor(), alpha, gamma)


def softplus(node: Node) -> relax.Expr:
    """log(1 + exp(x))."""
    return op.nn.softplus(node.tensor(), 1.0, _LINEAR)


def mish(node: Node) -> relax.Expr:
    """x·tanh(log(1 + exp(x)))."""
    return op.multiply(node.tensor(), node.emit(op.tanh(node.emit(softplus(node)))))


def swish(node: Node) -> relax.Expr:
    """x·sigmoid(alpha·x)."""
    x, alpha = node.tensor(), node.number("alpha", 1.0)
    scaled = x if alpha == 1 else node.emit(op.multiply(x, node.scalar(alpha)))
    return op.multiply(x, node.emit(op.sigmoid(scaled)))


def shrink(node: Node) -> relax.Expr:
    """x + bias below −lambd, x − bias above lambd, else 0."""
    x, lambd, bias = node.tensor(), node.number("lambd", 0.5), node.number("bias", 0.0)
    low = node.emit(op.where(op.less(x, node.scalar(-lambd)), op.add(x, node.scalar(bias)), op.zeros_like(x)))
    return op.where(op.greater(x, node.scalar(lambd)), op.subtract(x, node.scalar(bias)), low)


def thresholded_relu(node: Node) -> relax.Expr:
    """x above alpha, else 0."""
    x = node.tensor()
    return op.where(node.emit(op.greater(x, node.scalar(node.number("alpha", 1.0)))), x, op.zeros_like(x))


def power(node: Node) -> relax.Expr | None:
    """Pow, whose result has the type of the base, by an exponent of any type; TVM's is of floats only.

    Of integers it is computed in float64, which is exact up to 2**53, and rounded to zero.
    """
    data, exponent = node.tensor(0), node.tensor(1)
    dtype, inner = element_type(data), element_type(data) if node.is_float() else "float64"
    if element_type(exponent) == dtype == inner:
        return None
    value = node.value(1)
    cast = op.astype(exponent, inner) if value is None else relax.const(value, inner)
    base = data if dtype == inner else node.emit(op.astype(data, inner))
    found = op.power(base, cast)
    return found if dtype == inner else op.astype(node.emit(found), dtype)


CONVERTERS: dict[str, Converter] = {
    "Celu": _celu,
    "Clip": clip,
    "Elu": _elu,
    "HardSigmoid": _hard_sigmoid,
    "Mish": mish,
    "Pow": power,
    "Selu": _selu,
    "Shrink": shrink,
    "Softplus": softplus,
    "Swish": swish,
    "ThresholdedRelu": thresholded_relu,
}
"""By operator of ONNX."""
