# SPDX-License-Identifier: Apache-2.0
"""ONNX's GridSample and AffineGrid of 2 and 3 spatial axes, as sums of gathered elements times weights."""

from __future__ import annotations

from itertools import product

import numpy as np
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from tvm_convgrad.training.frontends.onnx.node import Converter, Node

_CUBIC = -0.75
_MODES = {"bilinear": "linear", "bicubic": "cubic"}
"""Names of before opset 20."""


def grid_sample(node: Node) -> relax.Expr:
    """Elements of x at the places of a grid in [-1, 1], interpolated."""
    data, grid = node.tensor(0), node.tensor(1)
    samples, channels, *spatial = node.extents(0)
    rank, outer = len(spatial), list(node.extents(1)[1:-1])
    if not all(isinstance(extent, int) for extent in (channels, *spatial, *outer)):
        raise node.refusal("the extents of its image and grid must be fixed, except for the batch")
    sizes = [int(extent) for extent in spatial]
    count = int(np.prod([int(extent) for extent in outer]))
    flat = node.reshaped(data, [samples, channels, int(np.prod(sizes))])
    axes = []
    for axis, extent in enumerate(sizes):
        last = rank - 1 - axis  # a grid has x (the last axis) first
        part = node.emit(op.strided_slice(grid, [rank + 1], [last], [last + 1], assume_inbound=True))
        axes.append(_Axis(node, node.reshaped(part, [samples, 1, count]), extent).taps())
    total: relax.Expr | None = None
    for taps in product(*axes):
        place, weight = taps[0]
        for (along, factor), extent in zip(taps[1:], sizes[1:], strict=True):
            place = node.emit(op.add(op.multiply(place, relax.const(extent, "int64")), along))
            weight = factor if weight is None else weight if factor is None else op.multiply(weight, factor)
        places = node.emit(op.broadcast_to(place, relax.ShapeExpr([samples, channels, count])))
        part = node.emit(op.gather_elements(flat, places, 2))
        part = part if weight is None else node.emit(op.multiply(part, node.emit(weight)))
        total = part if total is None else node.emit(op.add(total, part))
    assert total is not None
    return op.reshape(total, relax.ShapeExpr([samples, channels, *outer]))


class _Axis:
    """Where a grid's coordinates along one axis lie in an image of some extent."""

    def __init__(self, node: Node, coordinate: relax.Expr, extent: int) -> None:
        self.node, self.extent = node, extent
        self.mode, self.padding = node.text("mode", "linear"), node.text("padding_mode", "zeros")
        self.mode = _MODES.get(self.mode, self.mode)
        self.corners = bool(node.integer("align_corners", 0))
        scale, shift = ((extent - 1) / 2,) * 2 if self.corners else (extent / 2, (extent - 1) / 2)
        at = op.add(op.multiply(coordinate, self._number(scale)), self._number(shift))
        self.at = node.emit(at)
        if self.mode != "cubic":
            self.at = self._inside(self.at)

    def taps(self) -> list[tuple[relax.Expr, relax.Expr | None]]:
        """Places and weights of the elements that are summed; no weight is 1."""
        node = self.node
        if self.mode == "nearest":
            return [self._tap(node.emit(op.round(self.at)), None)]
        low = node.emit(op.floor(self.at))
        share = node.emit(op.subtract(self.at, low))
        if self.mode == "linear":
            weights = {0: node.emit(op.subtract(self._number(1), share)), 1: share}
        elif self.mode == "cubic":
            weights = {offset: self._cubic(share, offset) for offset in (-1, 0, 1, 2)}
        else:
            raise node.refusal(f"mode {self.mode!r} is not known; use linear, nearest or cubic")
        return [self._tap(op.add(low, self._number(offset)), weight) for offset, weight in weights.items()]

    def _tap(self, place: relax.Expr, weight: relax.Expr | None) -> tuple[relax.Expr, relax.Expr | None]:
        """A place inside of the image, and its weight, which is 0 outside with `padding_mode` zeros."""
        node, place = self.node, self.node.emit(place)
        if self.mode == "cubic":
            place = self._inside(place)
        inside = node.emit(op.clip(place, 0, self.extent - 1))
        if self.padding == "zeros":
            same = node.emit(op.astype(node.emit(op.equal(inside, place)), self._dtype))
            weight = same if weight is None else node.emit(op.multiply(weight, same))
        return node.emit(op.astype(inside, "int64")), weight

    def _inside(self, at: relax.Expr) -> relax.Expr:
        """Coordinates moved into the image by `padding_mode`."""
        node, last = self.node, self.extent - 1
        if self.padding == "reflection":
            low, span = (0.0, float(last)) if self.corners else (-0.5, float(self.extent))
            if span == 0:
                return node.emit(op.zeros_like(at))
            # span − |(x mod 2·span) − span| is a triangle wave of period 2·span.
            turned = node.emit(op.subtract(at, self._number(low)))
            wave = node.emit(
                op.subtract(
                    turned, op.multiply(op.floor(op.divide(turned, self._number(2 * span))), self._number(2 * span))
                )
            )
            folded = node.emit(op.abs(node.emit(op.subtract(wave, self._number(span)))))
            at = node.emit(op.add(op.subtract(self._number(span), folded), self._number(low)))
        if self.padding != "zeros":
            at = node.emit(op.clip(at, 0, last))
        return at

    def _cubic(self, share: relax.Expr, offset: int) -> relax.Expr:
        """Keys' kernel at |share − offset|, as a polynomial by Horner's rule."""
        node, a = self.node, _CUBIC
        distance = op.subtract(share, self._number(offset)) if offset < 1 else op.subtract(self._number(offset), share)
        t = node.emit(distance)
        factors = (a + 2, -(a + 3), 0.0, 1.0) if offset in (0, 1) else (a, -5 * a, 8 * a, -4 * a)
        total: relax.Expr = self._number(factors[0])
        for factor in factors[1:]:
            total = op.add(op.multiply(total, t), self._number(factor))
        return node.emit(total)

    @property
    def _dtype(self) -> str:
        return str(self.node.tensor(1).ty.dtype)

    def _number(self, value: float) -> relax.Expr:
        return relax.const(value, self._dtype)


def affine_grid(node: Node) -> relax.Expr:
    """The grid of an affine map: theta times the places of the image in [-1, 1]."""
    size, theta = node.value(1), node.tensor(0)
    if size is None:
        raise node.refusal("its size must be a constant; export the model with fixed extents")
    spatial = [int(extent) for extent in size[2:]]
    dtype = str(theta.ty.dtype)
    points = relax.const(_points(spatial, bool(node.integer("align_corners", 0))).astype(dtype))
    turned = node.emit(op.permute_dims(theta, [0, 2, 1]))
    grid = node.emit(op.matmul(points, turned))
    return op.reshape(grid, relax.ShapeExpr([known_extents(theta)[0], *spatial, len(spatial)]))


def _points(spatial: list[int], corners: bool) -> NDArray[np.float64]:
    """The places of an image in [-1, 1], x first, with a 1 behind: (places, rank + 1)."""
    lines = []
    for extent in spatial:
        if corners:
            lines.append(np.linspace(-1, 1, extent) if extent > 1 else np.zeros(1))
        else:
            lines.append((2 * np.arange(extent) + 1) / extent - 1)
    meshes = np.meshgrid(*lines, indexing="ij")
    return np.stack([*(mesh.reshape(-1) for mesh in reversed(meshes)), np.ones(meshes[0].size)], 1)


CONVERTERS: dict[str, Converter] = {"AffineGrid": affine_grid, "GridSample": grid_sample}
"""By operator of ONNX."""
