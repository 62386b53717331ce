# SPDX-License-Identifier: Apache-2.0
"""Random convolutions by regime: each draws the extents, channels and taps among which kernels take other branches.

Kernels branch on how channels, columns and rows compare with vectors, tiles and slabs, and on what is in bounds. A
uniform draw of small numbers is seldom at those boundaries, so each regime draws close to some of them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import (
    FLOAT_DTYPES,
    SPATIAL,
    data_layout_of,
    effective_kernel,
    kernel_layout_of,
    transposed_extent,
)
from tvm_convgrad.core.problem import ConvProblem

DTYPES = tuple(FLOAT_DTYPES)

MOST_MACS = 120_000
"""The most multiply-accumulates of a problem: the interpreter executes them in about 10 ms."""

MOST_ELEMENTS = 40_000
"""The most elements of a tensor of a problem."""

COINCIDING, POINTWISE = 0.1, 0.15
"""The shares of the problems with equal numbers, and with 1x1 kernels over long rows, among those of any kind."""

DEPTHWISE_PAIRS, DEPTHWISE_HALVES = 0.3, 0.2
"""The shares of bfloat16 and of float16 among depthwise problems."""

VECTORS = (4, 8, 16)
"""Lanes of vectors of float32 on the instruction sets that kernels are made for."""

ANY, DEPTHWISE, SMALL_GROUPS, SQUARE, PAIRS, HALF_PAIRS = (
    "any",
    "depthwise",
    "small groups",
    "3x3",
    "bfloat16",
    "float16",
)
"""Kinds of problems: all, or those of the kernels that take few of all."""


@dataclass(frozen=True)
class Axis:
    """One spatial axis: extent of X, taps, stride, padding before and after, dilation."""

    extent: int
    kernel: int
    stride: int
    padding: tuple[int, int]
    dilation: int


def draw_problem(rng: random.Random, kind: str = ANY) -> ConvProblem:
    """A small valid problem of a random regime; every choice comes from `rng`, so that Hypothesis can shrink it.

    Args:
        rng: supplies every choice.
        kind: "any"; "depthwise", "small groups", "3x3", "bfloat16" or "float16" (all three tensors, or all but one),
            of which "any" has too few for the kernels that are made for them.
    """
    while True:
        rank = 2 if kind == SQUARE else rng.choice((2, 2, 2, 1, 3))
        regime = _three_by_three if kind == SQUARE else rng.choice(REGIMES)
        axes = [regime(rng, rank) for _ in range(rank)]
        ic, oc, groups = _channels(rng, kind)
        batch = rng.choice((1, 1, 2, 3, rng.randint(1, 9)))
        special = rng.random() if kind in (ANY, PAIRS, HALF_PAIRS) else 1.0
        if special < COINCIDING:
            axes, batch, ic, oc, groups = _coinciding(rng, axes, groups)
        elif special < COINCIDING + POINTWISE:
            axes = _pointwise(rng, rank)
        problem = _problem(rng, rank, kind, axes, batch, (ic, oc, groups))
        if problem is not None and problem.macs <= (MOST_MACS if kind != SQUARE else 3 * MOST_MACS):
            return problem


def _problem(
    rng: random.Random, rank: int, kind: str, axes: Sequence[Axis], batch: int, channels: tuple[int, int, int]
) -> ConvProblem | None:
    """The problem of these numbers, with random layouts and types; None if it has no output or is too large."""
    layouts = _layouts(rng, rank, kind)
    dtypes = _pairs(rng, kind) if kind in (PAIRS, HALF_PAIRS) else _dtypes(rng, kind)
    if any(axis.extent + sum(axis.padding) < effective_kernel(axis.kernel, axis.dilation) for axis in axes):
        return None
    try:
        problem = ConvProblem(
            batch=batch,
            in_channels=channels[0],
            out_channels=channels[1],
            groups=channels[2],
            data_extents=tuple(axis.extent for axis in axes),
            kernel=tuple(axis.kernel for axis in axes),
            strides=tuple(axis.stride for axis in axes),
            padding=tuple(axis.padding for axis in axes),
            dilation=tuple(axis.dilation for axis in axes),
            data_layout=layouts[0],
            kernel_layout=layouts[1],
            grad_layout=layouts[2],
            data_dtype=dtypes[0],
            kernel_dtype=dtypes[1],
            grad_dtype=dtypes[2],
        )
    except ConvGradError:
        return None
    shapes = [map(int, shape) for shape, _ in problem.tensors.values()]
    return None if max(map(math.prod, shapes)) > MOST_ELEMENTS else problem


# ------------------------------------------------------------------------------------------------- regimes of an axis


def _plain(rng: random.Random, rank: int) -> Axis:
    """What networks have: kernels of 1 to 5, stride 1 or 2, padding that keeps the extent."""
    kernel, stride = rng.choice((1, 3, 3, 2, 5) if rank < 3 else (1, 2, 3)), rng.choice((1, 1, 2))
    dilation = rng.choice((1, 1, 1, 2))
    reach = effective_kernel(kernel, dilation)
    low = rng.choice((0, reach // 2, reach // 2))
    return Axis(rng.randint(1, 12 if rank < 3 else 5) + reach - 1, kernel, stride, (low, low), dilation)


def _tiny(rng: random.Random, rank: int) -> Axis:
    """Extents of 1 to 3."""
    kernel, dilation = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2))
    reach = effective_kernel(kernel, dilation)
    extent = rng.choice((1, 1, 2, 3))
    low = rng.randint(0, reach)
    return Axis(extent, kernel, rng.randint(1, 3), (low, max(rng.randint(0, 2), reach - extent - low)), dilation)


def _wide_border(rng: random.Random, rank: int) -> Axis:
    """Padding beyond the kernel's reach, so that some outputs are sums of padding only."""
    kernel, dilation = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 3))
    reach = effective_kernel(kernel, dilation)
    low, high = (rng.choice((0, reach - 1, reach, reach + 1, reach + 3)) for _ in range(2))
    extent = rng.randint(1, 7)
    return Axis(max(extent, reach - low - high), kernel, rng.choice((1, 1, 2, 3)), (low, high), dilation)


