# SPDX-License-Identifier: Apache-2.0
"""Gradient accumulation: a step on K micro-batches of the model's batch, one after the other, with one update.

All K are in the one function `step`, so that the state, checkpoints and drivers are what they are without it: it takes
K times the samples. Each micro-batch is normalised by its own statistics and leaves running ones to the next, as in
PyTorch; gradients are those of the mean of the K losses. From the second on, kernels add in the place of the first
one's gradients (relax_ops.passes.fusion, products, gradient_sums), so that there is one set of them however many
micro-batches there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import element_type, static_shape
from tvm_convgrad.training.model.model import TensorSchema


def check_batches(count: int, inputs: Sequence[TensorSchema]) -> None:
    """Refuse several micro-batches of inputs without one fixed batch.

    Raises:
        UnsupportedError: the batch is not the same fixed number for all inputs.
    """
    batches = [schema.shape[0] if schema.shape else None for schema in inputs]
    if count > 1 and not (isinstance(batches[0], int) and len(set(batches)) == 1):
        raise UnsupportedError(
            f"build_step: accumulate = {count} needs a fixed batch, the same for all inputs, but they are "
            f"{', '.join(schema.describe() for schema in inputs)}; build with a batch, such as --batch 8."
        )


def whole(var: relax.Var, count: int) -> relax.Var:
    """A parameter of the function that takes `count` micro-batches of `var`."""
    first, *rest = static_shape(var)
    return relax.Var(
        str(var.name), relax.TensorType([count * first, *rest] if count > 1 else var.ty.shape, var.ty.dtype)
    )


def whole_schema(schema: TensorSchema, count: int) -> TensorSchema:
    """The schema of `count` micro-batches."""
    first, *rest = schema.shape
    return replace(schema, shape=(count * int(first), *rest)) if count > 1 else schema


def part(builder: relax.BlockBuilder, tensor: relax.Expr, number: int, count: int) -> relax.Expr:
    """The number-th of `count` equal parts along the first axis."""
    if count == 1:
        return tensor
    size = int(static_shape(tensor)[0]) // count
    begin = [number * size]
    return builder.emit(
        relax.op.strided_slice(tensor, axes=[0], begin=begin, end=[begin[0] + size], assume_inbound=True)
    )


def joined(builder: relax.BlockBuilder, parts: Sequence[relax.Expr]) -> relax.Expr:
    """The parts one after the other along the first axis."""
    return parts[0] if len(parts) == 1 else builder.emit(relax.op.concat(list(parts), axis=0))


def added(builder: relax.BlockBuilder, totals: Sequence[relax.Expr], more: Sequence[relax.Expr]) -> list[relax.Expr]:
    """The sums so far with those of one more micro-batch; the first's are taken as they are."""
    if not totals:
        return list(more)
    return [builder.emit(relax.op.add(total, one)) for total, one in zip(totals, more, strict=True)]


def mean(builder: relax.BlockBuilder, losses: Sequence[relax.Expr]) -> relax.Expr:
    """The mean of the micro-batches' losses."""
    total = losses[0]
    for loss in losses[1:]:
        total = builder.emit(relax.op.add(total, loss))
    share = scalar(1.0 / len(losses), element_type(total))
    return total if len(losses) == 1 else builder.emit(relax.op.multiply(total, share))


def number_of(builder: relax.BlockBuilder, step: relax.Expr, number: int, count: int) -> relax.Expr:
    """The number of micro-batches done before this one, from that of steps done."""
    if count == 1:
        return step
    before = builder.emit(relax.op.multiply(step, relax.const(count, "int64")))
    return builder.emit(relax.op.add(before, relax.const(number, "int64")))
