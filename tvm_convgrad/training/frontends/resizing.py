# SPDX-License-Identifier: Apache-2.0
"""Resizes of images, volumes and sequences as linear maps: one matrix for each axis.

A frontend computes the matrices by the rules of its format. Where relax.image.resize2d computes the same map it is
taken, since TVM lowers it to one loop; otherwise the matrices are applied axis by axis. An axis of a free extent is
enlarged by a whole factor: the matrices of all extents then have the same few weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from relax_ops.gradients.common import slice_axis
from relax_ops.gradients.separable import apply_transposed
from relax_ops.rules.resize import resize_matrix
from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.core.errors import UnsupportedError


@dataclass(frozen=True)
class Resize2d:
    """Attributes of relax.image.resize2d in the layout NCHW."""

    method: str
    coordinates: str
    rounding: str = "round"


def resized(
    builder: relax.BlockBuilder,
    data: relax.Expr,
    maps: Mapping[int, NDArray[np.float64]],
    candidate: Resize2d | None = None,
) -> relax.Expr:
    """Y = A·X along each axis of `maps`, whose matrices A have the shape (extent of the result, extent of the data).

    Args:
        builder: what calls are emitted into.
        data: a tensor whose extents along these axes are known.
        maps: the matrices; unit matrices cost nothing.
        candidate: a resize2d that may compute the maps along the last two of four axes.
    """
    maps = {axis: matrix for axis, matrix in maps.items() if not _is_unit(matrix)}
    dtype = str(data.ty.dtype)
    extents = known_extents(data)
    if maps and candidate is not None and len(extents) == 4 and set(maps) <= {2, 3}:
        sizes = _sizes(extents[2:], [maps.get(2), maps.get(3)], candidate)
        if sizes is not None:
            return op.image.resize2d(
                data,
                sizes,
                layout="NCHW",
                method=candidate.method,
                coordinate_transformation_mode=candidate.coordinates,
                rounding_method=candidate.rounding,
            )
    for matrix in maps.values():
        _check_type(dtype, matrix)
    for axis, matrix in maps.items():
        data = builder.emit(apply_transposed(builder, data, axis, matrix.T))
    return data


def _check_type(dtype: str, weights: NDArray[np.float64]) -> None:
    """Refuse weights other than 0 and 1 of integers, in whose type they would be 0."""
    if dtype.startswith(("int", "uint", "bool")) and not np.isin(weights, (0, 1)).all():
        raise UnsupportedError(
            f"a resize of {dtype} takes weighted means of integers; cast its operand to float32 before, or resize to "
            "the nearest element"
        )


_PROBES = (1, 2, 3, 9, 10)
"""Extents whose matrices are compared; the middle of the largest is free of borders."""


@dataclass(frozen=True, eq=False)
class Enlargement:
    """Y[factor*i + p] = sum over o of weights[p, o] * X[i + first + o], where X is continued by its border elements.

    Attributes:
        first: the smallest offset.
        weights: shape (factor, number of offsets).
    """

    first: int
    weights: NDArray[np.float64]

    @classmethod
    def of(cls, matrix: Callable[[int], NDArray[np.float64]], factor: int) -> Enlargement | None:
        """The one whose matrices for extents of the data `matrix` gives; None if it is not of this form."""
        middle = _PROBES[-1] // 2
        rows = matrix(_PROBES[-1])[middle * factor : (middle + 1) * factor]
        (used,) = np.nonzero(np.abs(rows).max(0, initial=0))
        if not used.size:
            return None
        found = cls(int(used[0]) - middle, rows[:, used[0] : used[-1] + 1])
        same = all(np.allclose(matrix(each), found.matrix(each), rtol=0, atol=1e-6) for each in _PROBES)
        return found if same else None

    def matrix(self, extent: int) -> NDArray[np.float64]:
        """A with Y = A·X for data of this extent."""
        factor, taps = self.weights.shape
        result = np.zeros((extent, factor, extent))
        for place in range(extent):
            for tap in range(taps):
                result[place, :, min(max(place + self.first + tap, 0), extent - 1)] += self.weights[:, tap]
        return result.reshape(extent * factor, extent)

    def apply(self, builder: relax.BlockBuilder, data: relax.Expr, axis: int) -> relax.Expr:
        """Y along an axis of any extent; sums of 16-bit types are of float32.

        Raises:
            UnsupportedError: a type of integers, with weights that are none.
        """
        factor, taps = self.weights.shape
        dtype = str(data.ty.dtype)
        _check_type(dtype, self.weights)
        wide = "float32" if dtype in SHORT_FLOATS and not np.isin(self.weights, (0, 1)).all() else dtype
        if wide != dtype:
            data = builder.emit(op.astype(data, wide))
        extents = list(known_extents(data))
        extent = extents[axis]
        before, behind = max(-self.first, 0), max(self.first + taps - 1, 0)
        continued = data
        if before + behind:
            low, high = slice_axis(builder, data, axis, 0, 1), slice_axis(builder, data, axis, extent - 1, extent)
            continued = builder.emit(op.concat([low] * before + [data] + [high] * behind, axis))
        parts = []
        for weights in self.weights:
            total = None
            for tap, weight in enumerate(weights.tolist()):
                if weight == 0:
                    continue
                start = self.first + tap + before
                part = slice_axis(builder, continued, axis, start, start + extent) if before + behind else data
                if weight != 1:
                    part = builder.emit(op.multiply(part, relax.const(weight, wide)))
                total = part if total is None else builder.emit(op.add(total, part))
            parts.append(builder.emit(op.expand_dims(total, [axis + 1])))
        extents[axis] = extent * factor
        result = builder.emit(op.reshape(builder.emit(op.concat(parts, axis + 1)), relax.ShapeExpr(extents)))
        return result if wide == dtype else builder.emit(op.astype(result, dtype))


def _is_unit(matrix: NDArray[np.float64]) -> bool:
    return matrix.shape[0] == matrix.shape[1] and np.array_equal(matrix, np.eye(len(matrix)))


def _sizes(
    extents: tuple[object, ...], matrices: list[NDArray[np.float64] | None], candidate: Resize2d
) -> tuple[int, int] | None:
    """Height and width of the result of a resize2d; None if it does not compute these maps.

    It computes coordinates in float32, which rounds one of the size of the extent by some 2**-23 of it.
    """
    sizes = []
    for extent, matrix in zip(extents, matrices, strict=True):
        if not isinstance(extent, int):
            return None
        wanted = np.eye(extent) if matrix is None else matrix
        if candidate.coordinates == "align_corners" and len(wanted) == 1:  # TVM divides by the result's extent - 1
            return None
        theirs = resize_matrix(
            extent, len(wanted), candidate.method, candidate.coordinates, candidate.rounding, 0.0, 0.0
        )
        if not np.allclose(wanted, theirs, rtol=0, atol=max(extent, 4) * 2.0**-22):
            return None
        sizes.append(len(wanted))
    return sizes[0], sizes[1]


__all__ = ["Enlargement", "Resize2d", "resized"]