def _long_stride(rng: random.Random, rank: int) -> Axis:
    """Strides longer than the kernel: elements that no tap reads."""
    kernel = rng.choice((1, 1, 2, 3))
    stride = kernel + rng.randint(1, 3)
    low, high = rng.randint(0, kernel), rng.randint(0, kernel + 1)
    return Axis(max(1, kernel - low - high) + rng.randint(0, 9), kernel, stride, (low, high), 1)


def _far_taps(rng: random.Random, rank: int) -> Axis:
    """Dilations so large that taps are in bounds at few positions, or at none."""
    kernel, dilation = rng.choice((2, 3, 3)), rng.randint(3, 8)
    reach = effective_kernel(kernel, dilation)
    extent = rng.randint(1, 9)
    low = rng.randint(0, reach)
    high = max(0, reach - extent - low) + rng.randint(0, 4)
    return Axis(extent, kernel, rng.choice((1, 1, 2)), (low, high), dilation)


def _exact(rng: random.Random, rank: int) -> Axis:
    """A kernel as large as the padded data, or one element less: one or two outputs."""
    kernel, dilation = rng.randint(1, 4), rng.choice((1, 1, 2))
    reach = effective_kernel(kernel, dilation)
    low, high = rng.randint(0, reach - 1), rng.randint(0, reach - 1)
    return Axis(max(1, reach - low - high) + rng.randint(0, 1), kernel, rng.randint(1, 3), (low, high), dilation)


def _vector_wide(rng: random.Random, rank: int) -> Axis:
    """Columns just below, at and above one or two vectors."""
    lanes = rng.choice(VECTORS)
    wanted = max(1, lanes * rng.choice((1, 1, 2)) + rng.choice((-1, 0, 0, 1)))
    kernel, stride = rng.choice((1, 1, 3, 2, 4)), rng.choice((1, 1, 2))
    low, high = rng.randint(0, kernel - 1), rng.randint(0, kernel - 1)
    extent = transposed_extent(wanted, kernel, stride, 1, low, high, rng.randint(0, stride - 1))
    return Axis(max(1, extent), kernel, stride, (low, high), 1)


def _three_by_three(rng: random.Random, rank: int) -> Axis:
    """Three taps, stride and dilation 1, few outputs: an even or odd number of tiles of two."""
    low, high = rng.randint(0, 3), rng.randint(0, 3)
    return Axis(max(1, rng.randint(1, 9) + 2 - low - high), 3, 1, (low, high), 1)


def _large_kernel(rng: random.Random, rank: int) -> Axis:
    """Kernels of 4 to 11 taps, whose code is a loop where that of smaller ones is unrolled."""
    kernel = rng.choice((4, 5, 6, 7, 11)) if rank < 3 else rng.randint(3, 4)
    low, high = rng.randint(0, kernel - 1), rng.randint(0, kernel - 1)
    return Axis(max(1, kernel - low - high) + rng.randint(0, 6), kernel, rng.choice((1, 1, 2)), (low, high), 1)


REGIMES: tuple[Callable[[random.Random, int], Axis], ...] = (
    _plain,
    _plain,
    _tiny,
    _wide_border,
    _long_stride,
    _far_taps,
    _exact,
    _vector_wide,
    _large_kernel,
)


# ------------------------------------------------------------------------------------------------- the rest


