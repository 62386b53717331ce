# SPDX-License-Identifier: Apache-2.0
"""wgrad in the terms of the kernels: a contraction over pixels of dY's channels (rows) with X's channels (lanes)."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tvm_convgrad.kernels.spec import Three, View, WeightView, axes_of, views
from tvm_convgrad.problem import ConvProblem

LINE = 256
"""Pixels that are neighbours in memory are cut into lines of at most this many."""

VECTOR = 16
"""Lines of a multiple of this are packed by whole vectors on every machine."""


@dataclass(frozen=True)
class WeightSpec:
    """wgrad in the terms of the kernel; extents over depth, height, width.

    Attributes:
        x, dy, dw: the tensors.
        batch, groups, out_channels, in_channels: the last two per group.
        kernel, strides, dilation, low: of the convolution; low is the padding before.
        dtype: of sums.
    """

    x: View
    dy: View
    dw: WeightView
    batch: int
    groups: int
    out_channels: int
    in_channels: int
    kernel: Three
    strides: Three
    dilation: Three
    low: Three
    dtype: str

    @property
    def is_pointwise(self) -> bool:
        """Whether pixels of X and dY meet one to one, so that the two may change places."""
        return self.kernel == (1, 1, 1) and self.x.extents == self.dy.extents


@dataclass(frozen=True)
class WeightTiling:
    """How wgrad is cut. Each field can be changed without the others; `refusal` in weight_plan.py says if it may.

    Attributes:
        rows, columns: of the register tile: output channels, and vectors of input channels.
        lines: of dY in a slab; the last slab of a plane may have fewer.
        planes: of dY in a slab; 1 unless a slab holds whole planes.
        parts: pieces of the pixels that are summed apart.
        splits: pieces of the output channels that are separate work items.
        parallel: whether threads pay.
        inner: blocks of input channels that one work item computes, slab by slab, so that dY's slab stays in cache.
        swapped: whether output channels are the lanes and input channels the rows (only where pixels meet one to one).
        direct: whether X's vectors are read where they are, without a panel.
        packed: whether dY's slab is packed into a panel [block of output channels][pixel][row].
        prefetched: whether the next slab's lines are asked for while this one is summed.
    """

    rows: int
    columns: int
    lines: int
    planes: int
    parts: int
    splits: int
    parallel: bool
    inner: int = 1
    swapped: bool = False
    direct: bool = False
    packed: bool = False
    prefetched: bool = False


def weight_spec(problem: ConvProblem) -> WeightSpec:
    """wgrad in the terms of the kernel, 1x1 over contiguous pixels joined to lines."""
    x, dw, dy = views(problem)
    kernel, strides, dilation, padding = axes_of(problem)
    d, h, w = (low for low, _ in padding)
    spec = WeightSpec(
        x=x,
        dy=dy,
        dw=dw,
        batch=int(problem.batch),
        groups=problem.groups,
        out_channels=problem.out_channels // problem.groups,
        in_channels=problem.in_channels // problem.groups,
        kernel=kernel,
        strides=strides,
        dilation=dilation,
        low=(d, h, w),
        dtype=problem.accumulator,
    )
    return _joined(_pixelwise(spec))


def _pixelwise(spec: WeightSpec) -> WeightSpec:
    """A 1x1 kernel without padding meets every stride-th pixel of X: a view of X that has only those."""
    if spec.kernel != (1, 1, 1) or spec.low != (0, 0, 0):
        return spec
    reach = tuple((n - 1) * s for n, s in zip(spec.dy.extents, spec.strides, strict=True))
    if any(r >= e for r, e in zip(reach, spec.x.extents, strict=True)):
        return spec  # padding after the data is met
    d, h, w = (step * s for step, s in zip(spec.x.spatial, spec.strides, strict=True))
    return replace(spec, x=replace(spec.x, spatial=(d, h, w), extents=spec.dy.extents), strides=(1, 1, 1))


def _joined(spec: WeightSpec) -> WeightSpec:
    """A 1x1 kernel sees pixels, not lines: join those that are neighbours in memory, then cut them into lines again."""
    if not spec.is_pointwise:
        return spec
    d, h, w = spec.dy.extents
    for view in (spec.x, spec.dy):
        step = view.spatial[2]
        if (h > 1 and view.spatial[1] != w * step) or (d > 1 and view.spatial[0] != h * w * step):
            return spec
    total = d * h * w
    widths = [n for n in range(2 * VECTOR, min(total, LINE) + 1) if total % n == 0]
    width = max(widths, key=lambda n: (n % VECTOR == 0, n), default=total)

    def cut(view: View) -> View:
        step = view.spatial[2]
        return replace(view, spatial=(0, width * step, step), extents=(1, total // width, width))

    return replace(spec, x=cut(spec.x), dy=cut(spec.dy))


def swapped(spec: WeightSpec) -> WeightSpec:
    """The transposed contraction of a pointwise spec with one group."""
    dw = replace(spec.dw, out=spec.dw.into, into=spec.dw.out)
    return replace(spec, x=spec.dy, dy=spec.x, dw=dw, out_channels=spec.in_channels, in_channels=spec.out_channels)


__all__ = ["WeightSpec", "WeightTiling", "swapped", "weight_spec"]
