# SPDX-License-Identifier: Apache-2.0
"""Gradients of nn.batch_norm and nn.dropout, as Relay computes them.

nn.batch_norm of Relay normalises with the mean and variance that are its arguments, and hands these on as its second
and third result; it has no other mode. Where the arguments are the statistics of the batch, as relay_ops.batch_norm
makes them, their own gradients complete that of training (Ioffe and Szegedy, 2015). nn.dropout is the identity.
"""

from __future__ import annotations

from tvm import relay

from relay_ops.gradients.contract import Rules, field
from tvm_convgrad.core.dtypes import wide_dtype


def batch_norm(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """Partials in data, gamma, beta, mean and variance of all three results.

    With s = sqrt(variance + epsilon), n = (x - mean) / s, dy of y = n * gamma + beta, and sums over all but channels:

        dx = dy * gamma / s          dgamma = sum(dy * n)                  dbeta = sum(dy)
        dmean = -gamma / s * dbeta   dvariance = -gamma / (2 s^2) * dgamma

    16-bit tensors are computed with in float32.
    """
    dtypes = [arg.checked_type.dtype for arg in call.args]
    wide = [wide_dtype(dtype) for dtype in dtypes]
    data, gamma, _, mean, variance = (_cast(a, have, t) for a, have, t in zip(call.args, dtypes, wide, strict=True))
    dy, more_dmean, more_dvariance = (
        _cast(field(output_grad, i), dtypes[source], wide[source]) for i, source in enumerate((0, 3, 4))
    )
    attrs = call.attrs
    rank = len(call.args[0].checked_type.shape)
    axis = int(attrs.axis) % rank

    def across(channels: relay.Expr) -> relay.Expr:
        """A tensor of the channels, with its axis where the data have theirs."""
        return relay.expand_dims(channels, 1, rank - 1 - axis) if axis < rank - 1 else channels

    def summed(value: relay.Expr) -> relay.Expr:
        return relay.sum(value, axis=[axis], exclude=True)

    deviation = relay.sqrt(variance + relay.const(float(attrs.epsilon), wide[4]))
    normal = (data - across(mean)) / across(deviation)
    slope = (gamma if attrs.scale else relay.ones_like(gamma)) / deviation
    total, correlation = summed(dy), summed(dy * normal)
    half = relay.const(0.5, wide[4])
    partials = [
        dy * across(slope),
        correlation if attrs.scale else relay.zeros_like(call.args[1]),
        total if attrs.center else relay.zeros_like(call.args[2]),
        more_dmean - slope * total,
        more_dvariance - half * slope / deviation * correlation,
    ]
    return [_cast(value, have, want) for value, have, want in zip(partials, wide, dtypes, strict=True)]


def _cast(value: relay.Expr, have: str, want: str) -> relay.Expr:
    return value if have == want else relay.cast(value, want)


def dropout(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """The gradient of the first result; the second, a mask, depends on nothing."""
    return [field(output_grad, 0)]


RULES: Rules = {"nn.batch_norm": batch_norm, "nn.dropout": dropout}
