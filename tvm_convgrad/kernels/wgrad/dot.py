# SPDX-License-Identifier: Apache-2.0
"""The kernel of wgrad of bfloat16 by dot products of pairs of pixels, where the CPU has the instruction.

It is the implicit GEMM of wgrad with half as many steps: a panel holds for each pixel the word of it and the next one,
so that every tap finds its pairs, wherever they begin; a last pixel without a partner is multiplied with zeros.
"""

from __future__ import annotations

from dataclasses import replace

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.gemm.dot import DTYPE, dots_refusal
from tvm_convgrad.kernels.wgrad.plan import ImplicitGemmWgrad
from tvm_convgrad.kernels.wgrad.spec import WgradSpec, wgrad_spec


class DotWgrad(ImplicitGemmWgrad):
    """wgrad with dY and X of bfloat16, multiplied in pairs of pixels and summed in float32."""

    name = "dot product GEMM"
    dtypes = (DTYPE,)
    reason = "multiplies pairs of bfloat16"

    def refusal(self, problem: ConvProblem, direction: str, machine: Machine) -> str:
        """No such instruction, or other types."""
        return dots_refusal(problem, direction, machine)

    def spec(self, problem: ConvProblem, machine: Machine) -> WgradSpec:
        """wgrad in the terms of the kernel, over pairs of pixels."""
        return replace(wgrad_spec(problem), dots=True)


KERNELS = (DotWgrad(),)

__all__ = ["KERNELS", "DotWgrad"]
