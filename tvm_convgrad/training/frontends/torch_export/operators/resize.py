# SPDX-License-Identifier: Apache-2.0
"""PyTorch's resizes (F.interpolate) in all modes, with sizes or with factors.

Given factors, PyTorch takes 1/factor for the distance of neighbouring places in most cases, although the result has
floor(extent·factor) of them, and the quotient of the extents in others. The weights are therefore those that PyTorch's
own operator gives for unit vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.resizing import Enlargement, Resize2d, resized
from tvm_convgrad.training.frontends.torch_export.places import name_of
from tvm_convgrad.training.ir.graph import static_shape

if TYPE_CHECKING:  # optional packages
    import sympy
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

RESIZES = {
    "upsample_nearest1d": 1,
    "upsample_nearest2d": 2,
    "upsample_nearest3d": 3,
    "_upsample_nearest_exact1d": 1,
    "_upsample_nearest_exact2d": 2,
    "_upsample_nearest_exact3d": 3,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2,
    "upsample_trilinear3d": 3,
    "upsample_bicubic2d": 2,
    "_upsample_bilinear2d_aa": 2,
    "_upsample_bicubic2d_aa": 2,
}
"""The number of resized axes by operator."""

_WIDTH = 2
"""Of the other axes in `_matrix`: PyTorch 2.13 resizes columns of width 1 wrongly, if with anti-aliasing."""


def resize(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """A resize of the last axes.

    Raises:
        UnsupportedError: the extent of one of these axes is free, and it is not enlarged by a whole factor.
    """
    operator = node.target.overloadpacket
    name, x = operator.__name__, importer.env[node.args[0]]
    rank = RESIZES[name]
    before, after = static_shape(x)[-rank:], tuple(node.meta["val"].shape[-rank:])
    aligned, factors = _options(node, rank)
    first = len(static_shape(x)) - rank
    maps = {}
    for axis, (extent, new) in enumerate(zip(before, after, strict=True)):
        if isinstance(extent, int) and isinstance(new, int):
            maps[first + axis] = _matrix(operator, axis, rank, extent, new, aligned, factors[axis])
        else:
            x = _enlarged(node, axis, rank, aligned, factors[axis]).apply(importer.block_builder, x, first + axis)
    candidate = None
    if name in ("upsample_nearest2d", "_upsample_nearest_exact2d"):
        candidate = Resize2d("nearest_neighbor", "half_pixel")
    elif name == "upsample_bilinear2d":
        candidate = Resize2d("linear", "align_corners" if aligned else "half_pixel")
    return resized(importer.block_builder, x, maps, candidate)


def _enlarged(node: torch.fx.Node, axis: int, rank: int, aligned: bool | None, factor: float | None) -> Enlargement:
    """The resize of an axis of a free extent."""
    before, after = (each.meta["val"].shape[axis - rank] for each in (node.args[0], node))
    found, whole = None, _whole_factor(before, after, factor)
    if whole is not None:
        operator = node.target.overloadpacket

        def matrix(extent: int) -> NDArray[np.float64]:
            return _matrix(operator, axis, rank, extent, extent * whole, aligned, factor)

        found = Enlargement.of(matrix, whole)
    if found is None:
        raise UnsupportedError(
            f"aten.{name_of(node)} resizes an axis from {before} to {after}, which is not fixed; such an axis is "
            "resized by a whole factor, without align_corners, and cubic without antialias; export with it fixed"
        )
    return found


def _whole_factor(before: int | torch.SymInt, after: int | torch.SymInt, factor: float | None) -> int | None:
    """The factor if it is a whole number; that of a size is its formula over that of the extent."""
    if factor is not None:
        return int(factor) if factor >= 1 and factor == int(factor) else None
    ratio = _formula(after) / _formula(before)
    return int(ratio) if ratio.is_Integer and ratio >= 1 else None


def _formula(extent: int | torch.SymInt) -> sympy.Expr:
    import sympy  # PyTorch needs it, too

    return sympy.sympify(extent if isinstance(extent, int) else extent.node.expr)


def _options(node: torch.fx.Node, rank: int) -> tuple[bool | None, Sequence[float | None]]:
    """`align_corners`, None of modes without it, and the factors, None where the size is given alone.

    Overload `vec` has one list of factors, and `default` an argument for each axis.
    """
    names = [argument.name for argument in node.target._schema.arguments]
    given: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    aligned = bool(given["align_corners"]) if "align_corners" in names else None
    if "scale_factors" in names:
        return aligned, given.get("scale_factors") or [None] * rank
    return aligned, [given.get(name) for name in names if name.startswith("scales")]


def _matrix(
    operator: torch._ops.OpOverloadPacket,
    axis: int,
    rank: int,
    extent: int,
    new: int,
    aligned: bool | None,
    factor: float | None,
) -> NDArray[np.float64]:
    """A with Y = A·X along one axis: the results for unit vectors, which are the channels of one sample."""
    import torch  # optional; loaded, since there is a node

    units = torch.eye(extent, dtype=torch.float64).reshape(1, extent, *[1] * axis, extent, *[1] * (rank - 1 - axis))
    shape, size = [_WIDTH] * rank, [_WIDTH] * rank
    shape[axis], size[axis] = extent, new
    factors = [factor if place == axis else None for place in range(rank)]
    options = [] if aligned is None else [aligned]
    found = operator.default(units.expand(1, extent, *shape).contiguous(), size, *options, *factors)
    columns = found[0].movedim(axis + 1, 1).reshape(extent, new, -1)  # the same for all places of the other axes
    return columns[:, :, 0].T.numpy().copy()


__all__ = ["RESIZES", "resize"]
