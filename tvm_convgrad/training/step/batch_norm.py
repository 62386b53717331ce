# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation written out: with batch statistics for training, with running ones for prediction.

Train mode is that of PyTorch (torch.nn.BatchNorm2d): the batch is normalised with its biased variance, and
running <- (1 - momentum) * running + momentum * batch, where the running variance takes the unbiased variance.
The attribute `momentum` of `relax.nn.batch_norm` has this sense too; frontends convert other conventions.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from relax_ops.compat import arithmetic
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.counting import count_of, scalar, scaled_sum
from tvm_convgrad.training.ir.graph import Environment, Rewrite, bindings_of, element_type, is_call, static_shape

OP = "relax.nn.batch_norm"
_COUNTER = ".num_batches_tracked"


def _along_channel(builder: relax.BlockBuilder, vector: relax.Expr, rank: int, axis: int) -> relax.Expr:
    """A vector over channels as a tensor that broadcasts against the data."""
    return builder.emit(relax.op.expand_dims(vector, [other for other in range(rank) if other != axis]))


def _affine(
    builder: relax.BlockBuilder, call: relax.Call, centred: relax.Expr, inverse_deviation: relax.Expr
) -> relax.Expr:
    """`centred * inverse_deviation * gamma + beta`; both factors over channels are multiplied first."""
    _, gamma, beta, _, _ = call.args
    rank, axis = len(static_shape(centred)), _axis(call)
    factor = inverse_deviation
    if call.attrs.scale:
        factor = builder.emit(relax.op.multiply(factor, _along_channel(builder, gamma, rank, axis)))
    result = builder.emit(relax.op.multiply(centred, factor))
    if call.attrs.center:
        result = builder.emit(relax.op.add(result, _along_channel(builder, beta, rank, axis)))
    return result


def _axis(call: relax.Call) -> int:
    return int(call.attrs.axis) % len(static_shape(call.args[0]))


@dataclass(frozen=True)
class Saved:
    """What the forward pass of a batch norm leaves for the backward pass; the vectors broadcast against the data."""

    call: Any
    axes: list[int]
    count: int | Any
    centred: Any
    inverse_deviation: Any


def training(builder: relax.BlockBuilder, call: relax.Call) -> tuple[relax.Expr, Saved]:
    """The call as basic operators with batch statistics: (output, new running mean, new running variance).

    Raises:
        ModelError: a channel has one value only, so that no variance exists.
    """
    data, _, _, running_mean, running_var = call.args
    dtype, axis, rank = element_type(data), _axis(call), len(static_shape(data))
    axes = [other for other in range(rank) if other != axis]
    count = count_of(builder, data, axes)
    if count == 1 and isinstance(count, int):
        raise ModelError(
            f"batch_norm in training mode needs more than one value for each channel, but its data is "
            f"{list(static_shape(data))}; use a larger batch, or bn='frozen'."
        )
    mean = scaled_sum(builder, data, axes, count, keepdims=True)
    centred = builder.emit(relax.op.subtract(data, mean))
    variance = scaled_sum(builder, relax.op.multiply(centred, centred), axes, count, keepdims=True)
    shifted = builder.emit(relax.op.add(variance, scalar(float(call.attrs.epsilon), dtype)))
    inverse_deviation = builder.emit(relax.op.divide(scalar(1.0, dtype), relax.op.sqrt(shifted)))
    output = _affine(builder, call, centred, inverse_deviation)
    if isinstance(count, int):
        correction = scalar(count / (count - 1), dtype)
    else:
        correction = builder.emit(relax.op.divide(count, relax.op.subtract(count, scalar(1.0, dtype))))
    unbiased = builder.emit(relax.op.multiply(variance, correction))
    momentum = float(call.attrs.momentum)
    outputs = [output, _moved(builder, running_mean, mean, momentum), _moved(builder, running_var, unbiased, momentum)]
    return relax.Tuple(outputs), Saved(call, axes, count, centred, inverse_deviation)


