# SPDX-License-Identifier: Apache-2.0
"""`ConvSpec`: forward or dgrad as strides of tensors, taps and phases, the form that kernels are generated from.

Forward and dgrad are the same computation. Each element of the result is a sum over taps and source channels,

    result[n, g, o, q * out_step + base] = sum over (tap, c) of W[g, o, c, tap] * source[n, g, c, q * in_step + offset]

- forward: source X, result Y; one phase, in_step = stride, out_step = 1.
- dgrad: source dY, result dX; one phase for each residue r of dX's position modulo the stride, with in_step = 1,
  out_step = stride and base = r. The phase has the taps k for which r + pad - k * dilation is a multiple of the stride;
  that multiple is the tap's offset. No zeros are inserted into dY.

Positions have three spatial axes d, h, w (depth, height, width) whatever the rank; a missing axis has extent 1.

Names in this folder: a quantity along an axis of an image ends with the axis (block_h, stride_w, panel_d). An image has
depth slices (d), rows (h) and columns (w); a pixel is a position of it. The register tile of the GEMM has tile_m rows,
which are scalars that are broadcast, and tile_n columns, which are vectors. q is the index of a result along an axis, c
a source channel and o a result channel within a group.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from tvm_convgrad.codegen.loops import Shapes
from tvm_convgrad.core.catalogue import BACKWARD_DATA, DIRECTIONS
from tvm_convgrad.core.geometry import SPATIAL, strides_of
from tvm_convgrad.core.problem import ConvProblem

DHW = tuple[int, int, int]
"""A value for each of depth, height, width."""


@dataclass(frozen=True)
class View:
    """Strides and extents of a tensor of data or grad, in elements.

    Attributes:
        batch, channel, spatial: strides; 0 for a spatial axis that is missing.
        extents: of d, h, w.
        size: elements of the tensor.
    """

    batch: int
    channel: int
    spatial: DHW
    extents: DHW
    size: int
    dtype: str


@dataclass(frozen=True)
class WeightView:
    """Strides of the weight in elements: of output channels, of input channels (per group), and of d, h, w."""

    out: int
    into: int
    spatial: DHW
    size: int
    dtype: str


@dataclass(frozen=True)
class AxisPhase:
    """One axis of a phase.

    Attributes:
        count: result positions q; each is stored at q * out_step + base.
        base: the residue.
        taps: (kernel index, offset) of each tap of the phase along this axis.
    """

    count: int
    base: int
    taps: tuple[tuple[int, int], ...]


Phase = tuple[AxisPhase, AxisPhase, AxisPhase]
"""A phase over d, h, w; its taps are the products of the axes' taps."""


@dataclass(frozen=True)
class Pairs:
    """How words, which hold two source channels, lie in the operands of a GEMM of dot products.

    Attributes:
        source, weight: elements from the first of a word to its second; 0 where the tensor is read as one of words.
        channels: source channels of a group; the last word has one if they are odd.
    """

    source: int
    weight: int
    channels: int


@dataclass(frozen=True)
class ConvSpec:
    """Forward or dgrad of one problem.

    Attributes:
        batch, groups: N and G.
        source_channels, result_channels: per group.
        source, result, weight: the tensors.
        weight_source_stride, weight_result_stride, weight_group_stride: strides of W from one source channel, result
            channel and group to the next.
        in_step, out_step: steps of the source and of the result from one q to the next.
        phases: groups of phases with equal counts on all axes; one loop nest serves a group.
        dtype: of the sums.
        pairs: if source channels are words (`gemm.pairs.paired`), where these are; then source_channels counts words,
            and so do the strides of a tensor of words.
    """

    batch: int
    groups: int
    source_channels: int
    result_channels: int
    source: View
    result: View
    weight: WeightView
    weight_source_stride: int
    weight_result_stride: int
    weight_group_stride: int
    in_step: DHW
    out_step: DHW
    phases: tuple[tuple[Phase, ...], ...]
    dtype: str
    pairs: Pairs | None = None


def conv_spec(problem: ConvProblem, direction: str) -> ConvSpec:
    """forward or dgrad, by the direction's name."""
    x, w, y = views(problem)
    kernel, strides, dilation, padding = axes_of(problem)
    ins, outs = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    is_dgrad, ones = direction == BACKWARD_DATA.name, (1, 1, 1)
    lows = [low for low, _ in padding]
    if is_dgrad:
        of_axes = map(_dgrad_phases, x.extents, kernel, strides, dilation, lows)
    else:
        of_axes = map(_forward_phases, y.extents, kernel, dilation, lows)
    spec = ConvSpec(
        batch=int(problem.batch),
        groups=problem.groups,
        source_channels=outs if is_dgrad else ins,
        result_channels=ins if is_dgrad else outs,
        source=y if is_dgrad else x,
        result=x if is_dgrad else y,
        weight=w,
        weight_source_stride=w.out if is_dgrad else w.into,
        weight_result_stride=w.into if is_dgrad else w.out,
        weight_group_stride=w.out * outs,
        in_step=ones if is_dgrad else strides,
        out_step=strides if is_dgrad else ones,
        phases=_grouped(list(itertools.product(*of_axes))),  # type: ignore[arg-type]
        dtype=problem.accumulator,
    )
    return collapse_axes(spec)


