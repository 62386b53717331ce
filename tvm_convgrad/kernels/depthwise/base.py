# SPDX-License-Identifier: Apache-2.0
"""What the depthwise kernels over channels and over columns have in common: operands, extents, threads, epilogues."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.tir import PrimFunc
from tvm_convgrad.core.catalogue import BACKWARD_WEIGHT
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.contract import Kernel, Plan, Tiling, planned
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.frame import KernelFrame, conv_frame, wgrad_frame
from tvm_convgrad.kernels.spec import DHW, ConvSpec, axes_of, conv_spec, shapes_of, views


class DepthwiseKernel(ABC):
    """The loops of forward and dgrad.

    Attributes:
        source, weight, result: the tensors; results, biases: what is stored and the bias as numbers.
        inputs, outputs: source and result channels of a group.
        taps: of W, over all axes.
        kind: of the loop over work items, "parallel" or "serial".
    """

    def __init__(self, frame: KernelFrame, spec: ConvSpec, tiling: Tiling, kernel: DHW, machine: Machine) -> None:
        self.frame, self.loops, self.machine, self.tiling = frame, frame.loops, machine, tiling
        self.spec, self.kernel = spec, kernel
        self.source, self.weight, self.result = frame.tensors
        self.dtype, self.lanes = spec.dtype, machine.lanes(spec.dtype)
        self.results = frame.numbers("result", self.result, spec.dtype, machine)
        self.biases = frame.numbers("bias", frame.bias, spec.dtype, machine)
        self.inputs, self.outputs = spec.source_channels, spec.result_channels
        self.phases = [phase for phases in spec.phases for phase in phases]
        self.taps = math.prod(kernel)
        results = spec.batch * spec.groups * math.prod(spec.result.extents)
        products = results * self.inputs * self.outputs * self.taps
        self.kind = "parallel" if products >= machine.parallel_from else "serial"

    @abstractmethod
    def emit(self) -> None:
        """All statements of the kernel."""


class DepthwiseWgrad(ABC):
    """The loops of wgrad.

    Attributes:
        dy, x: the operands; dw: the store of the result.
        low: the padding before the data.
        taps: of dW, over all axes.
        kind: of the loop over work items, "parallel" or "serial".
    """

    def __init__(self, frame: KernelFrame, problem: ConvProblem, tiling: Tiling, machine: Machine) -> None:
        self.frame, self.loops, self.machine, self.tiling = frame, frame.loops, machine, tiling
        self.dtype = problem.accumulator
        self.lanes = machine.lanes(self.dtype)
        self.dy, self.x, dw = frame.tensors
        self.dw = frame.gradient("weight", dw, self.dtype, machine, adds=frame.epilogue.accumulate)
        self.x_view, self.dw_view, self.dy_view = views(problem)
        self.kernel, self.strides, self.dilation, padding = axes_of(problem)
        d, h, w = (low for low, _ in padding)
        self.low: DHW = (d, h, w)
        self.taps = math.prod(self.kernel)
        self.kind = "parallel" if problem.macs >= machine.parallel_from else "serial"

    @abstractmethod
    def emit(self) -> None:
        """All statements of the kernel."""


class GroupedKernel(Kernel):
    """Base class of the kernels for groups, which compute forward and dgrad in one way and wgrad in another.

    Attributes:
        conv, wgrad: the tilings and the loops of forward and dgrad, and those of wgrad.
    """

    conv: tuple[type[Tiling], type[DepthwiseKernel]]
    wgrad: tuple[type[Tiling], type[DepthwiseWgrad]]

    def tiling_type(self, direction: str) -> type[Tiling]:
        """The class of its tilings."""
        return (self.wgrad if direction == BACKWARD_WEIGHT.name else self.conv)[0]

    def emit(
        self, problem: ConvProblem, direction: str, plan: Plan, machine: Machine, name: str, epilogue: Epilogue
    ) -> PrimFunc:
        """The function (first operand, second operand, [bias,] result[, bias gradient])."""
        static, tiling = planned(problem), plan.only(self.tiling_type(direction))
        halves = machine.has_half_masks and problem.accumulator == "float32"
        if direction == BACKWARD_WEIGHT.name:
            frame = wgrad_frame(problem, int(static.batch), epilogue, halves=halves)
            self.wgrad[1](frame, static, tiling, machine).emit()
        else:
            spec = conv_spec(static, direction)
            frame = conv_frame(spec, shapes_of(problem, direction), epilogue, halves=halves)
            self.conv[1](frame, spec, tiling, axes_of(static)[0], machine).emit()
        return frame.finish(name)


__all__ = ["DepthwiseKernel", "DepthwiseWgrad", "GroupedKernel"]
