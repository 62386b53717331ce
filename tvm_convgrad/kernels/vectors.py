# SPDX-License-Identifier: Apache-2.0
"""What the kernels do with vectors: loads and stores under optional masks, accumulators, and the store of gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from tvm_convgrad.codegen.dot_product import narrowed, widened
from tvm_convgrad.codegen.loops import Index, Loops, convert, lanes_of, load, load_masked, zero
from tvm_convgrad.codegen.tir import Buffer, Expr

Key = TypeVar("Key", bound=Hashable)


def load_vector(buffer: Buffer, index: Index, lanes: int, mask: Expr | None = None) -> Expr:
    """`lanes` contiguous elements; with a mask only those whose mask is true are read, and the others are zero."""
    return load(buffer, index, lanes) if mask is None else load_masked(buffer, index, mask, lanes)


def store_vector(loops: Loops, buffer: Buffer, index: Index, value: Expr, mask: Expr | None = None) -> None:
    """Store a scalar or a vector; with a mask only the lanes whose mask is true."""
    if mask is None:
        loops.store(buffer, index, value)
    else:
        loops.store_masked(buffer, index, value, mask)


def accumulators(
    loops: Loops, keys: Iterable[Key], lanes: int, dtype: str, name: str = "sum", start: Expr | None = None
) -> dict[Key, Buffer]:
    """A vector for each key that stays in a register, at first zero or `start`.

    Each is a buffer of its own on the stack that is indexed by constants: LLVM keeps it in a register.
    """
    registers = {key: loops.buffer(name, lanes, dtype) for key in keys}
    for register in registers.values():
        loops.store(register, 0, zero(dtype, lanes) if start is None else start)
    return registers


def accumulate(loops: Loops, register: Buffer, value: Expr) -> None:
    """Add a value to an accumulator."""
    loops.store(register, 0, load(register, 0, lanes_of(value)) + value)


def where(loops: Loops, condition: Expr | None) -> AbstractContextManager[None]:
    """Statements that run only if the condition holds; without a condition, always."""
    return nullcontext() if condition is None else loops.when(condition)


class GradientStore:
    """Stores gradients of type `dtype` to a tensor, or adds them to what the tensor holds."""

    def __init__(self, loops: Loops, buffer: Buffer, dtype: str, adds: bool, halves: Buffer | None = None) -> None:
        """Describe the tensor; `halves` is its view as HALF, by which vectors of bfloat16 are loaded and stored."""
        self.loops, self.buffer, self.dtype, self.adds, self.halves = loops, buffer, dtype, adds, halves

    def store(self, index: Index, value: Expr, mask: Expr | None = None) -> None:
        """Store a scalar or a vector; masks are for tensors of type `dtype`, or with a view as HALF, only."""
        lanes = lanes_of(value)
        if lanes > 1 and self.halves is not None:
            if self.adds:
                value = widened(load_vector(self.halves, index, lanes, mask)) + value
            store_vector(self.loops, self.halves, index, narrowed(self.loops, value), mask)
            return
        if self.adds:
            value = convert(load_vector(self.buffer, index, lanes_of(value), mask), self.dtype) + value
        store_vector(self.loops, self.buffer, index, value, mask)


__all__ = ["GradientStore", "accumulate", "accumulators", "load_vector", "store_vector", "where"]
