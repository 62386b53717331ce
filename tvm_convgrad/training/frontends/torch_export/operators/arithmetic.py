# SPDX-License-Identifier: Apache-2.0
"""Sums, differences, products, quotients and bounds, of tensors and numbers of any type."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.activations import clamped
from tvm_convgrad.training.frontends.torch_export.places import type_name
from tvm_convgrad.training.ir.graph import element_type

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_OF_NUMBERS = {op.add: operator.add, op.multiply: operator.mul}


def or_logical(
    node: torch.fx.Node,
    importer: ExportedProgramImporter,
    arithmetic: Callable[..., relax.Expr],
    logical: Callable[..., relax.Expr],
) -> relax.Expr:
    """A sum or product; of booleans the logical operator that PyTorch takes it for."""
    operands = importer.retrieve_args(node)[:2]
    if all(isinstance(each, relax.Expr) and element_type(each) == "bool" for each in operands):
        return importer.block_builder.emit(logical(*operands))
    plain: relax.Expr = importer._binary_op(arithmetic, _OF_NUMBERS[arithmetic])(node)
    return plain


def is_any(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Whether an element is not 0: of all, or along axes. TVM's importer takes the maximum, 0 of (-1, 0).

    NaN differs from 0, but not in TVM's code.
    """
    x, *given = importer.retrieve_args(node)
    axes = given[0] if given else node.kwargs.get("dim")
    keep = bool(given[1] if len(given) > 1 else node.kwargs.get("keepdim", False))
    emit, dtype = importer.block_builder.emit, element_type(x)
    found = x if dtype == "bool" else emit(op.not_equal(x, relax.const(0, dtype)))
    if "float" in dtype:
        found = emit(op.logical_or(found, emit(op.isnan(x))))
    if axes is None or isinstance(axes, int) or len(axes):  # along no axis it is each element's own
        found = emit(op.max(emit(op.astype(found, "int8")), axes, keepdims=keep))
    return emit(op.astype(found, "bool"))


def differs(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x != y, which is true of NaN in PyTorch, and false in TVM's code."""
    found, emit = importer._binary_op(op.not_equal, operator.ne)(node), importer.block_builder.emit
    for operand in _floats(node, importer):
        found = emit(op.logical_or(found, emit(op.isnan(operand))))
    return found


def equals(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x == y, which is false of NaN; TVM takes it for true if both are the same tensor."""
    found, emit = importer._binary_op(op.equal, operator.eq)(node), importer.block_builder.emit
    for operand in _floats(node, importer)[:1]:
        found = emit(op.logical_and(found, emit(op.logical_not(emit(op.isnan(operand))))))
    return found


def _floats(node: torch.fx.Node, importer: ExportedProgramImporter) -> list[relax.Expr]:
    """The operands that are tensors of floats, each once."""
    x, y = importer.retrieve_args(node)[:2]
    tensors = [x] if x is y else [x, y]
    return [each for each in tensors if isinstance(each, relax.Expr) and "float" in element_type(each)]


def reversed_difference(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """y - x; TVM's importer takes a number y for a float32, whatever x is."""
    x, y = importer.retrieve_args(node)[:2]
    return importer.block_builder.emit(
        op.subtract(y if isinstance(y, relax.Expr) else relax.const(y, element_type(x)), x)
    )


def clamp(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Integers are clamped by comparisons: TVM's importer gives them an infinite bound where there is none.

    Clip from 0 to 6 is ReLU6, which has no gradient on its bounds.
    """
    x, *given = importer.retrieve_args(node)
    low, high = (given[at] if len(given) > at else node.kwargs.get(name) for at, name in enumerate(("min", "max")))
    emit, dtype = importer.block_builder.emit, element_type(x)
    if "int" not in dtype:
        if (low, high) == (0, 6):
            return clamped(importer.block_builder, x, relax.const(0.0, dtype), relax.const(6.0, dtype))
        return importer._clamp(node)
    x = x if low is None else emit(op.maximum(x, relax.const(int(low), dtype)))
    return x if high is None else emit(op.minimum(x, relax.const(int(high), dtype)))


def clamp_by_tensors(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Bounds that are tensors, which TVM's importer does not broadcast x against."""
    x, *given = importer.retrieve_args(node)
    bounds = dict(zip(("min", "max"), given, strict=False))
    bounds |= {name: importer.env[value] for name, value in node.kwargs.items() if value is not None}
    return clamped(importer.block_builder, x, bounds.get("min"), bounds.get("max"))


def divide(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Quotients, rounded down, to zero or not at all."""
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return floor_divide(node, importer)
    emit = importer.block_builder.emit
    dtype = type_name(node.meta["val"].dtype)
    inner = dtype if "float" in dtype else "float64"
    quotient = emit(op.divide(*_as(importer, importer.retrieve_args(node), inner)))
    quotient = quotient if mode is None else emit(op.trunc(quotient))
    return quotient if inner == dtype else emit(op.astype(quotient, dtype))


def _as(importer: ExportedProgramImporter, operands: Sequence[Any], dtype: str) -> list[relax.Expr]:
    """Tensors and numbers as tensors of a type."""
    return [
        importer.block_builder.emit(op.astype(operand, dtype))
        if isinstance(operand, relax.Var)
        else relax.const(operand, dtype)
        for operand in operands
    ]


def floor_divide(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Operands of different types, or numbers, brought to the type of the result."""
    emit, operands = importer.block_builder.emit, importer.retrieve_args(node)
    if not any(isinstance(operand, relax.Expr) and hasattr(operand.ty, "shape") for operand in operands):
        return operands[0] // operands[1]
    dtype = type_name(node.meta["val"].dtype)
    return emit(op.floor_divide(*_as(importer, operands, dtype)))


__all__ = [
    "clamp",
    "clamp_by_tensors",
    "divide",
    "floor_divide",
    "is_any",
    "or_logical",
    "reversed_difference",
]
