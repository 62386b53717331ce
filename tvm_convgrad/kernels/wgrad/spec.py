# SPDX-License-Identifier: Apache-2.0
"""wgrad as a matrix product for each tap: M = channels of dY, N = channels of X, K = pixels of dY; and its tiling."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from functools import cached_property

from tvm_convgrad.codegen.loops import Index, larger, quotient, remainder, smaller
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.borders import valid_range
from tvm_convgrad.kernels.contract import Tiling
from tvm_convgrad.kernels.spec import DHW, View, WeightView, axes_of, views

MAX_WIDTH = 256
"""Contiguous pixels of a 1x1 convolution are viewed as rows of at most this many."""

VECTOR = 16
"""Rows of a multiple of this many pixels are packed by whole vectors on every machine."""


HALVES = ("bfloat16", "float16")
"""The type whose vectors are converted in registers."""


@dataclass(frozen=True)
class WgradSpec:
    """wgrad in the terms of the kernel; extents, steps and taps over depth, height, width (d, h, w).

        dW[m, tap, n] = sum over pixels p of  dY[p, m] * X[p * stride + tap * dilation - low, n]

    Attributes:
        x, dy, dw: the tensors.
        batch, groups, out_channels, in_channels: the last two per group: M and N of the product.
        kernel, strides, dilation, low: of the convolution; low is the padding before.
        dtype: of sums.
        first: the offset of the first tap in dW; taps at both ends of an axis that read only padding are left out.
        has_all_taps: whether no tap is left out; the gradients of those that are left out are zero.
        dots: whether pairs of pixels of a row are multiplied by dot products (`codegen.dot_product`). Panels then hold
            the word of each pixel and the next one, or of each second pixel (`even_pairs`).
        halves: the types of 16 bits of which vectors are loaded and stored as such, and converted in registers;
            tensors of bfloat16 are then viewed as HALF.
        im2col_of: where this is a 1x1 convolution over the im2col rows of another one, which have the index
            m = (tap, input channel), that one; dy is then a view of its X at the first tap of each pixel.
        taps_of: where n are pairs (tap along the width, input channel) of another one with few channels, that one.
    """

    x: View
    dy: View
    dw: WeightView
    batch: int
    groups: int
    out_channels: int
    in_channels: int
    kernel: DHW
    strides: DHW
    dilation: DHW
    low: DHW
    dtype: str
    first: int = 0
    has_all_taps: bool = True
    dots: bool = False
    halves: tuple[str, ...] = ()
    im2col_of: WgradSpec | None = None
    taps_of: WgradSpec | None = None

    @property
    def is_pointwise(self) -> bool:
        """Whether the one tap multiplies each pixel of dY with the pixel of X at the same position.

        Equal extents alone are not enough: with a stride and padding, X and dY may have as many pixels by coincidence.
        """
        at_its_place = self.strides == (1, 1, 1) and self.low == (0, 0, 0)
        return self.kernel == (1, 1, 1) and at_its_place and self.x.extents == self.dy.extents

    def has_vectors(self, view: View) -> bool:
        """Whether vectors of a tensor can be packed as they are, as words, or converted in registers."""
        return view.dtype == self.dtype or self.dots or self.converts(view)

    def converts_all(self, tiling: WgradTiling) -> bool:
        """Whether all of dY is converted before the sums, as it is read in place or by single elements."""
        same = self.dy.dtype == self.dtype or self.dots or self.im2col_of is not None
        return not same and not (tiling.scalars_packed and self.converts(self.dy))

    def converts(self, view: View | WeightView) -> bool:
        """Whether vectors of a tensor are converted in registers."""
        return view.dtype in self.halves

    @property
    def even_pairs(self) -> bool:
        """Whether all pairs of pixels begin at even columns, so that panels hold no words of odd ones.

        So it is with one tap along the width that is in bounds everywhere.
        """
        return self.dots and self.kernel[2] == 1 and self.valid_ranges[2] == [(0, self.dy.extents[2])]

    @property
    def word_columns(self) -> int:
        """Columns from one word of a row of a panel to the next."""
        return 2 if self.even_pairs else 1

    @property
    def has_partners(self) -> bool:
        """Whether every pair of a panel has two pixels."""
        return self.even_pairs and self.dy.extents[2] % 2 == 0

    @property
    def pair(self) -> int:
        """Elements of X from the pixel that a pixel of dY is multiplied with to that of the next one."""
        return self.strides[2] * self.x.spatial[2]

    # A panel of X has the rows and columns that its taps read: all of them, or only each stride-th if there is one tap.

    @property
    def step_h(self) -> int:
        """Rows of a panel of X from one row of dY to the next."""
        return self.strides[1] if self.kernel[1] > 1 else 1

    @property
    def step_w(self) -> int:
        """Columns of a panel of X from one column of dY to the next."""
        return self.strides[2] if self.kernel[2] > 1 else 1

    @property
    def packed_stride_h(self) -> int:
        """Rows of X from one row of its panel to the next."""
        return self.strides[1] if self.kernel[1] == 1 else 1

    @property
    def packed_stride_w(self) -> int:
        """Columns of X from one column of its panel to the next."""
        return self.strides[2] if self.kernel[2] == 1 else 1

    @property
    def transposes_x(self) -> bool:
        """Whether X's panel [column][channel] is the transpose of contiguous columns, or of each second one."""
        stride = self.x.spatial[2] * self.packed_stride_w
        return stride in (1, 2) and self.x.channel != 1 and self.has_vectors(self.x)

    @cached_property
    def valid_ranges(self) -> tuple[list[tuple[int, int]], ...]:
        """For each axis and each tap along it, the positions of dY, (first, after the last), where it is in bounds."""
        return tuple(self._valid_along(axis) for axis in range(3))

    def _valid_along(self, axis: int) -> list[tuple[int, int]]:
        count, stride, low = self.dy.extents[axis], self.strides[axis], self.low[axis]
        offsets = [k * self.dilation[axis] - low for k in range(self.kernel[axis])]
        return [valid_range(offset, stride, count, self.x.extents[axis]) for offset in offsets]

    @cached_property
    def valid_fractions(self) -> tuple[float, ...]:
        """For each axis, the part of (tap, position of dY) that is in bounds: all that is summed without im2col."""
        return tuple(
            sum(end - first for first, end in ranges) / (len(ranges) * extent)
            for ranges, extent in zip(self.valid_ranges, self.dy.extents, strict=True)
        )

    def x_slices(self, number: Index, count: Index) -> tuple[Index, Index]:
        """The depth slices of X, (first, after the last), that `count` slices of dY from `number` on read.

        Slices are numbered through all images.
        """
        depth, extent = self.dy.extents[0], self.x.extents[0]
        last = number + (count - 1)
        reach = (self.kernel[0] - 1) * self.dilation[0] + 1

        def slice_of(number: Index, after: int) -> Index:
            within_image = remainder(number, depth) * self.strides[0] + (after - self.low[0])
            return quotient(number, depth) * extent + larger(smaller(within_image, extent), 0)

        return slice_of(number, 0), slice_of(last, reach)

    def panel_rows(self, rows: int) -> int:
        """Rows of a panel of X for so many rows of dY."""
        return (rows - 1) * self.step_h + (self.kernel[1] - 1) * self.dilation[1] + 1

    @cached_property
    def transposed(self) -> WgradSpec:
        """The transposed product, of one group: N = channels of dY, M = channels of X, or im2col rows of X.

        Pixels that correspond one to one have channels of X as M. Other convolutions become 1x1 convolutions over the
        im2col rows of X, m = (tap, input channel) in dW's order. Cached, as each estimate reads it three times.
        """
        if self.is_pointwise:
            dw = replace(self.dw, out=self.dw.into, into=self.dw.out)
            return replace(
                self, x=self.dy, dy=self.x, dw=dw, out_channels=self.in_channels, in_channels=self.out_channels
            )
        rows = self.im2col_rows
        step = self.offset_in_dw(rows[1]) if len(rows) > 1 else 1
        d, h, w = (step * s for step, s in zip(self.x.spatial, self.strides, strict=True))
        return replace(
            self,
            x=self.dy,
            dy=replace(self.x, spatial=(d, h, w), extents=self.dy.extents),
            dw=replace(self.dw, out=step, into=self.dw.out, spatial=(0, 0, 0)),
            out_channels=len(rows),
            in_channels=self.out_channels,
            kernel=(1, 1, 1),
            strides=(1, 1, 1),
            dilation=(1, 1, 1),
            low=(0, 0, 0),
            im2col_of=self,
        )

    @cached_property
    def im2col_rows(self) -> list[tuple[DHW, int]]:
        """The (tap, input channel) pairs in dW's order; none unless dW has them at a constant step."""
        taps = list(itertools.product(*(range(k) for k in self.kernel)))
        pairs = [(tap, i) for tap in taps for i in range(self.in_channels)]
        pairs.sort(key=self.offset_in_dw)
        offsets = [self.offset_in_dw(pair) for pair in pairs]
        step = offsets[1] - offsets[0] if len(offsets) > 1 else 1
        return pairs if offsets == [n * step for n in range(len(offsets))] else []  # type: ignore[return-value]

    @cached_property
    def column_offsets(self) -> list[int]:
        """Elements of dW from the first n to each one."""
        if self.taps_of is None:
            return [n * self.dw.into for n in range(self.in_channels)]
        taps, channels = range(self.taps_of.kernel[2]), range(self.taps_of.in_channels)
        return [self.taps_of.offset_in_dw(((0, 0, k), c)) for k in taps for c in channels]

    def offset_in_dw(self, pair: tuple[tuple[int, ...], int]) -> int:
        """Elements from the first one of an output channel of dW to a (tap, input channel) pair."""
        tap, channel = pair
        return channel * self.dw.into + sum(k * s for k, s in zip(tap, self.dw.spatial, strict=True))


