# SPDX-License-Identifier: Apache-2.0
"""`Epilogue`: what a kernel does with a sum before it stores it: result = relu(result + sum + bias)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm_convgrad.codegen.extrema import at_least
from tvm_convgrad.codegen.loops import lanes_of, zero
from tvm_convgrad.codegen.tir import Expr


@dataclass(frozen=True)
class Epilogue:
    """Operations fused into the store, in the order accumulate, bias, relu; all in the type of the sums.

    Attributes:
        bias: forward and dgrad: add a parameter after the weight, of shape (result channels,) and the result's type.
        relu: forward and dgrad: the maximum with zero; NaN stays NaN.
        accumulate: add to what the result holds when the kernel is called.
        bias_grad: wgrad: a second result after the weight's gradient, dY summed over batch and pixels.
        bias_accumulate: wgrad, with accumulate and bias_grad: add to what the bias gradient holds, too.
    """

    bias: bool = False
    relu: bool = False
    accumulate: bool = False
    bias_grad: bool = False
    bias_accumulate: bool = False

    def apply(self, total: Expr, dtype: str, bias: Callable[..., Expr], before: Callable[..., Expr]) -> Expr:
        """The value to store.

        Args:
            total: a sum, or a vector of sums.
            dtype: its element type.
            bias, before: called without arguments for the bias and for what the result holds, as wide as `total` and
                converted to `dtype`.
        """
        if self.accumulate:
            total = before() + total
        if self.bias:
            total = total + bias()
        return at_least(total, zero(dtype, lanes_of(total))) if self.relu else total


NO_EPILOGUE = Epilogue()

__all__ = ["NO_EPILOGUE", "Epilogue"]
