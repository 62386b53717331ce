# SPDX-License-Identifier: Apache-2.0
"""A face of a convolution in the terms of a kernel: strides of tensors, taps and phases. Knows no IR.

Forward and dgrad are one thing here, a *gather*: each result element is a sum over taps and channels of

    out[n, g, m, q * out_step + base] = sum over (tap, c) source[n, g, c, q * in_step + offset(tap)] * W[g, m, c, tap]

Forward has one phase (in_step = stride, out_step = 1). dgrad has one phase for each residue r of the data position
modulo the stride (in_step = 1, out_step = stride, base = r), with the taps that meet it: r + pad - k * dilation must be
a multiple of the stride, and that multiple is the offset. No zero is ever inserted.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

from tvm_convgrad.geometry import SPATIAL, strides_of
from tvm_convgrad.problem import ConvProblem

Three = tuple[int, int, int]


@dataclass(frozen=True)
class View:
    """Element strides of a tensor of data or grad: batch, channel, and depth, height, width (0 where absent)."""

    batch: int
    channel: int
    spatial: Three
    extents: Three
    size: int
    dtype: str


@dataclass(frozen=True)
class WeightView:
    """Element strides of the weight: out channel, in channel (per group), and depth, height, width."""

    out: int
    into: int
    spatial: Three
    size: int
    dtype: str


@dataclass(frozen=True)
class AxisPhase:
    """One axis of a phase.

    Attributes:
        count: result positions q, each written at q * out_step + base.
        base: the residue.
        taps: (kernel index, offset) of each tap that meets it.
    """

    count: int
    base: int
    taps: tuple[tuple[int, int], ...]


Phase = tuple[AxisPhase, AxisPhase, AxisPhase]
"""A phase over depth, height, width."""


@dataclass(frozen=True)
class Gather:
    """A whole forward or dgrad.

    Attributes:
        batch, groups: N and G.
        source_channels, result_channels: per group.
        source, result, weight: the tensors; `weight_source`, `weight_result`: strides of W over the source's and the
            result's channels within a group, `weight_group`: from group to group.
        in_step, out_step: see above.
        phases: groups of phases that have as many positions on each axis, so that one loop nest serves a group.
        dtype: of sums.
    """

    batch: int
    groups: int
    source_channels: int
    result_channels: int
    source: View
    result: View
    weight: WeightView
    weight_source: int
    weight_result: int
    weight_group: int
    in_step: Three
    out_step: Three
    phases: tuple[tuple[Phase, ...], ...]
    dtype: str


def forward_gather(problem: ConvProblem) -> Gather:
    """The forward face as a gather."""
    x, w, y = views(problem)
    kernel, strides, dilation, padding = axes_of(problem)
    axes = tuple(
        AxisPhase(count, 0, tuple((k, k * d - low) for k in range(extent)))
        for count, extent, d, (low, _) in zip(y.extents, kernel, dilation, padding, strict=True)
    )
    out_per_group = problem.out_channels // problem.groups
    gather = Gather(
        batch=int(problem.batch),
        groups=problem.groups,
        source_channels=problem.in_channels // problem.groups,
        result_channels=out_per_group,
        source=x,
        result=y,
        weight=w,
        weight_source=w.into,
        weight_result=w.out,
        weight_group=w.out * out_per_group,
        in_step=strides,
        out_step=(1, 1, 1),
        phases=((axes,),),  # type: ignore[arg-type]
        dtype=problem.accumulator,
    )
    return merged(gather)


def data_gather(problem: ConvProblem) -> Gather:
    """dgrad as a gather over dY."""
    x, w, y = views(problem)
    kernel, strides, dilation, padding = axes_of(problem)
    per_axis = [
        _residues(extent, k, s, d, low)
        for extent, k, s, d, (low, _) in zip(x.extents, kernel, strides, dilation, padding, strict=True)
    ]
    out_per_group = problem.out_channels // problem.groups
    gather = Gather(
        batch=int(problem.batch),
        groups=problem.groups,
        source_channels=out_per_group,
        result_channels=problem.in_channels // problem.groups,
        source=y,
        result=x,
        weight=w,
        weight_source=w.out,
        weight_result=w.into,
        weight_group=w.out * out_per_group,
        in_step=(1, 1, 1),
        out_step=strides,
        phases=_grouped(list(itertools.product(*per_axis))),  # type: ignore[arg-type]
        dtype=problem.accumulator,
    )
    return merged(gather)


def views(problem: ConvProblem) -> tuple[View, WeightView, View]:
    """X, W and Y (or their gradients), with missing spatial axes as axes of one element."""
    letters = SPATIAL[problem.rank]

    def view(layout: str, shape: tuple[int, ...], dtype: str) -> View:
        strides = strides_of(layout, shape)
        extents = dict(zip(layout, shape, strict=True))
        return View(
            strides["N"],
            strides["C"],
            _three({a: strides[a] for a in letters}, 0),
            _three({a: extents[a] for a in letters}, 1),
            math.prod(shape),
            dtype,
        )

    def plain(shape: tuple[object, ...]) -> tuple[int, ...]:
        return tuple(int(str(e)) for e in shape)

    w = strides_of(problem.kernel_layout, problem.weight_shape)
    weight = WeightView(
        w["O"], w["I"], _three({a: w[a] for a in letters}, 0), math.prod(problem.weight_shape), problem.kernel_dtype
    )
    return (
        view(problem.data_layout, plain(problem.data_shape), problem.data_dtype),
        weight,
        view(problem.grad_layout, plain(problem.grad_shape), problem.grad_dtype),
    )


def _three(values: dict[str, int], missing: int) -> Three:
    return (values.get("D", missing), values.get("H", missing), values["W"])


def axes_of(problem: ConvProblem) -> tuple[Three, Three, Three, tuple[tuple[int, int], ...]]:
    """Kernel, strides, dilation, padding over depth, height, width."""
    absent = 3 - problem.rank

    def fill(values: tuple[int, ...]) -> Three:
        d, h, w = (1,) * absent + values
        return d, h, w

    return fill(problem.kernel), fill(problem.strides), fill(problem.dilation), ((0, 0),) * absent + problem.padding


def _residues(extent: int, kernel: int, stride: int, dilation: int, low: int) -> list[AxisPhase]:
    """Phases of one axis of dgrad."""
    phases = []
    for residue in range(min(stride, extent)):
        hits = [(k, residue + low - k * dilation) for k in range(kernel)]
        taps = tuple((k, reach // stride) for k, reach in hits if reach % stride == 0)
        phases.append(AxisPhase(-(-(extent - residue) // stride), residue, taps))
    return phases


def _grouped(phases: list[Phase]) -> tuple[tuple[Phase, ...], ...]:
    groups: dict[Three, list[Phase]] = {}
    for phase in phases:
        d, h, w = (axis.count for axis in phase)
        groups.setdefault((d, h, w), []).append(phase)
    return tuple(tuple(group) for group in groups.values())


def merged(gather: Gather) -> Gather:
    """Join neighbouring axes that are one run of memory in both tensors and have one tap, which moves nothing.

    So a 1x1 kernel over H x W is 1-d. Which tap of the kernel it is does not matter.
    """
    for outer in (0, 1):
        inner = outer + 1
        phase = gather.phases[0][0]
        plain = len(gather.phases) == len(gather.phases[0]) == 1 and all(
            _is_plain(phase[a], gather.source.extents[a]) and gather.in_step[a] == gather.out_step[a] == 1
            for a in (outer, inner)
        )
        contiguous = all(
            view.spatial[outer] in (0, view.spatial[inner] * view.extents[inner])
            for view in (gather.source, gather.result)
        )
        if not plain or not contiguous:
            continue
        total = phase[outer].count * phase[inner].count
        joined = replace(phase[inner], count=total)
        single = AxisPhase(1, 0, phase[outer].taps)
        axes = tuple(joined if a == inner else single if a == outer else phase[a] for a in range(3))
        gather = replace(
            gather,
            phases=((axes,),),  # type: ignore[arg-type]
            source=_joined(gather.source, outer),
            result=_joined(gather.result, outer),
        )
    return gather


def _is_plain(axis: AxisPhase, extent: int) -> bool:
    """Whether an axis has one tap, at its own position, over all of the source."""
    return len(axis.taps) == 1 and axis.taps[0][1] == 0 and axis.count == extent


def _joined(view: View, outer: int) -> View:
    spatial, extents = list(view.spatial), list(view.extents)
    extents[outer + 1] *= extents[outer]
    extents[outer], spatial[outer] = 1, 0
    return replace(view, spatial=tuple(spatial), extents=tuple(extents))  # type: ignore[arg-type]
