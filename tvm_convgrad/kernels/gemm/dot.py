# SPDX-License-Identifier: Apache-2.0
"""The kernel of forward and dgrad of bfloat16 by dot products of pairs of channels, where the CPU has the instruction.

It is the implicit GEMM over words (`pairs.py`): the same tilings, loop nest and estimate, with half as many steps.
"""

from __future__ import annotations

from functools import lru_cache

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.gemm.pairs import paired
from tvm_convgrad.kernels.gemm.plan import ImplicitGemm, regions_of
from tvm_convgrad.kernels.spec import ConvSpec, conv_spec

DTYPE = "bfloat16"
"""The type of both operands."""


def dots_refusal(problem: ConvProblem, direction: str, machine: Machine) -> str:
    """Why the operands of a direction cannot be multiplied by dot products, or nothing."""
    if DTYPE not in machine.dots:
        return f"{machine.name} has no dot product of {DTYPE}"
    return types_refusal(problem, direction, DTYPE)


def types_refusal(problem: ConvProblem, direction: str, dtype: str) -> str:
    """Why the operands of a direction are no pairs of a type, or nothing."""
    types = [problem.tensors[name][1] for name in DIRECTIONS[direction].operands]
    if set(types) != {dtype} or problem.accumulator != "float32":
        return f"both operands must be {dtype}, summed in float32; they are {' and '.join(types)}"
    return ""


def channels_refusal(problem: ConvProblem, direction: str) -> str:
    """Why the channels of a direction make no pairs, or nothing."""
    channels = conv_spec(problem, direction).source_channels
    if channels == 1:
        return "one channel a group has no pair"
    if channels % 2 and problem.groups > 1:
        return f"{channels} channels a group: pairs would reach into the next group"
    return ""


class DotGemm(ImplicitGemm):
    """Forward and dgrad with operands of bfloat16, multiplied in pairs and summed in float32."""

    name = "dot product GEMM"
    dtypes = (DTYPE,)
    reason = "multiplies pairs of bfloat16"

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """No such instruction, other types, or channels that have no pairs."""
        return dots_refusal(problem, direction, machine) or channels_refusal(problem, direction)

    def regions(self, problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
        """Those of the implicit GEMM, over words."""
        return _regions(problem, direction)


@lru_cache(maxsize=1024)
def _regions(problem: ConvProblem, direction: str) -> tuple[ConvSpec, ...]:
    return tuple(map(paired, regions_of(problem, direction)))


KERNELS = (DotGemm(),)

__all__ = ["DTYPE", "KERNELS", "DotGemm", "channels_refusal", "dots_refusal", "types_refusal"]
