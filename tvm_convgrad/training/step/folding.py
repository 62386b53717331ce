# SPDX-License-Identifier: Apache-2.0
"""Batch norms of a model with known weights: folded into the convolutions before them, or one product and one sum.

With running mean m and variance v a batch norm is a x + b, a = gamma / sqrt(v + eps), b = beta - a m, for each channel.
Behind a convolution that nothing else reads, with weight W and bias c, that is the convolution with weight a W and bias
a c + b. The factors are computed in float64 and rounded once.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from relax_ops.compat import Constant, array_of
from tvm_convgrad.training.ir.graph import (
    Environment,
    bindings_of,
    calls_of,
    element_type,
    is_call,
    operator_name,
    static_shape,
)
from tvm_convgrad.training.model.model import BATCH_NORM, Array
from tvm_convgrad.training.step import batch_norm

_RANKS = (1, 2, 3)
_CONVOLUTIONS = {f"relax.nn.conv{rank}d": False for rank in _RANKS}
_CONVOLUTIONS |= {f"relax.nn.conv{rank}d_transpose": True for rank in _RANKS}
"""The operators that batch norms are folded into, and whether they are transposed."""
_RESHAPES = ("relax.reshape", "relax.expand_dims")


@dataclass(frozen=True)
class _Convolution:
    """A convolution that only a batch norm reads: the call, whose weight is a constant, and its bias if it has one."""

    call: Any
    bias: Array | None


class FoldBatchNorms:
    """The rewrite of a function's batch norms, for `replay` of the function; its weights stand for constants there."""

    def __init__(self, function: relax.Function) -> None:
        self._made = {binding.var: binding.value for binding in bindings_of(function)}
        self._reads = Counter(var for value in self._made.values() for var in relax.analysis.free_vars(value))
        self._reads.update(relax.analysis.free_vars(function.body.body))
        self._originals = calls_of(function, BATCH_NORM)

    def rewrite(self, builder: relax.BlockBuilder, call: relax.Call, environment: Environment) -> relax.Expr:
        """The next batch norm of the function, whose replayed call is `call`, with the running statistics."""
        original = next(self._originals)
        if not all(isinstance(each, Constant) for each in call.args[1:5]):  # the model computes some of them
            return batch_norm.inference(builder, call, environment)
        dtype, axis = element_type(call.args[0]), int(call.attrs.axis) % len(static_shape(call.args[0]))
        gamma, beta, mean, variance = (array_of(each).astype("float64") for each in call.args[1:5])
        factor = 1.0 / np.sqrt(variance + float(call.attrs.epsilon))
        if call.attrs.scale:
            factor = factor * gamma
        shift = -mean * factor
        if call.attrs.center:
            shift = shift + beta
        found = self._convolution(original.args[0], environment, axis)
        if found is None:
            data = builder.emit(relax.op.multiply(call.args[0], _along(builder, factor, call.args[0], axis, dtype)))
        else:
            if found.bias is not None:
                shift = shift + found.bias * factor
            weight, attributes = found.call.args[1], found.call.attrs
            scaled = relax.const(_scaled(found.call, factor).astype(element_type(weight)), element_type(weight))
            convolution = relax.Call(found.call.op, [found.call.args[0], scaled], attributes)
            data = builder.emit(convolution)
        output = builder.emit(relax.op.add(data, _along(builder, shift, call.args[0], axis, dtype)))
        return relax.Tuple([output, call.args[3], call.args[4]])

    def _convolution(self, data: relax.Expr, environment: Environment, axis: int) -> _Convolution | None:
        """The convolution that gives `data`, a variable of the function, to nothing but a batch norm along `axis`."""
        bias = None
        value = self._only(data)
        if value is not None and is_call(value, "relax.add"):
            first, second = value.args
            if _operator(self._made.get(first)) not in _CONVOLUTIONS:
                first, second = second, first
            bias = self._vector(second, environment, static_shape(first), axis)
            if bias is None:
                return None
            value = self._only(first)
        if value is None or _operator(value) not in _CONVOLUTIONS:
            return None
        call = environment.substitute(value)
        layout = str(call.attrs.out_layout or call.attrs.data_layout)
        if not isinstance(call.args[1], Constant) or layout.find("C") != axis or not layout.isalpha():
            return None
        return _Convolution(call, bias)

    def _only(self, data: relax.Expr) -> relax.Expr | None:
        """What gives a variable that is read once."""
        return self._made.get(data) if isinstance(data, relax.Var) and self._reads[data] == 1 else None

    def _vector(self, other: relax.Expr, environment: Environment, shape: tuple[Any, ...], axis: int) -> Array | None:
        """The numbers, one a channel, that a summand of a convolution is, or None."""
        made = self._made.get(other) if isinstance(other, relax.Var) else None
        is_shaped = made is not None and _operator(made) in _RESHAPES
        vector = environment.substitute(made.args[0] if made is not None and is_shaped else other)
        wide = [extent if place == axis else 1 for place, extent in enumerate(shape)]
        if not isinstance(vector, Constant) or list(static_shape(other)) != wide:
            return None
        return array_of(vector).reshape(-1).astype("float64")


def _operator(value: relax.Expr | None) -> str:
    """The name of the operator that a value is a call of, or ""."""
    return operator_name(value) if isinstance(value, relax.Call) else ""


def _scaled(call: relax.Call, factor: Array) -> Array:
    """The weight of a convolution with each output channel times its factor."""
    weight = array_of(call.args[1]).astype("float64")
    layout, groups = str(call.attrs.kernel_layout), int(call.attrs.groups)
    out, into = layout.index("O"), layout.index("I")
    shape = [1] * weight.ndim
    if not _CONVOLUTIONS[operator_name(call)]:
        shape[out] = -1
        return weight * factor.reshape(shape)
    # A transposed convolution's weight has the channels of all groups along I, and those of one group along O.
    each = np.repeat(factor.reshape(groups, -1), weight.shape[into] // groups, axis=0)
    shape[into], shape[out] = each.shape
    return weight * (each if into < out else each.T).reshape(shape)


def _along(builder: relax.BlockBuilder, vector: Array, data: relax.Expr, axis: int, dtype: str) -> relax.Expr:
    """A vector over channels as a tensor that broadcasts against the data, as kernels take a bias."""
    wide = [len(vector) if place == axis else 1 for place in range(len(static_shape(data)))]
    return builder.emit(relax.op.reshape(relax.const(vector.astype(dtype), dtype), wide))


__all__ = ["FoldBatchNorms"]
