# SPDX-License-Identifier: Apache-2.0
"""wgrad as compositions of ordinary operations, in canonical layouts; correct for every problem they accept.

    dW[o, i, k] = sum over n, y of  dY[n, o, y] * X[n, i, y * stride + k * dilation - low]

Read with k as the output position this is a convolution of X by dY in which the batch is the reduced channel, and
stride and dilation have changed places. Where the forward convolution left trailing elements of X unused, that
convolution is longer than the kernel; the surplus is cropped.
"""

from __future__ import annotations

from legalize.builder import Builder, Value
from legalize.rearrange import rearrange
from tvm_convgrad.core.problem import ConvProblem


def swapped_roles(builder: Builder, problem: ConvProblem, grad: Value, data: Value) -> Value:
    """One (grouped) convolution with the roles of batch and channel exchanged.

    Groups stay groups: the channels of group g of the new data are the batch entries of group g, in order (g n).

    Args:
        builder: emits the operations.
        problem: supplies kernel, strides, padding, dilation and groups; its layouts are not looked at.
        grad: dY as (N, O, …).
        data: X as (N, C, …).

    Returns:
        dW as (O, C/groups, …) in `problem.accumulator`.
    """
    x = rearrange(builder, data, "n (g i) ... -> i (g n) ...", g=problem.groups)
    dy = rearrange(builder, grad, "n o ... -> o n ...")
    return rearrange(builder, _convolved(builder, problem, x, dy, problem.groups), "i o ... -> o i ...")


def tiled_depthwise(builder: Builder, problem: ConvProblem, grad: Value, data: Value) -> Value:
    """One depthwise convolution with a group for each (sample, input channel), summed over the samples.

    dY is tiled so that every input channel of a group is paired with every output channel of it. Arguments and result
    as in `swapped_roles`.
    """
    n, groups = problem.batch, problem.groups
    per_group = problem.in_channels // groups
    dy = rearrange(builder, grad, "n (g o) ... -> n g 1 o ...", g=groups)
    dy = builder.tile(dy, [1, 1, per_group, 1] + [1] * problem.rank)
    dy = rearrange(builder, dy, "n g i o ... -> (n g i o) 1 ...")
    x = rearrange(builder, data, "n c ... -> 1 (n c) ...")
    every = _convolved(builder, problem, x, dy, int(n) * problem.in_channels)
    samples = rearrange(builder, every, "1 (n g i o) ... -> n g i o ...", n=n, g=groups, i=per_group)
    return rearrange(builder, builder.sum(samples, 0), "g i o ... -> (g o) i ...")


def tiled_depthwise_refuses(problem: ConvProblem) -> str | None:
    """Why `tiled_depthwise` cannot serve this problem, or None if it can."""
    if isinstance(problem.batch, str):
        return f"the batch is symbolic ({problem.batch}) and the form has a group for each sample"
    return None


def _convolved(builder: Builder, problem: ConvProblem, data: Value, grad: Value, groups: int) -> Value:
    """The data convolved by dY, stride and dilation in each other's places, and cropped to the kernel's extents."""
    wide = builder.convolution(
        data,
        grad,
        strides=problem.dilation,
        padding=problem.padding,
        dilation=problem.strides,
        groups=groups,
        out_dtype=problem.accumulator,
    )
    shape = builder.shape(wide)
    end = (*shape[:2], *problem.kernel)
    if all(isinstance(have, int) and have == want for have, want in zip(shape[2:], problem.kernel, strict=True)):
        return wide
    return builder.slice(wide, [0] * len(end), end)
