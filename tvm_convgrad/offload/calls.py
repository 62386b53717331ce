# SPDX-License-Identifier: Apache-2.0
"""A call as plain numbers, in the one order in which the runtimes of all backends read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tvm_convgrad.core.geometry import data_layout_of, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem

if TYPE_CHECKING:
    from tvm_convgrad.core.epilogue import Epilogue

DIRECTIONS = ("forward", "backward_weight", "backward_data")


def call_numbers(direction: str, problem: ConvProblem, epilogue: Epilogue, types: Mapping[str, int]) -> list[int]:
    """Direction, rank, batch (-1: known at run time), channels, groups; extents of X, Y, W, strides, dilation, padding;
    types and layouts of X, W and Y; epilogue. Axes are filled up to three.

    Args:
        types: the library's numbers of element types.
    """
    rank = problem.rank

    def axes(values: Sequence[int | str], filling: int) -> list[int]:
        return [*map(int, values), *[filling] * (3 - rank)]

    def order(layout: str, canonical: str) -> list[int]:
        return [*(canonical.index(letter) for letter in layout), *[0] * (3 - rank)]

    return [
        DIRECTIONS.index(direction),
        rank,
        problem.batch if isinstance(problem.batch, int) else -1,
        problem.in_channels,
        problem.out_channels,
        problem.groups,
        *axes(problem.data_extents, 1),
        *axes(problem.grad_extents, 1),
        *axes(problem.kernel, 1),
        *axes(problem.strides, 1),
        *axes(problem.dilation, 1),
        *axes([low for low, _ in problem.padding], 0),
        *axes([high for _, high in problem.padding], 0),
        *(types[dtype] for dtype in (problem.data_dtype, problem.kernel_dtype, problem.grad_dtype)),
        *order(problem.data_layout, data_layout_of(rank)),
        *order(problem.kernel_layout, kernel_layout_of(rank)),
        *order(problem.grad_layout, data_layout_of(rank)),
        int(epilogue.bias),
        int(epilogue.relu),
        int(epilogue.accumulate),
        int(epilogue.bias_grad),
    ]


__all__ = ["DIRECTIONS", "call_numbers"]
