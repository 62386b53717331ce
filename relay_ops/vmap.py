# SPDX-License-Identifier: Apache-2.0
"""vmap of the family on Relay expressions: legalize.batching with the calls of this IR. Shapes must be numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tvm import relay

from legalize.batching import Level, UnbatchedCall, vmap
from relay_ops.builder import RelayBuilder, Tensor
from relay_ops.ir import RelayProver, call_of, spec_of
from relay_ops.ops import type_of
from tvm_convgrad.core.arguments import integers, make_attributes, missing, problem_of_call
from tvm_convgrad.core.catalogue import BACKWARD_DATA, FORWARD, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.transposed import transposed_call
from tvm_convgrad.core.type_relation import (
    ConvAttributes,
    TensorSpec,
    infer_backward_data,
    infer_backward_weight,
    result_dtype,
)


def vmap_call(
    entry: OpEntry,
    levels: Sequence[Level],
    operands: Sequence[relay.Expr],
    *,
    data_shape: Sequence[int] | None = None,
    grad_layout: str | None = None,
    data_layout: str | None = None,
    **attributes: Any,
) -> relay.Expr:
    """A call of the family under vmap.

    Args:
        entry: the operator.
        levels: outermost first.
        operands: Relay tensors of known, static types, batch axes included.
        data_shape: dgrad only, of one result, without batch axes.
        grad_layout, data_layout, attributes: those of the operator, batch axes excluded.

    Raises:
        ProblemError, DTypeError: the convolutions do not exist, or the operands disagree about the batch.
        UnsupportedError: the type of an operand is not known, or an extent of it is Any.
    """
    values = {name: _tensor(value, name, entry) for name, value in zip(entry.direction.operands, operands, strict=True)}
    specs = {
        name: TensorSpec(_unbatched(value, name, entry, levels), entry.rank + 2, value.dtype)
        for name, value in values.items()
    }
    shapes = {name: tuple(spec.shape or ()) for name, spec in specs.items()}
    if entry.direction is BACKWARD_DATA:
        if data_shape is None:
            raise missing(entry, "data_shape")
        shapes["data"] = integers(data_shape)
    if entry.direction is FORWARD and grad_layout is None:
        grad_layout = data_layout
    made = make_attributes(
        entry,
        data_shape=lambda: shapes["data"],
        weight_shape=lambda: shapes["weight"],
        grad_layout=grad_layout,
        data_layout=data_layout,
        **attributes,
    )
    problem = _problem(entry, made, specs, shapes)

    def call(unbatched: UnbatchedCall) -> Tensor:
        folded = _folded(problem, unbatched, dict(zip(values, unbatched.operands, strict=True)))
        return _call(entry, folded, unbatched.operands)

    layouts = {name: made.layout(name) for name in ("grad", "data", "weight")}
    one = shapes["data"] if entry.direction is BACKWARD_DATA else None
    result: Tensor = vmap(RelayBuilder(), entry.direction, levels, values, layouts, made.groups, one, call)
    return result.expr


def transposed_arguments(
    rank: int, levels: Sequence[Level], data: relay.Expr, weight: relay.Expr, **attributes: Any
) -> dict[str, Any]:
    """The arguments of dgrad that make it a transposed convolution; see core.transposed.transposed_call.

    Args:
        levels: batch axes of "grad" (the data) and "weight".
        data, weight: with their batch axes.
    """
    entry = OpEntry(BACKWARD_DATA, rank)

    def shapes() -> tuple[Sequence[int], Sequence[int]]:
        first, second = (
            _unbatched(_tensor(value, name, entry), name, entry, levels)
            for name, value in (("grad", data), ("weight", weight))
        )
        return first, second

    return vars(transposed_call(rank, shapes, **attributes))


def _tensor(value: relay.Expr, name: str, entry: OpEntry) -> Tensor:
    spec = spec_of(type_of(value), name, entry.name)
    shape = None if spec is None else spec.shape
    if spec is None or shape is None or not all(isinstance(extent, int) for extent in shape):
        raise UnsupportedError(
            f"{entry.name}: {name} is {type_of(value)}; under vmap in Relay its extents must be numbers: run "
            "relay.transform.InferType first, and give its variables static types in the place of Any"
        )
    return Tensor(value, tuple(shape), str(spec.dtype))


def _unbatched(value: Tensor, name: str, entry: OpEntry, levels: Sequence[Level]) -> tuple[int, ...]:
    """The shape of an operand without its batch axes."""
    dims = [level[name] for level in levels]
    shape = list(value.shape)
    wanted = entry.rank + 2 + sum(dim is not None for dim in dims)
    if len(shape) != wanted:
        raise ProblemError(f"{entry.name}: {name} has {len(shape)} axes; with the batch axes {dims} it has {wanted}")
    for dim in dims:
        if dim is not None:
            del shape[dim]
    return tuple(shape)


def _problem(
    entry: OpEntry, made: ConvAttributes, specs: dict[str, TensorSpec], shapes: dict[str, tuple[int, ...]]
) -> ConvProblem:
    """One of the convolutions, checked, so that errors name its own extents."""
    dtypes = {name: str(spec.dtype) for name, spec in specs.items()}
    if entry.direction is FORWARD:
        out_dtype = result_dtype(made, list(specs.values()))
        return ConvProblem.from_shapes(
            shapes["data"],
            shapes["weight"],
            strides=made.strides,
            padding=made.padding,
            dilation=made.dilation,
            groups=made.groups,
            data_layout=made.data_layout,
            kernel_layout=made.kernel_layout,
            grad_layout=made.grad_layout,
            dtypes=(dtypes["data"], dtypes["weight"], str(out_dtype)),
        )
    if entry.direction is BACKWARD_DATA:
        infer_backward_data(made, specs["grad"], specs["weight"], shapes["data"], RelayProver())
    else:
        infer_backward_weight(made, specs["grad"], specs["data"], RelayProver())
    return problem_of_call(entry.direction, made, shapes, dtypes)


def _folded(problem: ConvProblem, call: UnbatchedCall, operands: dict[str, Tensor]) -> ConvProblem:
    """The problem of the unbatched call, whose extents its operands have."""
    data = tuple(call.data_shape) if call.data_shape is not None else operands["data"].shape
    x = dict(zip(problem.data_layout, data, strict=True))
    if "weight" in operands:
        out_channels = operands["weight"].shape[problem.kernel_layout.index("O")]
    else:
        out_channels = operands["grad"].shape[problem.grad_layout.index("C")]
    return replace(problem, batch=x["N"], in_channels=x["C"], out_channels=out_channels, groups=call.groups)


def _call(entry: OpEntry, problem: ConvProblem, operands: Sequence[Tensor]) -> Tensor:
    """The call; stock convolutions take operands of one type, and sum in the type of their result."""
    shape, dtype = problem.tensors[entry.direction.result]
    extents = tuple(int(extent) for extent in shape)
    if entry.direction is not FORWARD:
        return Tensor(call_of(entry.direction, problem, *(operand.expr for operand in operands)), extents, dtype)
    builder, summed = RelayBuilder(), problem.accumulator
    wide = replace(problem, data_dtype=summed, kernel_dtype=summed, grad_dtype=summed)
    first, second = (builder.cast(operand, summed) for operand in operands)
    result: Tensor = builder.cast(Tensor(call_of(FORWARD, wide, first.expr, second.expr), extents, summed), dtype)
    return result
