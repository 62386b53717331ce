# SPDX-License-Identifier: Apache-2.0
"""dgrad as compositions of ordinary operations, in canonical layouts; correct for every problem they accept.

    dX[n, i, x] = sum over o, k, y with y * stride + k * dilation - low = x of  dY[n, o, y] * W[o, i, k]

Floor division hides up to `stride - 1` trailing elements of X from Y: their gradient is zero, and they are why the
extents of X must be given.
"""

from __future__ import annotations

from collections.abc import Sequence

from legalize.builder import Builder, Extent, Value
from legalize.rearrange import rearrange
from tvm_convgrad.core.geometry import effective_kernel, hidden_extent
from tvm_convgrad.core.problem import ConvProblem


def transposed(builder: Builder, problem: ConvProblem, grad: Value, weight: Value, extents: Sequence[Extent]) -> Value:
    """One transposed convolution; W serves as it is, (O, C/groups, …) being what a transposed convolution calls IO.

    Args:
        builder: emits the operations.
        problem: supplies strides, padding, dilation and groups; its layouts are not looked at.
        grad: dY as (N, O, …).
        weight: W as (O, C/groups, …).
        extents: spatial extents of X, ints or symbolic.

    Returns:
        dX as (N, C, …) in `problem.accumulator`.
    """
    inside = all(
        isinstance(x, int) and max(pair) < effective_kernel(k, d)
        for x, pair, k, d in zip(extents, problem.padding, problem.kernel, problem.dilation, strict=True)
    )
    full = builder.transposed_convolution(
        grad,
        weight,
        strides=problem.strides,
        padding=problem.padding if inside else [(0, 0)] * problem.rank,
        output_padding=_hidden_elements(problem, extents),
        dilation=problem.dilation,
        groups=problem.groups,
        out_dtype=problem.accumulator,
    )
    return full if inside else _crop(builder, problem, full, extents)


def dilated(builder: Builder, problem: ConvProblem, grad: Value, weight: Value, extents: Sequence[Extent]) -> Value:
    """dY spread out by the strides (zeros between), padded by a kernel's reach, and convolved by the mirrored kernel.

    Arguments and result as in `transposed`.
    """
    rank, groups = problem.rank, problem.groups
    sparse = spread(builder, grad, problem.strides)
    reach = [effective_kernel(k, d) - 1 for k, d in zip(problem.kernel, problem.dilation, strict=True)]
    # `spread` leaves stride - 1 zeros at the end, enough for all hidden elements of X.
    sparse = builder.pad(sparse, [(0, 0), (0, 0), *((r, r) for r in reach)])
    mirrored = builder.flip(weight, range(2, 2 + rank))
    mirrored = rearrange(builder, mirrored, "(g o) i ... -> (g i) o ...", g=groups)
    full = builder.convolution(
        sparse,
        mirrored,
        strides=[1] * rank,
        padding=[(0, 0)] * rank,
        dilation=problem.dilation,
        groups=groups,
        out_dtype=problem.accumulator,
    )
    return _crop(builder, problem, full, extents)


def _hidden_elements(problem: ConvProblem, extents: Sequence[Extent]) -> list[int]:
    """Elements of the padded X, an axis, behind the last one that Y saw; the most possible where X is symbolic."""
    return [
        hidden_extent(x, k, s, d, low, high) if isinstance(x, int) else s - 1
        for x, k, d, s, (low, high) in zip(
            extents, problem.kernel, problem.dilation, problem.strides, problem.padding, strict=True
        )
    ]


def _crop(builder: Builder, problem: ConvProblem, full: Value, extents: Sequence[Extent]) -> Value:
    """Cut the gradient of the padded X down to that of X."""
    shape = builder.shape(full)
    lows = [low for low, _ in problem.padding]
    begin = [0, 0, *lows]
    end = [*shape[:2], *(x + low for x, low in zip(extents, lows, strict=True))]
    if all(isinstance(e, int) for e in end[2:]) and not any(lows) and list(shape[2:]) == end[2:]:
        return full
    return builder.slice(full, begin, end)


def spread(builder: Builder, value: Value, strides: Sequence[int]) -> Value:
    """Element y of each axis goes to y * stride; stride - 1 zeros follow each, the last one included."""
    if all(s == 1 for s in strides):
        return value
    n, c, *spatial = builder.shape(value)
    fine = builder.reshape(value, [n, c, *(e for extent in spatial for e in (extent, 1))])
    fine = builder.pad(fine, [(0, 0), (0, 0), *(p for s in strides for p in ((0, 0), (0, s - 1)))])
    return builder.reshape(fine, [n, c, *(extent * s for extent, s in zip(spatial, strides, strict=True))])
