# SPDX-License-Identifier: Apache-2.0
"""The roofline of a convolution on one core, and an estimate from its arithmetic and its tensors."""

from __future__ import annotations

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.costs import overlapped


def roofline(problem: ConvProblem, machine: Machine) -> float:
    """The least seconds of one core: all vector multiply-adds that it can start, and each tensor moved once.

    A dot product of two operands of one of the machine's `dots` does two multiply-adds a lane.
    """
    pairs = any(sum(dtype == dot for _, dtype in problem.tensors.values()) >= 2 for dot in machine.dots)
    sums = problem.macs / (machine.fmas * machine.lanes(problem.accumulator) * (2 if pairs else 1))
    return max(sums, problem.bytes / machine.memory_rate) / machine.clock


def with_memory(arithmetic: float, problem: ConvProblem) -> float:
    """Seconds of one core: `arithmetic` seconds, and each tensor moved once, partly at the same time."""
    return overlapped(arithmetic, problem.bytes / Machine.memory_rate / Machine.clock)


__all__ = ["roofline", "with_memory"]