def training_gradient(builder: relax.BlockBuilder, saved: Saved, grad: relax.Expr) -> list[relax.Expr]:
    """The partials of data, gamma and beta, given that of the output; the new running statistics have none.

    With c = x - mean, r = 1/sqrt(variance + eps) and sums over all axes but the channel's:
    dbeta = sum(dy), dgamma = r * sum(dy * c), dx = gamma * r * (dy - sum(dy)/count - c * r^2 * sum(dy * c)/count).
    That is one pass for both sums and one for dx, where the derivative of each basic operator would take five.
    """
    data, gamma, beta, running_mean, running_var = saved.call.args
    dtype, inverse, centred = element_type(data), saved.inverse_deviation, saved.centred
    total = builder.emit(relax.op.sum(grad, axis=saved.axes, keepdims=True))
    product = builder.emit(relax.op.multiply(grad, centred))
    projection = builder.emit(relax.op.sum(product, axis=saved.axes, keepdims=True))

    def averaged(value: relax.Expr) -> relax.Expr:
        if isinstance(saved.count, int):
            return builder.emit(relax.op.multiply(value, scalar(1.0 / saved.count, dtype)))
        return builder.emit(relax.op.divide(value, saved.count))

    slope = builder.emit(relax.op.multiply(relax.op.multiply(inverse, inverse), averaged(projection)))
    factor = inverse
    if saved.call.attrs.scale:
        vector = _along_channel(builder, gamma, len(static_shape(data)), _axis(saved.call))
        factor = builder.emit(relax.op.multiply(inverse, vector))
    moved = builder.emit(relax.op.subtract(grad, averaged(total)))
    moved = builder.emit(relax.op.subtract(moved, relax.op.multiply(centred, slope)))
    no_grad = relax.op.grad.no_grad

    def in_shape_of(parameter: relax.Expr, value: relax.Expr) -> relax.Expr:
        return builder.emit(relax.op.reshape(value, list(static_shape(parameter))))

    scaled = builder.emit(relax.op.multiply(projection, inverse))
    return [
        builder.emit(relax.op.multiply(moved, factor)),
        in_shape_of(gamma, scaled) if saved.call.attrs.scale else no_grad(gamma),
        in_shape_of(beta, total) if saved.call.attrs.center else no_grad(beta),
        no_grad(running_mean),
        no_grad(running_var),
    ]


def least_batch(function: relax.Function, inputs: int) -> int:
    """The least batch of a function whose first `inputs` parameters are its inputs; 2 or 1.

    2, if a batch norm that is still one has a single value for each channel of a single sample, of which no variance
    exists.
    """
    extents = static_shape(function.params[0])[:1] if inputs else ()
    if not extents or isinstance(extents[0], int):
        return 1
    analyzer = arithmetic.Analyzer()
    analyzer.bind(extents[0], tvm.tirx.IntImm("int64", 1))
    for binding in bindings_of(function):
        if is_call(binding.value, OP):
            data = binding.value.args[0]
            others = [extent for axis, extent in enumerate(static_shape(data)) if axis != _axis(binding.value)]
            count = analyzer.simplify(math.prod(others, start=tvm.tirx.IntImm("int64", 1)))
            if isinstance(count, tvm.tirx.IntImm) and int(count.value) == 1:
                return 2
    return 1


def _moved(builder: relax.BlockBuilder, running: relax.Expr, batch: relax.Expr, momentum: float) -> relax.Expr:
    """(1 - momentum) * running + momentum * batch."""
    dtype = element_type(running)
    flat = builder.emit(relax.op.reshape(batch, list(static_shape(running))))
    old = builder.emit(relax.op.multiply(running, scalar(1.0 - momentum, dtype)))
    new = builder.emit(relax.op.multiply(flat, scalar(momentum, dtype)))
    return builder.emit(relax.op.add(old, new))


def inference(builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr:
    """The call as basic operators with the running statistics, which stay as they are."""
    data, _, _, running_mean, running_var = call.args
    dtype, axis, rank = element_type(data), _axis(call), len(static_shape(data))
    centred = builder.emit(relax.op.subtract(data, _along_channel(builder, running_mean, rank, axis)))
    shifted = builder.emit(relax.op.add(running_var, scalar(float(call.attrs.epsilon), dtype)))
    inverse = builder.emit(relax.op.divide(scalar(1.0, dtype), relax.op.sqrt(shifted)))
    output = _affine(builder, call, centred, _along_channel(builder, inverse, rank, axis))
    return relax.Tuple([output, running_mean, running_var])


def rewrites(mode: str, frozen: Collection[relax.Var]) -> dict[str, Rewrite]:
    """How the batch norms of a training step are rewritten before differentiation, given the frozen variables.

    Those that keep their running statistics become basic operators; the others stay (see `training`).
    """

    def keep_frozen(builder: relax.BlockBuilder, call: relax.Call, environment: Environment) -> relax.Expr | None:
        return inference(builder, call, environment) if all(each in frozen for each in call.args[1:3]) else None

    table: dict[str, dict[str, Rewrite]] = {"train": {OP: keep_frozen}, "train-all": {}, "frozen": {OP: inference}}
    return table[mode]


def is_kept_counter(name: str, mode: str, frozen: Collection[str]) -> bool:
    """Whether a state counts the batches of a batch norm of PyTorch that keeps its running statistics, and so stays."""
    if not name.endswith(_COUNTER) or mode == "train-all":
        return False
    layer = name.removesuffix(_COUNTER)
    return mode == "frozen" or all(f"{layer}.{each}" in frozen for each in ("weight", "bias"))
