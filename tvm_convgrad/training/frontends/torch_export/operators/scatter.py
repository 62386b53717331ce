# SPDX-License-Identifier: Apache-2.0
"""Translations of PyTorch's operators that reduce values into a tensor at indices, or read its memory by strides."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import same_extent
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.free_extents import is_at_most
from tvm_convgrad.training.ir.graph import Extent, element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_REDUCTIONS = {
    "sum": "add",
    "add": "add",
    "mean": "add",
    "prod": "mul",
    "multiply": "mul",
    "amax": "max",
    "amin": "min",
}


def scatter(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x with values written at indices; of more values than indices the first are taken."""
    x, axis, places, values = importer.retrieve_args(node)
    if not static_shape(x):
        return importer._scatter(node)
    values = _beside(importer, values, static_shape(places))
    return importer.block_builder.emit(op.scatter_elements(x, places, values, axis, "update"))


def scatter_add(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x with values added at indices."""
    x, axis, places, values = importer.retrieve_args(node)
    return _scattered(importer, x, axis, places, values, "sum", True)


def scatter_reduce(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x with values reduced at indices, as `scatter_reduce` and `scatter` with a reduction."""
    x, axis, places, values, reduction, *rest = importer.retrieve_args(node)
    include = bool(rest[0] if rest else node.kwargs.get("include_self", True))
    return _scattered(importer, x, axis, places, values, str(reduction), include)


def index_reduce(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """A vector of indices for all rows along an axis."""
    x, axis, places, values, reduction = importer.retrieve_args(node)
    emit, shape = importer.block_builder.emit, list(static_shape(values))
    wide = [extent if number == axis % max(len(shape), 1) else 1 for number, extent in enumerate(shape)]
    places = emit(op.reshape(places, relax.ShapeExpr(wide)))
    places = emit(op.broadcast_to(places, relax.ShapeExpr(shape)))
    include = bool(node.kwargs.get("include_self", True))
    return _scattered(importer, x, axis, places, values, str(reduction), include)


def _scattered(
    importer: ExportedProgramImporter,
    x: relax.Expr,
    axis: int,
    places: relax.Expr,
    values: relax.Expr,
    reduction: str,
    include_self: bool,
) -> relax.Expr:
    """x with values reduced into it; without itself, what is at a place of one is not part of the reduction."""
    emit, shape, dtype = importer.block_builder.emit, list(static_shape(x)), element_type(x)
    if not shape:  # a scalar is a vector of one element
        x, places, values = (emit(op.reshape(each, relax.ShapeExpr([1]))) for each in (x, places, values))
    extents = list(static_shape(places))
    values = _beside(importer, values, extents)
    filled = relax.ShapeExpr(extents)
    if not include_self:
        neutral = emit(op.full(filled, relax.const(_neutral(reduction, dtype), dtype), dtype))
        x = emit(op.scatter_elements(x, places, neutral, axis, "update"))
    found = emit(op.scatter_elements(x, places, values, axis, _REDUCTIONS[reduction]))
    if reduction == "mean":
        start = emit((op.ones_like if include_self else op.zeros_like)(x))
        count = emit(op.scatter_elements(start, places, emit(op.ones(filled, dtype)), axis, "add"))
        count = emit(op.maximum(count, relax.const(1, dtype)))
        found = emit((op.divide if "float" in dtype else op.floor_divide)(found, count))
    return found if shape else emit(op.reshape(found, relax.ShapeExpr([])))


def _beside(importer: ExportedProgramImporter, values: relax.Expr, extents: Sequence[Extent]) -> relax.Expr:
    """The values that indices of these extents take: those beyond them are not read."""
    given = static_shape(values)
    if not all(is_at_most(extent, of_values) for extent, of_values in zip(extents, given, strict=True)):
        raise UnsupportedError(
            f"it takes {list(extents)} values of {list(given)}, which may be fewer; export without dynamic shapes, or "
            "number the samples by torch.arange(x.shape[0])"
        )
    # An extent that stays has to keep its name, for the gradient's shape.
    axes = [a for a, pair in enumerate(zip(given, extents, strict=True)) if not same_extent(*pair)]
    if not axes:
        return values
    ends = [extents[a] for a in axes]
    return importer.block_builder.emit(op.strided_slice(values, axes, [0] * len(axes), ends, [1] * len(axes)))


def _neutral(reduction: str, dtype: str) -> float | int:
    """The neutral element of a reduction."""
    if reduction in ("prod", "multiply"):
        return 1
    if reduction not in ("amax", "amin"):
        return 0
    if "float" in dtype:
        return -math.inf if reduction == "amax" else math.inf
    bounds = np.iinfo(dtype)
    return int(bounds.min if reduction == "amax" else bounds.max)


def as_strided(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Elements of a tensor's memory, read at the places that they have in the tensor."""
    emit, (places, size) = importer.block_builder.emit, _strided(node, *node.args[1:])
    flat = emit(op.reshape(importer.env[node.args[0]], relax.ShapeExpr([-1])))
    taken = emit(op.take(flat, relax.const(places, "int64"), 0))
    return emit(op.reshape(taken, relax.ShapeExpr(size)))


def as_strided_scatter(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """A tensor with other values at elements of its memory, as fill_diagonal_ writes them."""
    emit, (places, _) = importer.block_builder.emit, _strided(node, *node.args[2:])
    x, values = (importer.env[operand] for operand in node.args[:2])
    line, written = (emit(op.reshape(each, relax.ShapeExpr([-1]))) for each in (x, values))
    found = emit(op.scatter_elements(line, relax.const(places, "int64"), written, 0))
    return emit(op.reshape(found, x.ty.shape))


def _strided(
    node: torch.fx.Node, size: Sequence[int], steps: Sequence[int], storage_offset: int | None = None
) -> tuple[np.ndarray[Any, np.dtype[np.int64]], list[int]]:
    """Where the elements of a strided view are in the flattened tensor, and the view's extents."""
    source: Any = node.args[0].meta["val"]
    begin = node.kwargs.get("storage_offset") if storage_offset is None else storage_offset
    begin = source.storage_offset() if begin is None else begin
    if not all(isinstance(number, int) for number in (*size, *steps, begin, *source.shape, *source.stride())):
        raise UnsupportedError("it needs fixed extents; export without dynamic shapes, or write it as slices")
    held = _memory(source.shape, source.stride(), source.storage_offset())
    wanted = _memory(size, steps, begin)
    order = np.argsort(held, kind="stable")
    if len(np.unique(held)) != len(held):
        raise UnsupportedError("of an expanded tensor it is not imported; write it as slices, or call contiguous()")
    found = np.minimum(np.searchsorted(held, wanted, sorter=order), len(held) - 1)
    places = order[found]
    if not np.array_equal(held[places], wanted):
        raise UnsupportedError(
            "it uses memory outside of its tensor, of what that is a view of; write it as slices of the whole"
        )
    return places.astype("int64"), list(size)


def _memory(size: Any, steps: Any, begin: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The places in memory of a tensor's elements, in their order."""
    found = np.full((1,) * len(size), begin, "int64")
    for axis, (extent, step) in enumerate(zip(size, steps, strict=True)):
        shape = [1] * len(size)
        shape[axis] = extent
        found = found + (np.arange(extent, dtype="int64") * step).reshape(shape)
    return found.reshape(-1)


__all__ = ["as_strided", "as_strided_scatter", "index_reduce", "scatter", "scatter_add", "scatter_reduce"]
