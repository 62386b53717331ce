# SPDX-License-Identifier: Apache-2.0
"""`Epilogue`: what one kernel, or one call of a library, computes beside a convolution. It loads no TVM."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Epilogue:
    """Operations fused into the store, in the order accumulate, bias, relu or relu6; all in the type of the sums.

    Attributes:
        bias: forward and dgrad: add a parameter after the weight, of shape (result channels,) and the result's type.
        relu: forward and dgrad: the maximum with zero; NaN stays NaN.
        relu6: forward and dgrad: the same, and at most 6.
        accumulate: add to what the result holds when the kernel is called.
        bias_grad: wgrad: a second result after the weight's gradient, dY summed over batch and pixels.
        bias_accumulate: wgrad, with accumulate and bias_grad: add to what the bias gradient holds, too.
    """

    bias: bool = False
    relu: bool = False
    accumulate: bool = False
    bias_grad: bool = False
    bias_accumulate: bool = False
    relu6: bool = False


NO_EPILOGUE = Epilogue()

__all__ = ["NO_EPILOGUE", "Epilogue"]