@dataclass(frozen=True)
class WgradTiling(Tiling):
    """How wgrad is tiled. Each field can be changed by itself; `refusal` in plan.py gives the reason if it must not be.

    Names: tile_* is the register tile, slab_* a slab of pixels of dY, the unit that is packed; split_* counts work
    items; h and d are rows and depth slices of dY; m and n are output and input channels, and change roles (only) with
    `transposed`. The scalar operand is dY's [pixel][m], the vector operand X's [pixel][n].

    Attributes:
        tile_m: rows of the register tile: output channels, or im2col rows.
        tile_n: columns of the register tile, in vectors: input channels.
        slab_h: rows of dY in a slab; the last slab of a depth slice may have fewer.
        slab_d: depth slices of dY in a slab; 1 unless a slab holds whole slices.
        split_k: parts of the pixels that are summed apart, then added in their order.
        split_m: parts of the blocks of `tile_m` that are work items of their own.
        parallel: whether work items are shared by threads.
        n_blocks: blocks of `tile_n` vectors in one work item, slab by slab, so that dY's slab stays in the cache.
        transposed: whether the product is transposed: n are output channels, m input channels or im2col rows.
        vectors_in_place: whether vectors are read from the tensor, without a panel.
        scalars_packed: whether a slab of scalars is packed into a panel [block][pixel][m]; else read from the tensor.
        prefetch: whether the next slab is prefetched while this one is summed.
    """

    tile_m: int
    tile_n: int
    slab_h: int
    slab_d: int
    split_k: int
    split_m: int
    parallel: bool
    n_blocks: int = 1
    transposed: bool = False
    vectors_in_place: bool = False
    scalars_packed: bool = False
    prefetch: bool = False


