# SPDX-License-Identifier: Apache-2.0
"""What a forward or dgrad kernel does with a sum before it stores it: result = relu(result + sum + bias)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm_convgrad.kernels.extrema import at_least
from tvm_convgrad.kernels.loops import lanes_of, zero


@dataclass(frozen=True)
class Epilogue:
    """Operations fused into the store, in the order accumulate, bias, relu; all in the type of the sums.

    Attributes:
        bias: one more parameter behind the weight, of shape (result channels,) and of the result's type.
        relu: the maximum with zero; NaN stays NaN.
        accumulate: the result holds a summand when the kernel is called, and the sum when it is done.
        bias_grad: of wgrad only: one more result behind the weight's gradient, dY summed over pixels.
        bias_accumulate: with accumulate and bias_grad: the bias gradient holds a summand, too.
    """

    bias: bool = False
    relu: bool = False
    accumulate: bool = False
    bias_grad: bool = False
    bias_accumulate: bool = False

    def apply(self, total: Any, dtype: str, bias: Any, before: Any) -> Any:
        """The value to store; `bias` and `before` give theirs as wide as `total`, converted to `dtype`."""
        if self.accumulate:
            total = before() + total
        if self.bias:
            total = total + bias()
        return at_least(total, zero(dtype, lanes_of(total))) if self.relu else total


NO_EPILOGUE = Epilogue()

__all__ = ["NO_EPILOGUE", "Epilogue"]
