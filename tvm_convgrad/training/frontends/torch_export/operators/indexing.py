# SPDX-License-Identifier: Apache-2.0
"""Reads and writes by indices: select, x[indices], index_select, index_put and embeddings."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax, tirx
from tvm.relax import op

from relax_ops.compat import arithmetic
from tvm_convgrad.codegen.loops import dtype_of
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.places import type_name
from tvm_convgrad.training.ir.counting import count_of
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
    if isinstance(end, int) and 0 < end < sys.maxsize:
        raise UnsupportedError(
            f"it ends at place {end} of an axis whose extent, {extent}, may be less; export without dynamic shapes, or "
            f"index by torch.arange({end})"
        )
    if isinstance(given[0], int) and end in (None, sys.maxsize):
        return importer._slice(node)
    raise UnsupportedError(
        f"its places {begin} and {end} are not in bounds of an axis of {extent} for each batch; export without dynamic "
        "shapes"
    )


def written_part(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x with other values at [begin:end:step] along an axis, by TVM's importer; not at places that the batch says."""
    x, _, axis, begin, end = [*importer.retrieve_args(node), *(0, None, None)[len(node.args) - 2 :]][:5]
    extent = static_shape(x)[axis]
    if any(not (place is None or isinstance(place, int)) for place in (begin, end)) or not (
        isinstance(extent, int) or (begin in (None, 0) and end in (None, sys.maxsize))
    ):
        raise UnsupportedError(
            f"it writes to places {begin or 0} to {extent if end is None else end} of an axis of {extent}; join the "
            "parts by torch.cat, or export without dynamic shapes"
        )
    return importer._slice_scatter(node)


def _place_in_bounds(place: Extent, extent: Extent) -> Extent | None:
    """A place as one from 0 to the extent, a negative one counted from the end; None where batches differ."""
    if is_at_most(extent, place):
        return extent
    found = place if is_at_most(0, place) else place + extent if is_at_most(place, -1) else None
    return found if found is not None and is_at_most(0, found) and is_at_most(found, extent) else None


def is_at_most(low: Extent, high: Extent) -> bool:
    """Whether one place is never behind another, whatever the free extents are, which are 1 at least."""
    difference = high - low
    if isinstance(difference, int):
        return difference >= 0
    analyzer = arithmetic.Analyzer()
    for variable in tirx.analysis.undefined_vars(difference):
        one, most = (tirx.const(number, dtype_of(variable)) for number in (1, 2**31 - 1))
        analyzer.bind(variable, tvm.ir.Range.from_min_extent(one, most))
    return bool(analyzer.can_prove(difference >= 0))


def extent_of(importer: ExportedProgramImporter, x: relax.Expr, axis: int, dtype: str) -> relax.Expr:
    """The extent of an axis as a tensor of one integer, also where it is a symbol."""
    x = importer.block_builder.emit(op.astype(x, "float32")) if element_type(x) == "bool" else x
    count = count_of(importer.block_builder, x, [axis])
    if isinstance(count, int):
        return relax.const(count, dtype)
    return importer.block_builder.emit(op.astype(count, dtype))


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
        dtype = element_type(tensors[0])
        self.places = _wrapped(importer, tensors[0], extent_of(importer, x, indexed[0], dtype))
        for axis, places in zip(indexed[1:], tensors[1:], strict=True):
            extent = extent_of(importer, x, axis, dtype)
            more = _wrapped(importer, emit(op.astype(places, dtype)), extent)
            self.places = emit(op.add(emit(op.multiply(self.places, extent)), more))
        self.count = math.prod(shape[axis] for axis in indexed)
        self._emit = emit

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
    "is_at_most",
    "part",
    "select",
    "triangle",
    "written_part",
]
