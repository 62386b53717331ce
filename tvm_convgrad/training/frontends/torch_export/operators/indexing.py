# SPDX-License-Identifier: Apache-2.0
"""Reads and writes by indices: select, x[indices], index_select, index_put and embeddings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.free_extents import is_at_most
from tvm_convgrad.training.frontends.torch_export.places import type_name
from tvm_convgrad.training.ir import counting
from tvm_convgrad.training.ir.graph import Extent, element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def select(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x[..., index, ...] as a slice of one element; TVM's importer makes a `take`, which reads out of bounds at -1."""
    x, axis, index = importer.retrieve_args(node)
    emit, shape = importer.block_builder.emit, static_shape(x)
    axis %= len(shape)
    begin = shape[axis] + index if isinstance(index, int) and index < 0 else index
    if not isinstance(shape[axis], int) and not (is_at_most(0, begin) and is_at_most(begin + 1, shape[axis])):
        raise UnsupportedError(
            f"it reads place {index} of an axis of a free extent, {shape[axis]}, which may be less; export with the "
            "least one stated, torch.export.Dim(name, min=...)"
        )
    return emit(op.squeeze(emit(op.strided_slice(x, [axis], [begin], [begin + 1], assume_inbound=True)), [axis]))


def part(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x[begin:end:step] along an axis; of an axis whose extent is free, if the places are known to be in bounds.

    With numbers for places TVM's importer does it. It clamps symbols by conditions, which no shape may have.
    """
    x, axis, begin, end, step = [*importer.retrieve_args(node), *(0, None, None, 1)[len(node.args) - 1 :]][:5]
    if axis < 0:  # TVM's topi takes no negative axis of a tensor with a free extent
        axis += len(static_shape(x))
        node.update_arg(1, axis)
    extent = static_shape(x)[axis]
    if isinstance(extent, int) and all(place is None or isinstance(place, int) for place in (begin, end)):
        return importer._slice(node)
    given = (0 if begin is None else begin, extent if end is None else end)
    first, last = (_place_in_bounds(place, extent) for place in given)
    if first is not None and last is not None and is_at_most(first, last):
        if isinstance(first, int) and first == 0 and last is extent and step == 1:
            return x
        emit = importer.block_builder.emit
        return emit(op.strided_slice(x, [axis], [first], [last], [step], assume_inbound=True))
    if isinstance(given[0], int) and end in (None, sys.maxsize):
        return importer._slice(node)
    if isinstance(end, int) and 0 < end < sys.maxsize:
        raise UnsupportedError(
            f"it ends at place {end} of an axis of a free extent, {extent}, which may be less; export with the least "
            f"one stated, torch.export.Dim(name, min={end}), or index by torch.arange({end})"
        )
    raise UnsupportedError(
        f"it reads places {begin or 0} to {end} of an axis of {extent}, which are not in bounds for each value of free "
        "extents; export with these values stated, torch.export.Dim(name, min=..., max=...)"
    )


def written_part(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x with other values at [begin:end:step] along an axis, by TVM's importer; not at places that the batch says."""
    x, _, axis, begin, end, step = [*importer.retrieve_args(node), *(0, None, None, 1)[len(node.args) - 2 :]][:6]
    extent = static_shape(x)[axis]
    if any(not (place is None or isinstance(place, int)) for place in (begin, end)) or not (
        isinstance(extent, int) or (begin in (None, 0) and end in (None, sys.maxsize) and step == 1)
    ):
        by = "" if step == 1 else f" by {step}"
        raise UnsupportedError(
            f"it writes to places {begin or 0} to {extent if end in (None, sys.maxsize) else end}{by} of an axis of "
            f"{extent}; join the parts by torch.cat, or export without dynamic shapes"
        )
    return importer._slice_scatter(node)


def _place_in_bounds(place: Extent, extent: Extent) -> Extent | None:
    """A place as one from 0 to the extent, a negative one counted from the end; None where batches differ."""
    if is_at_most(extent, place):
        return extent
    found = place if is_at_most(0, place) else place + extent if is_at_most(place, -1) else None
    return found if found is not None and is_at_most(0, found) and is_at_most(found, extent) else None


def extent_of(importer: ExportedProgramImporter, x: relax.Expr, axis: int, dtype: str) -> relax.Expr:
    """The extent of an axis as a tensor of one integer, also where it is a symbol."""
    extent = static_shape(x)[axis]
    if isinstance(extent, int):
        return relax.const(extent, dtype)
    count = counting.extent_of(importer.block_builder, x, axis)
    return count if dtype == "int64" else importer.block_builder.emit(op.astype(count, dtype))


def _wrapped(importer: ExportedProgramImporter, places: relax.Expr, extent: relax.Expr) -> relax.Expr:
    """Indices, of which negative ones count from the end, as indices from the front."""
    emit, dtype = importer.block_builder.emit, element_type(places)
    last = emit(op.add(places, extent))
    return emit(op.where(emit(op.less(places, relax.const(0, dtype))), last, places))


def index_select(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Slices of x along an axis, by a vector of places."""
    x, axis, places = importer.retrieve_args(node)
    return importer.block_builder.emit(op.take(x, places, axis))


def embedding(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Rows of a table; no gradient goes to the row `padding_idx`; -1 stands for none."""
    emit, given = importer.block_builder.emit, importer.retrieve_args(node)
    table, places, padding, by_frequency = [*given, *(-1, False)[len(given) - 2 :]][:4]
    if by_frequency:
        raise UnsupportedError("scale_grad_by_freq is not supported; leave it out of the embedding")
    rows = emit(op.take(table, places, 0))
    if padding < 0:
        return rows
    is_padding = emit(op.expand_dims(op.equal(places, relax.const(padding, element_type(places))), -1))
    return emit(op.where(is_padding, emit(op.grad.no_grad(rows)), rows))


class _Indexing:
    """x[indices of some axes, broadcast against each other]: those axes made adjacent and flattened to one.

    Each index is checked in its own axis: in the flattened one, that of a row too far would be of the next sample.
    `front` is the permutation that brings them together, at `axis`; `places` are numbers along the flattened one.
    """

    def __init__(
        self, importer: ExportedProgramImporter, x: relax.Expr, given: Sequence[relax.Expr | None], operator: str
    ) -> None:
        emit, shape = importer.block_builder.emit, static_shape(x)
        indexed = [axis for axis, places in enumerate(given) if places is not None]
        tensors = [places for places in given if places is not None]
        if any(element_type(places) == "bool" for places in tensors):
            raise UnsupportedError(
                f"aten.{operator} by a mask has a result whose extents depend on the data; use torch.where or multiply "
                "by the mask"
            )
        together = indexed == list(range(indexed[0], indexed[-1] + 1))
        self.axis = indexed[0] if together else 0
        rest = [axis for axis in range(len(shape)) if axis not in indexed]
        self.front = [*rest[: self.axis], *indexed, *rest[self.axis :]]
        self.shape, self.extents = shape, [shape[axis] for axis in self.front]
        self.rest = (self.extents[: self.axis], self.extents[self.axis + len(indexed) :])
        self.count = math.prod(shape[axis] for axis in indexed)
        self._emit = emit
        if len(indexed) == 1:
            extent = extent_of(importer, x, indexed[0], element_type(tensors[0]))
            self.places = _wrapped(importer, tensors[0], extent)
        else:
            self.places = self._joined(importer, x, indexed, tensors)

    def _joined(
        self, importer: ExportedProgramImporter, x: relax.Expr, indexed: Sequence[int], tensors: Sequence[relax.Expr]
    ) -> relax.Expr:
        """The number of an element along all indexed axes: behind the last one, if an index is not in its axis."""
        emit, dtype = self._emit, "int64"
        zero = relax.const(0, dtype)
        total = number = valid = None
        for axis, places in zip(indexed, tensors, strict=True):
            extent = extent_of(importer, x, axis, dtype)
            wide = places if element_type(places) == dtype else emit(op.astype(places, dtype))
            place = _wrapped(importer, wide, extent)
            inside = emit(op.logical_and(emit(op.greater_equal(place, zero)), emit(op.less(place, extent))))
            valid = inside if valid is None else emit(op.logical_and(valid, inside))
            number = place if number is None else emit(op.add(emit(op.multiply(number, extent)), place))
            total = extent if total is None else emit(op.multiply(total, extent))
        return emit(op.where(valid, number, total))

    def flattened(self, x: relax.Expr) -> relax.Expr:
        """The tensor with the indexed axes as one."""
        if self.front != sorted(self.front):
            x = self._emit(op.permute_dims(x, self.front))
        before, after = self.rest
        wide = [*before, self.count, *after]
        return x if len(wide) == len(self.shape) else self._emit(op.reshape(x, relax.ShapeExpr(wide)))

    def restored(self, x: relax.Expr) -> relax.Expr:
        """The reverse of `flattened`."""
        x = self._emit(op.reshape(x, relax.ShapeExpr(self.extents)))
        return self._emit(op.permute_dims(x, [int(place) for place in np.argsort(self.front)]))


def index(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """TVM's importer takes the outer product of indices that belong together, such as those of an unfold."""
    x, given = importer.retrieve_args(node)
    indexing = _Indexing(importer, x, given, "index.Tensor")
    return importer.block_builder.emit(op.take(indexing.flattened(x), indexing.places, indexing.axis))


def index_put(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x[places] = values, or += values; by a mask, one value wherever it is true."""
    x, given, values, *accumulate = importer.retrieve_args(node)
    emit = importer.block_builder.emit
    mask = given[0]
    if len(given) == 1 and element_type(mask) == "bool" and all(extent == 1 for extent in static_shape(values)):
        return _where_masked(importer, x, mask, values, bool(accumulate and accumulate[0]))
    indexing = _Indexing(importer, x, given, "index_put.default")
    before, after = indexing.rest
    places = static_shape(indexing.places)
    count = math.prod(places)
    wide = [*before, count, *after]
    values = emit(op.broadcast_to(values, relax.ShapeExpr([*before, *places, *after])))
    values = emit(op.reshape(values, relax.ShapeExpr(wide)))
    line = emit(op.reshape(indexing.places, relax.ShapeExpr([*[1] * len(before), count, *[1] * len(after)])))
    reduction = "add" if accumulate and accumulate[0] else "update"
    found = op.scatter_elements(
        indexing.flattened(x), emit(op.broadcast_to(line, relax.ShapeExpr(wide))), values, indexing.axis, reduction
    )
    return indexing.restored(emit(found))


def _where_masked(
    importer: ExportedProgramImporter, x: relax.Expr, mask: relax.Expr, value: relax.Expr, accumulate: bool
) -> relax.Expr:
    """x with one value where a mask of its leading axes is true, as `x[mask] = 0`, or with that added there."""
    emit = importer.block_builder.emit
    shape, ndim = static_shape(mask), len(static_shape(x))
    wide = emit(op.reshape(mask, relax.ShapeExpr([*shape, *[1] * (ndim - len(shape))])))
    value = emit(op.reshape(value, relax.ShapeExpr([])))
    return emit(op.where(wide, emit(op.add(x, value)) if accumulate else value, x))


def triangle(node: torch.fx.Node, indices: Callable[..., tuple[np.ndarray[Any, Any], ...]]) -> relax.Expr:
    """The rows and columns of the elements in a triangle of a matrix."""
    height, width, *offset = node.args
    found = indices(height, offset[0] if offset else node.kwargs.get("offset", 0), width)
    dtype = type_name(node.meta["val"].dtype)
    return relax.const(np.stack(found).astype(dtype), dtype)


__all__ = [
    "embedding",
    "extent_of",
    "index",
    "index_put",
    "index_select",
    "part",
    "select",
    "triangle",
    "written_part",
]
