# SPDX-License-Identifier: Apache-2.0
"""Operands of an operator as PyTorch computes with them: in one type, and multiplied by alpha.

TVM's importer gives a number the type of the tensor beside it: of `x.byte() / 255.0` and `positions * 0.5` it would
make integer arithmetic, and of `torch.add(x, y, alpha=2)` the plain sum, without a word. Here tensors of integers or
booleans become floats where the result is one, other mixed operands are of one type, and alpha is multiplied, before an
operator is translated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.dtypes import SHORT_FLOATS, wide_dtype
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.places import name_of, type_name
from tvm_convgrad.training.ir.graph import element_type

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
_ARITHMETIC = frozenset(
    {"add", "sub", "rsub", "mul", "div", "true_divide", "floor_divide", "remainder", "fmod", "pow", "lerp", "atan2"}
    | {"maximum", "minimum", "fmax", "fmin", "clamp", "clamp_min", "clamp_max", "addcmul", "addcdiv"}
    | {"where", "masked_fill", "cat", "stack", "sum", "prod", "cumsum", "cumprod"}
)
_CONVERSIONS = frozenset({"_to_copy", "to", "getitem"})
_SCALED = {"add": 1, "sub": 1, "rsub": 0}
"""The position of the operand that alpha multiplies."""
_FUNCTIONS = frozenset(
    {"exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "rsqrt", "reciprocal", "sigmoid", "erf", "erfinv", "silu"}
    | {"sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "tanh", "asinh", "acosh", "atanh", "softplus"}
)
"""Functions of one tensor, which give floats of integers."""


def with_operands_apart(program: torch.export.ExportedProgram) -> None:
    """Change a program so that no sum or difference multiplies one of two equal operands by alpha: it is a product."""
    import torch

    for node in list(program.graph.nodes):
        place, alpha = _SCALED.get(_packet(node)), node.kwargs.get("alpha", 1)
        if node.op != "call_function" or place is None or alpha == 1 or node.args[0] is not node.args[1]:
            continue
        with program.graph.inserting_before(node):
            product = program.graph.call_function(torch.ops.aten.mul.Tensor, (node.args[place], alpha))
        product.meta = dict(node.meta)
        node.update_arg(place, product)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}


@contextmanager
def promoted(node: torch.fx.Node, importer: ExportedProgramImporter) -> Iterator[None]:
    """The operands of an operator in one type, and multiplied by alpha, as the importer sees them under this context.

    16-bit floats are float32 here, as PyTorch computes with them on CPUs; `as_declared` rounds the result.
    """
    emit, arguments, kept = importer.block_builder.emit, node.args, {}
    for operand, wanted in _wanted_types(node).items():
        tensor = importer.env[operand]
        if element_type(tensor) != wanted:
            kept[operand] = tensor
            importer.env[operand] = emit(op.astype(tensor, wanted))
    alpha, place = node.kwargs.get("alpha", 1), _SCALED.get(_packet(node))
    if place is not None and alpha != 1:
        scaled = node.args[place]
        if isinstance(scaled, int | float):
            node.update_arg(place, scaled * alpha)
        else:
            tensor = importer.env[scaled]
            kept.setdefault(scaled, tensor)
            importer.env[scaled] = emit(op.multiply(tensor, relax.const(alpha, element_type(tensor))))
    try:
        yield
    finally:
        importer.env.update(kept)
        node.args = arguments


def as_declared(node: torch.fx.Node, result: Any, importer: ExportedProgramImporter) -> Any:
    """An operator's result in the floating type that PyTorch gives it: TVM's products of 16-bit floats are float32.

    bfloat16 stays float32, rounded to its digits: TVM cannot lower all that a model may do with tensors of bfloat16.

    Raises:
        UnsupportedError: only one of the two is a float, so that all that follows would be wrong.
    """
    given = node.meta.get("val")
    dtype = str(getattr(getattr(result, "ty", None), "dtype", "") or "")
    if not hasattr(given, "dtype") or not dtype:
        return result
    is_float = dtype.startswith(("float", "bfloat"))
    emit, declared = importer.block_builder.emit, type_name(given.dtype)
    if given.dtype.is_floating_point != is_float:
        raise UnsupportedError(
            f"its result has the type {declared} in PyTorch but {dtype} in TVM; convert them to one type"
        )
    if is_float and dtype != declared:
        result = emit(op.astype(result, declared))
    return emit(op.astype(result, "float32")) if declared == "bfloat16" else result


def _wanted_types(node: torch.fx.Node) -> dict[torch.fx.Node, str]:
    """The types to which an operator's operands are converted; others stay as they are."""
    computed = _type_of_operands(node)
    types = {} if computed is None else dict.fromkeys(_operands(node), type_name(computed))
    if _packet(node) not in _CONVERSIONS:
        tensors = [each for each in node.all_input_nodes if hasattr(each.meta.get("val"), "dtype")]
        types |= {
            each: "float32" for each in tensors if types.get(each, type_name(each.meta["val"].dtype)) in SHORT_FLOATS
        }
    return {each: wide_dtype(dtype) for each, dtype in types.items()}


def _type_of_operands(node: torch.fx.Node) -> torch.dtype | None:
    """The type in which an operator computes, or None if its operands need not be of one type."""
    packet = _packet(node)
    given = node.meta.get("val")
    if not hasattr(given, "dtype") or packet not in _COMPARISONS | _ARITHMETIC | _FUNCTIONS:
        return None
    if packet not in _COMPARISONS:
        result: torch.dtype = given.dtype
        return result
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND, elementwise_dtypes

    values = [each.meta["val"] if hasattr(each, "meta") else each for each in node.args[:2]]
    both: torch.dtype = elementwise_dtypes(*values, type_promotion_kind=ELEMENTWISE_TYPE_PROMOTION_KIND.DEFAULT)[1]
    return both


def _operands(node: torch.fx.Node) -> list[torch.fx.Node]:
    """The tensors that are computed with: all but the conditions of `where` and `masked_fill`."""
    packet = _packet(node)
    arguments = list(node.args)
    if packet in ("cat", "stack"):
        arguments = list(node.args[0])
    elif packet == "where":
        arguments = arguments[1:]
    elif packet == "masked_fill":
        del arguments[1]
    return [each for each in arguments if hasattr(each, "meta") and hasattr(each.meta.get("val"), "dtype")]


def _packet(node: torch.fx.Node) -> str:
    """An operator's name without its overload."""
    return name_of(node).partition(".")[0]


__all__ = ["as_declared", "promoted", "with_operands_apart"]