def shapes_of(problem: ConvProblem, direction: str) -> Shapes:
    """Shapes and types of the parameters of forward or dgrad: "source", "weight" and "result"."""
    taken = DIRECTIONS[direction]
    return {
        "source": problem.tensors[taken.operands[0]],
        "weight": problem.tensors["weight"],
        "result": problem.tensors[taken.result],
    }


def views(problem: ConvProblem) -> tuple[View, WeightView, View]:
    """X, W and Y (or their gradients)."""
    letters = SPATIAL[problem.rank]

    def view(layout: str, shape: tuple[int, ...], dtype: str) -> View:
        strides = strides_of(layout, shape)
        extents = dict(zip(layout, shape, strict=True))
        return View(
            strides["N"],
            strides["C"],
            _dhw({a: strides[a] for a in letters}, 0),
            _dhw({a: extents[a] for a in letters}, 1),
            math.prod(shape),
            dtype,
        )

    def static(shape: tuple[object, ...]) -> tuple[int, ...]:
        return tuple(int(str(e)) for e in shape)

    w = strides_of(problem.kernel_layout, problem.weight_shape)
    weight = WeightView(
        w["O"], w["I"], _dhw({a: w[a] for a in letters}, 0), math.prod(problem.weight_shape), problem.kernel_dtype
    )
    return (
        view(problem.data_layout, static(problem.data_shape), problem.data_dtype),
        weight,
        view(problem.grad_layout, static(problem.grad_shape), problem.grad_dtype),
    )


def _dhw(values: dict[str, int], missing: int) -> DHW:
    return (values.get("D", missing), values.get("H", missing), values["W"])


def axes_of(problem: ConvProblem) -> tuple[DHW, DHW, DHW, tuple[tuple[int, int], ...]]:
    """Kernel extents, strides, dilation and padding over d, h, w."""
    absent = 3 - problem.rank

    def fill(values: tuple[int, ...]) -> DHW:
        d, h, w = (1,) * absent + values
        return d, h, w

    return fill(problem.kernel), fill(problem.strides), fill(problem.dilation), ((0, 0),) * absent + problem.padding


def _forward_phases(extent: int, kernel: int, dilation: int, low: int) -> list[AxisPhase]:
    """The one phase of forward along one axis."""
    return [AxisPhase(extent, 0, tuple((k, k * dilation - low) for k in range(kernel)))]


def _dgrad_phases(extent: int, kernel: int, stride: int, dilation: int, low: int) -> list[AxisPhase]:
    """The phases of dgrad along one axis."""
    phases = []
    for residue in range(min(stride, extent)):
        reached = [(k, residue + low - k * dilation) for k in range(kernel)]
        taps = tuple((k, reach // stride) for k, reach in reached if reach % stride == 0)
        phases.append(AxisPhase(-(-(extent - residue) // stride), residue, taps))
    return phases


def _grouped(phases: list[Phase]) -> tuple[tuple[Phase, ...], ...]:
    """Phases grouped by their counts."""
    groups: dict[DHW, list[Phase]] = {}
    for phase in phases:
        d, h, w = (axis.count for axis in phase)
        groups.setdefault((d, h, w), []).append(phase)
    return tuple(tuple(group) for group in groups.values())


def collapse_axes(spec: ConvSpec) -> ConvSpec:
    """Collapse adjacent spatial axes that are contiguous in both tensors and have one tap with offset 0.

    A 1x1 convolution over H x W becomes a 1-d one over H * W. A larger kernel of which only one tap is left does, too.
    """
    for outer in (0, 1):
        inner = outer + 1
        phase = spec.phases[0][0]
        pointwise = len(spec.phases) == len(spec.phases[0]) == 1 and all(
            _is_pointwise(phase[a], spec.source.extents[a]) and spec.in_step[a] == spec.out_step[a] == 1
            for a in (outer, inner)
        )
        contiguous = all(
            view.spatial[outer] in (0, view.spatial[inner] * view.extents[inner]) for view in (spec.source, spec.result)
        )
        if not pointwise or not contiguous:
            continue
        total = phase[outer].count * phase[inner].count
        collapsed = replace(phase[inner], count=total)
        single = AxisPhase(1, 0, phase[outer].taps)
        axes = tuple(collapsed if a == inner else single if a == outer else phase[a] for a in range(3))
        spec = replace(
            spec,
            phases=((axes,),),  # type: ignore[arg-type]
            source=_collapsed(spec.source, outer),
            result=_collapsed(spec.result, outer),
        )
    return spec


def _is_pointwise(axis: AxisPhase, extent: int) -> bool:
    """Whether an axis has one tap, with offset 0, and as many results as the source has positions."""
    return len(axis.taps) == 1 and axis.taps[0][1] == 0 and axis.count == extent


def _collapsed(view: View, outer: int) -> View:
    """A view in which axis `outer` is part of the next one."""
    spatial, extents = list(view.spatial), list(view.extents)
    extents[outer + 1] *= extents[outer]
    extents[outer], spatial[outer] = 1, 0
    return replace(view, spatial=tuple(spatial), extents=tuple(extents))  # type: ignore[arg-type]
