# SPDX-License-Identifier: Apache-2.0
"""What the depthwise kernels over channels and over columns have in common: operands, extents, threads."""

from __future__ import annotations

import math

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.frame import KernelFrame
from tvm_convgrad.kernels.spec import DHW, ConvSpec, axes_of, views
from tvm_convgrad.kernels.vectors import GradientStore


class DepthwiseKernel:
    """Forward and dgrad.

    Attributes:
        inputs, outputs: source and result channels of a group.
        taps: of W, over all axes.
        kind: of the loop over work items, "parallel" or "serial".
    """

    def __init__(self, frame: KernelFrame, spec: ConvSpec, kernel: DHW, machine: Machine) -> None:
        self.frame, self.loops, self.spec, self.kernel, self.machine = frame, frame.loops, spec, kernel, machine
        self.source, self.weight, self.result = frame.tensors
        self.dtype, self.lanes = spec.dtype, machine.lanes(spec.dtype)
        self.inputs, self.outputs = spec.source_channels, spec.result_channels
        self.phases = [phase for phases in spec.phases for phase in phases]
        self.taps = math.prod(kernel)
        results = spec.batch * spec.groups * math.prod(spec.result.extents)
        products = results * self.inputs * self.outputs * self.taps
        self.kind = "parallel" if products >= machine.parallel_from else "serial"


class DepthwiseWgrad:
    """wgrad.

    Attributes:
        dy, x: the operands; dw: the store of the result.
        low: the padding before the data.
        taps: of dW, over all axes.
        kind: of the loop over work items, "parallel" or "serial".
    """

    def __init__(self, frame: KernelFrame, problem: ConvProblem, machine: Machine) -> None:
        self.frame, self.loops, self.machine = frame, frame.loops, machine
        self.dtype = problem.accumulator
        self.lanes = machine.lanes(self.dtype)
        self.dy, self.x, dw = frame.tensors
        self.dw = GradientStore(self.loops, dw, self.dtype, frame.epilogue.accumulate)
        self.x_view, self.dw_view, self.dy_view = views(problem)
        self.kernel, self.strides, self.dilation, padding = axes_of(problem)
        d, h, w = (low for low, _ in padding)
        self.low: DHW = (d, h, w)
        self.taps = math.prod(self.kernel)
        self.kind = "parallel" if problem.macs >= machine.parallel_from else "serial"


__all__ = ["DepthwiseKernel", "DepthwiseWgrad"]
