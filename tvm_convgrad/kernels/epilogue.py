# SPDX-License-Identifier: Apache-2.0
"""What a kernel does with a sum before it stores it: result = relu(result + sum + bias), by its `Epilogue`."""

from __future__ import annotations

from collections.abc import Callable

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.extrema import at_least, at_most
from tvm_convgrad.codegen.loops import lanes_of, splat, zero
from tvm_convgrad.codegen.tir import Expr
from tvm_convgrad.core.epilogue import NO_EPILOGUE, Epilogue


def finished(
    epilogue: Epilogue, total: Expr, dtype: str, bias: Callable[..., Expr], before: Callable[..., Expr]
) -> Expr:
    """The value to store.

    Args:
        epilogue: what is fused into the store.
        total: a sum, or a vector of sums.
        dtype: its element type.
        bias, before: called without arguments for the bias and for what the result holds, as wide as `total` and
            converted to `dtype`.
    """
    if epilogue.accumulate:
        total = before() + total
    if epilogue.bias:
        total = total + bias()
    if epilogue.relu or epilogue.relu6:
        total = at_least(total, zero(dtype, lanes_of(total)))
    return at_most(total, splat(tir.const(6.0, dtype), lanes_of(total))) if epilogue.relu6 else total


__all__ = ["NO_EPILOGUE", "Epilogue", "finished"]
