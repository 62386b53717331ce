# SPDX-License-Identifier: Apache-2.0
"""The parameters of a wgrad kernel, (grad, data, weight's gradient[, bias gradient]); the batch may be a name."""

from __future__ import annotations

from typing import Any

from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.loops import Loops, make_parameter, with_variable
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.kernels.weight_bias import BiasSum
from tvm_convgrad.kernels.weight_spec import WeightSpec
from tvm_convgrad.problem import ConvProblem


class WeightFrame:
    """Parameters of a kernel and flat views of them.

    Attributes:
        parameters: of the PrimFunc.
        dy, x, dw: flat views; bias: that of the bias gradient, or None.
        batch: a number, or an expression of the variable in the parameters' shapes.
        epilogue: what is fused.
    """

    def __init__(self, loops: Loops, problem: ConvProblem, spec: WeightSpec, epilogue: Epilogue) -> None:
        self.loops, self.spec, self.epilogue = loops, spec, epilogue
        shapes, variable = with_variable(problem.tensors)
        self.is_symbolic = variable is not None
        self.batch: Any = spec.batch
        sizes: dict[str, Any] = {"grad": spec.dy.size, "data": spec.x.size, "weight": spec.dw.size}
        self.channels = problem.out_channels
        shapes = {**shapes, "bias_grad": ((self.channels,), shapes["weight"][1])}
        keys = ["grad", "data", "weight", *(["bias_grad"] if epilogue.bias_grad else [])]
        self.parameters = [make_parameter(key, *shapes[key]) for key in keys]
        if self.is_symbolic:
            images = {"grad": spec.dy, "data": spec.x}
            self.batch = loops.batch(variable, max(view.batch for view in images.values()))
            for key, view in images.items():
                sizes[key] = self.batch * view.batch
        sizes["bias_grad"] = self.channels
        flat = {key: loops.flat(p, sizes[key]) for key, p in zip(keys, self.parameters, strict=True)}
        self.dy, self.x, self.dw = flat["grad"], flat["data"], flat["weight"]
        self.bias = flat.get("bias_grad")

    def bias_sum(self, machine: Machine) -> BiasSum | None:
        """What sums the bias gradient, if that is wanted."""
        if self.bias is None:
            return None
        return BiasSum(
            self.loops,
            machine,
            self.spec.dy,
            self.dy,
            self.channels,
            self.spec.dtype,
            self.bias,
            self.epilogue.bias_accumulate,
        )


__all__ = ["WeightFrame"]
