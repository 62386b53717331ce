# SPDX-License-Identifier: Apache-2.0
"""The roofline of a convolution on one core, and an estimate from its arithmetic and its tensors."""

from __future__ import annotations

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.tile_product import WORDS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.costs import overlapped


def roofline(problem: ConvProblem, machine: Machine) -> float:
    """The least seconds of one core: all vector multiply-adds that it can start, and each tensor moved once.

    A dot product of two operands of one of the machine's `dots` does two multiply-adds a lane, and a row of a product
    of `tiles` WORDS dot products of WORDS lanes.
    """
    types = [dtype for _, dtype in problem.tensors.values()]
    a_cycle = machine.fmas * machine.lanes(problem.accumulator)
    if any(types.count(dtype) >= 2 for dtype in machine.tiles):
        a_cycle = int(2 * WORDS * WORDS * machine.tile_rate)
    elif any(types.count(dtype) >= 2 for dtype in machine.dots):
        a_cycle *= 2
    sums = problem.macs / a_cycle
    return max(sums, problem.bytes / machine.memory_rate) / machine.clock


def with_memory(arithmetic: float, problem: ConvProblem) -> float:
    """Seconds of one core: `arithmetic` seconds, and each tensor moved once, partly at the same time."""
    return overlapped(arithmetic, problem.bytes / Machine.memory_rate / Machine.clock)


__all__ = ["roofline", "with_memory"]
