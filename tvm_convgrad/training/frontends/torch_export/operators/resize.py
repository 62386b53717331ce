# SPDX-License-Identifier: Apache-2.0
"""Resizes of images: by the nearest element, and with anti-aliasing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.ir.graph import element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def nearest(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Indices floor(i·in/out) of each axis; TVM's importer rounds where the quotient is not a whole number."""
    x = importer.env[node.args[0]]
    before, after = static_shape(x)[2:], tuple(node.meta["val"].shape[2:])
    if all(isinstance(extent, int) and isinstance(new, int) for extent, new in zip(before, after, strict=True)):
        if all(new % extent == 0 for extent, new in zip(before, after, strict=True)):
            return importer._upsample_nearest2d(node)
        scales = node.args[2] if len(node.args) > 2 and node.args[2] else (None, None)
        for axis, (extent, new, scale) in enumerate(zip(before, after, scales, strict=True), 2):
            step = np.float32(1 / scale) if scale else np.float32(extent) / np.float32(new)
            places = np.minimum(np.floor(np.arange(new, dtype="float32") * step), extent - 1).astype("int64")
            x = importer.block_builder.emit(op.take(x, relax.const(places, "int64"), axis))
        return x
    raise UnsupportedError("aten.upsample_nearest2d.vec needs fixed extents; export with a dynamic batch only")


def antialiased(node: torch.fx.Node, importer: ExportedProgramImporter, mode: str) -> relax.Expr:
    """A linear resize, an axis at a time: the products with what PyTorch makes of the unit matrices."""
    import torch  # optional; loaded, since there is a node

    emit, x = importer.block_builder.emit, importer.env[node.args[0]]
    aligned = bool(node.args[2])
    for axis, new in zip((2, 3), node.meta["val"].shape[2:], strict=True):
        extent = static_shape(x)[axis]
        unit = torch.eye(extent, dtype=torch.float64)[None, None]
        weights = torch.nn.functional.interpolate(
            unit, (int(new), extent), mode=mode, align_corners=aligned, antialias=True
        )[0, 0]
        if axis == 2:
            x = emit(op.matmul(relax.const(weights.numpy(), element_type(x)), x))
        else:
            x = emit(op.matmul(x, relax.const(weights.T.contiguous().numpy(), element_type(x))))
    return x


__all__ = ["antialiased", "nearest"]