def tap_offsets(kernel: tuple[int, ...], weight: WeightView) -> list[int]:
    """Elements from the first tap of W or dW to each one, taps in the order of the kernel's axes."""
    taps = itertools.product(*map(range, kernel))
    return [sum(k * s for k, s in zip(tap, weight.spatial, strict=True)) for tap in taps]


def wgrad_spec(problem: ConvProblem) -> WgradSpec:
    """wgrad in the terms of the kernel; contiguous pixels of 1x1 convolutions are one axis."""
    x, dw, dy = views(problem)
    kernel, strides, dilation, padding = axes_of(problem)
    d, h, w = (low for low, _ in padding)
    spec = WgradSpec(
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
    return _pixels_joined(_stride_removed(_taps_in_bounds(spec)))


def _taps_in_bounds(spec: WgradSpec) -> WgradSpec:
    """On each axis the taps from the first to the last that is in bounds anywhere: large dilations leave few."""
    ranges = []
    for ends, count in zip(spec.valid_ranges, spec.kernel, strict=True):
        valid = [k for k, (first, end) in enumerate(ends) if first < end]
        ranges.append((valid[0], valid[-1] + 1) if valid else (0, count))
    if all(bounds == (0, count) for bounds, count in zip(ranges, spec.kernel, strict=True)):
        return spec
    (d0, d1), (h0, h1), (w0, w1) = ranges
    d, h, w = (low - first * step for low, (first, _), step in zip(spec.low, ranges, spec.dilation, strict=True))
    return replace(
        spec,
        kernel=(d1 - d0, h1 - h0, w1 - w0),
        low=(d, h, w),
        first=sum(first * step for (first, _), step in zip(ranges, spec.dw.spatial, strict=True)),
        has_all_taps=False,
    )


def _stride_removed(spec: WgradSpec) -> WgradSpec:
    """A 1x1 kernel without padding reads each stride-th pixel of X: a view of X that has only those."""
    if spec.kernel != (1, 1, 1) or spec.low != (0, 0, 0):
        return spec
    reach = tuple((n - 1) * s for n, s in zip(spec.dy.extents, spec.strides, strict=True))
    if any(r >= e for r, e in zip(reach, spec.x.extents, strict=True)):
        return spec  # the padding after the data is read
    d, h, w = (step * s for step, s in zip(spec.x.spatial, spec.strides, strict=True))
    return replace(spec, x=replace(spec.x, spatial=(d, h, w), extents=spec.dy.extents), strides=(1, 1, 1))


def _pixels_joined(spec: WgradSpec) -> WgradSpec:
    """A 1x1 kernel has no rows, only pixels: contiguous ones are viewed as rows of up to MAX_WIDTH of them."""
    if not spec.is_pointwise:
        return spec
    d, h, w = spec.dy.extents
    for view in (spec.x, spec.dy):
        step = view.spatial[2]
        if (h > 1 and view.spatial[1] != w * step) or (d > 1 and view.spatial[0] != h * w * step):
            return spec
    total = d * h * w
    widths = [n for n in range(2 * VECTOR, min(total, MAX_WIDTH) + 1) if total % n == 0]
    width = max(widths, key=lambda n: (n % VECTOR == 0, n), default=total)

    def in_rows(view: View) -> View:
        step = view.spatial[2]
        return replace(view, spatial=(0, width * step, step), extents=(1, total // width, width))

    return replace(spec, x=in_rows(spec.x), dy=in_rows(spec.dy))


__all__ = ["WgradSpec", "WgradTiling", "tap_offsets", "wgrad_spec"]
