# SPDX-License-Identifier: Apache-2.0
"""Resizes of images, volumes and sequences as linear maps: one matrix for each axis.

A frontend computes the matrices by the rules of its format. Where relax.image.resize2d computes the same map it is
taken, since TVM lowers it to one loop; otherwise the matrices are applied axis by axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from relax_ops.gradients.separable import apply_transposed
from relax_ops.rules.resize import resize_matrix


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
    for axis, matrix in maps.items():
        data = builder.emit(apply_transposed(builder, data, axis, matrix.T))
    return data


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
        theirs = resize_matrix(
            extent, len(wanted), candidate.method, candidate.coordinates, candidate.rounding, 0.0, 0.0
        )
        if not np.allclose(wanted, theirs, rtol=0, atol=max(extent, 4) * 2.0**-22):
            return None
        sizes.append(len(wanted))
    return sizes[0], sizes[1]


__all__ = ["Resize2d", "resized"]