def _count(rng: random.Random) -> int:
    """A number of channels: few, or below, at or above one or several vectors."""
    if rng.random() < 0.35:
        return rng.randint(1, 5)
    lanes = rng.choice(VECTORS)
    return max(1, lanes * rng.choice((1, 1, 2, 3)) + rng.choice((-1, 0, 0, 1, lanes // 2)))


def _channels(rng: random.Random, kind: str) -> tuple[int, int, int]:
    """In channels, out channels, groups: dense, depthwise with a multiplier, or groups of every width."""
    if kind == SQUARE:
        groups = 2 if rng.random() < 0.05 else 1
        ins, outs = (rng.choice(VECTORS) + rng.randint(0, 9) for _ in range(2))
        return ins * groups, outs * groups, groups
    if kind in (ANY, PAIRS, HALF_PAIRS):
        kind = rng.choice(("dense", "dense", "dense", DEPTHWISE, "groups", SMALL_GROUPS))
    if kind == "dense":
        return _count(rng), _count(rng), 1
    if kind == DEPTHWISE:
        groups, multiple = max(2, _count(rng)), rng.choice((1, 1, 1, 2, 3))
        if rng.random() < 0.1:  # a multiplier of the input: one output channel a group
            return groups * multiple, groups, groups
        return groups, groups * multiple, groups
    groups = rng.choice((2, 3, 4, 5, 8, 16))
    if kind == SMALL_GROUPS:
        width = rng.choice((2, 4, 8, 16))
        return groups * width, groups * width, groups
    return groups * rng.choice((1, 2, 3, 4, 8, 17)), groups * rng.choice((1, 2, 3, 4, 8, 17)), groups


def _pointwise(rng: random.Random, rank: int) -> list[Axis]:
    """Axes of a 1x1 kernel of stride 1, with rows of one to four vectors or a few columns more."""
    extents = [rng.randint(1, 4) for _ in range(rank - 1)]
    columns = rng.choice(VECTORS) * rng.randint(1, 4) + rng.choice((0, 1, 3, 7))
    return [Axis(extent, 1, 1, (0, 0), 1) for extent in (*extents, columns)]


def _coinciding(rng: random.Random, axes: Sequence[Axis], groups: int) -> tuple[list[Axis], int, int, int, int]:
    """The axes with one number in the place of many: extents, taps, batch and channels that happen to be equal."""
    number = rng.choice((1, 2, 3, 4, 8, 16))
    made = []
    for axis in axes:
        kernel = rng.choice((axis.kernel, min(number, 4)))
        reach = effective_kernel(kernel, axis.dilation)
        low = rng.randint(0, reach)
        stride = rng.choice((axis.stride, 1, 2))
        # Padding after, such that dY is as long as X, where that can be.
        high = transposed_extent(number, kernel, stride, axis.dilation, low, 0) - number
        made.append(Axis(number, kernel, stride, (low, high) if high >= 0 else axis.padding, axis.dilation))
    groups = rng.choice((1, 1, number))
    return made, rng.choice((number, 1)), max(number, groups), max(number, groups), groups


def _layouts(rng: random.Random, rank: int, kind: str) -> tuple[str, str, str]:
    """Channels first, channels last (mostly where kernels of groups then read in place), or any order."""
    axes, data, kernel = SPATIAL[rank], data_layout_of(rank), kernel_layout_of(rank)
    grouped = ("last", "last") if kind in (DEPTHWISE, SMALL_GROUPS) else ()
    order = rng.choice(("first", "first", "last", "last", "any", *grouped))
    if order == "any":
        return _shuffled(rng, data), _shuffled(rng, kernel), _shuffled(rng, data)
    kernels = (kernel, f"{axes}IO", f"O{axes}I", f"I{axes}O")
    layout = data if order == "first" else f"N{axes}C"
    return layout, rng.choice(kernels), layout


def _shuffled(rng: random.Random, letters: str) -> str:
    return "".join(rng.sample(letters, len(letters)))


def _dtypes(rng: random.Random, kind: str) -> tuple[str, str, str]:
    """Types of X, W and dY: mostly float32, sometimes one other type, sometimes each its own.

    Depthwise kernels have loops of their own for bfloat16, by dot products, and convert channels of 16 bits, and get
    these types more often.
    """
    draw = rng.random()
    if kind == DEPTHWISE and draw > 1 - DEPTHWISE_PAIRS - DEPTHWISE_HALVES:
        one = PAIRS if draw > 1 - DEPTHWISE_PAIRS else HALF_PAIRS
        return one, one, one
    if draw < 0.1:
        first, second, third = (rng.choice(DTYPES) for _ in range(3))
        return first, second, third
    one = rng.choice(DTYPES) if draw < 0.3 else "float32"
    return one, one, one


def _pairs(rng: random.Random, dtype: str) -> tuple[str, str, str]:
    """A type of 16 bits, mostly for all three of X, W and dY, else for two of them."""
    types = [dtype] * 3
    if rng.random() < 0.4:
        types[rng.randrange(3)] = rng.choice(("float32", "float16" if dtype == PAIRS else "bfloat16"))
    return types[0], types[1], types[2]


__all__ = ["ANY", "DEPTHWISE", "HALF_PAIRS", "PAIRS", "REGIMES", "SMALL_GROUPS", "SQUARE", "draw_problem"]
