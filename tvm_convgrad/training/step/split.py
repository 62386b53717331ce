# SPDX-License-Identifier: Apache-2.0
"""The functions of a step that any source of gradients has: the whole step, and the step in two.

    step(x..., target, lr, state)      -> (loss, predictions, state)
    gradients(x..., target, state)     -> (loss, predictions, flat gradients, new running statistics)
    apply(flat gradients, lr, state)   -> state

Between the two, gradients of several processes may be added up, clipped in another way, or measured. Both ways give the
same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.flat import FlatLayout
from tvm_convgrad.training.ir.graph import function_scope
from tvm_convgrad.training.step.module import State, emit_updates
from tvm_convgrad.training.step.optimizers import Optimizer
from tvm_convgrad.training.step.options import StepOptions

Fields: TypeAlias = Sequence[relax.Var]
"""The tensors of a state."""


@dataclass(frozen=True)
class Computed:
    """What a step computes before the update: `statistics` are the new values of all of the state's."""

    loss: relax.Expr
    prediction: relax.Expr
    gradients: Sequence[relax.Expr]
    statistics: Sequence[relax.Expr]


Computation: TypeAlias = Callable[[Fields], Computed]
"""Emits what a step computes, from the fields of the state."""


def flat_layout(state: State, source: str) -> FlatLayout:
    """Where the gradients of a state's parameters lie.

    Raises:
        UnsupportedError: a parameter that is not of float32.
    """
    parameters = state.schemas[: state.parameters]
    other = [schema for schema in parameters if schema.dtype != "float32"]
    if other:
        raise UnsupportedError(
            f"build_step: split puts all gradients into one float32 buffer, but {other[0].name!r} of {source} is "
            f"{other[0].dtype}; convert the model to float32, or leave split out."
        )
    return FlatLayout.of((schema.name, schema.shape) for schema in parameters)


def emit_step(
    builder: relax.BlockBuilder,
    leading: Sequence[relax.Var],
    computation: Computation,
    optimizer: Optimizer,
    layout: State,
    options: StepOptions,
    attributes: dict[str, int] | None = None,
) -> None:
    """step(leading, lr, state) -> (loss, predictions, new state), where the inputs and the target lead."""
    rate, state = _rate(), relax.Var("state", layout.type)
    with function_scope(builder, "step", [*leading, rate, state], attributes):
        with builder.dataflow():
            fields = layout.fields(builder, state)
            found = computation(fields)
            # Not fused with updates, as between `gradients` and `apply`: LLVM contracts products and sums of a kernel.
            gradients = [_apart(builder, each) for each in found.gradients] if options.split else found.gradients
            new_state = emit_updates(builder, optimizer, layout, fields, gradients, found.statistics, rate, options)
            output = builder.emit_output(relax.Tuple([found.loss, found.prediction, new_state]))
        builder.emit_func_output(output)


def emit_gradients(
    builder: relax.BlockBuilder,
    leading: Sequence[relax.Var],
    computation: Computation,
    layout: State,
    attributes: dict[str, int] | None = None,
) -> None:
    """gradients(leading, state) -> (loss, predictions, tuple of gradients, new running statistics)."""
    state = relax.Var("state", layout.type)
    with function_scope(builder, "gradients", [*leading, state], attributes):
        with builder.dataflow():
            found = computation(layout.fields(builder, state))
            kept = layout.schemas[layout.parameters : layout.parameters + layout.statistics]
            moved = [new for new, schema in zip(found.statistics, kept, strict=True) if schema.role == "running_stat"]
            parts = [found.loss, found.prediction, relax.Tuple(list(found.gradients)), relax.Tuple(moved)]
            output = builder.emit_output(relax.Tuple(parts))
        builder.emit_func_output(output)


def emit_apply(
    builder: relax.BlockBuilder, flat: FlatLayout, optimizer: Optimizer, layout: State, options: StepOptions
) -> None:
    """apply(flat gradients, lr, state) -> new state, whose statistics are the old ones."""
    buffer = relax.Var("gradients", relax.TensorType((flat.size,), "float32"))
    rate, state = _rate(), relax.Var("state", layout.type)
    with function_scope(builder, "apply", [buffer, rate, state]):
        with builder.dataflow():
            fields = layout.fields(builder, state)
            gradients = [part_of(builder, buffer, entry.shape, entry.offset) for entry in flat.entries]
            statistics = fields[layout.parameters : layout.parameters + layout.statistics]
            new_state = emit_updates(builder, optimizer, layout, fields, gradients, statistics, rate, options)
            output = builder.emit_output(new_state)
        builder.emit_func_output(output)


def part_of(builder: relax.BlockBuilder, buffer: relax.Expr, shape: Sequence[int], offset: int) -> relax.Var:
    """The tensor of these extents that begins `offset` float32 elements after the begin of a buffer, in its memory."""
    view = builder.emit(relax.op.memory.view(buffer, list(shape), "float32", offset * 4))
    return builder.emit(relax.op.memory.ensure_zero_offset(view))  # kernels take the address alone


def _apart(builder: relax.BlockBuilder, tensor: relax.Expr) -> relax.Var:
    """A tensor as its own view: it takes no time, but what computes the tensor is not fused with its readers."""
    return builder.emit(relax.op.memory.ensure_zero_offset(tensor))


def _rate() -> relax.Var:
    return relax.Var("lr", relax.TensorType((), "float32"))
