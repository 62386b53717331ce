# SPDX-License-Identifier: Apache-2.0
"""What the kernels do with vectors: loads and stores under optional masks, accumulators, and the store of gradients."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from tvm_convgrad.codegen.dot_product import (
    HALF,
    LANES,
    as_number,
    dot_product,
    halves_of,
    narrowed,
    narrowed_pair,
)
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Index, Loops, convert, lanes_of, load, load_masked, zero
from tvm_convgrad.codegen.tir import Buffer, Expr
from tvm_convgrad.core.geometry import DTYPE_BYTES

Key = TypeVar("Key", bound=Hashable)


def load_vector(buffer: Buffer, index: Index, lanes: int, mask: Expr | None = None) -> Expr:
    """`lanes` contiguous elements; with a mask only those whose mask is true are read, and the others are zero."""
    return load(buffer, index, lanes) if mask is None else load_masked(buffer, index, mask, lanes)


def store_vector(loops: Loops, buffer: Buffer, index: Index, value: Expr, mask: Expr | None = None) -> None:
    """Store a scalar or a vector, converted to the buffer's type; with a mask only the lanes whose mask is true."""
    if mask is None:
        loops.store(buffer, index, value)
    else:
        loops.store_masked(buffer, index, convert(value, str(buffer.dtype)), mask)


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


def accumulate_words(loops: Loops, register: Buffer, a: Expr, b: Expr) -> None:
    """Add the dot products of two vectors of words to an accumulator."""
    loops.store(register, 0, dot_product(loops, load(register, 0, lanes_of(a)), a, b))


def where(loops: Loops, condition: Expr | None) -> AbstractContextManager[None]:
    """Statements that run only if the condition holds; without a condition, always."""
    return nullcontext() if condition is None else loops.when(condition)


def moves_vectors(machine: Machine, dtype: str, sums: str) -> bool:
    """Whether vectors of a tensor's elements are loaded and stored under masks as numbers of the type of sums."""
    if dtype == sums:
        return machine.has_masks
    return sums == "float32" and DTYPE_BYTES[dtype] == 2 and machine.has_half_masks


def converts_halves(machine: Machine, dtype: str, sums: str) -> bool:
    """Whether vectors of a tensor's elements, of 16 bits, are loaded as such and converted in registers.

    Those of bfloat16 are loaded from a view as HALF.
    """
    return dtype != sums and moves_vectors(machine, dtype, sums)


def element_bytes(buffer: Buffer) -> int:
    """Bytes of an element of a tensor, or of its view as HALF."""
    dtype = str(buffer.dtype)
    return 2 if dtype == HALF else DTYPE_BYTES[dtype]


class Numbers:
    """A tensor whose elements are loaded and stored as numbers of the type of sums, `dtype`.

    Vectors of bfloat16 go through the tensor's view as HALF, where there is one.
    """

    def __init__(
        self, loops: Loops, buffer: Buffer, dtype: str, machine: Machine | None = None, halves: Buffer | None = None
    ) -> None:
        """Describe the tensor; `halves` is its view as HALF, with which the machine is needed."""
        self.loops, self.buffer, self.dtype, self.halves = loops, buffer, dtype, halves
        self._instruction = machine is not None and "bfloat16" in machine.dots and machine.lanes(dtype) == LANES

    def load(self, index: Index, lanes: int = 1, mask: Expr | None = None) -> Expr:
        """One element, or contiguous ones; with a mask only those whose mask is true, and zeros."""
        buffer = self.buffer if lanes == 1 or self.halves is None else self.halves
        return as_number(load_vector(buffer, index, lanes, mask), self.dtype)

    def store(self, index: Index, value: Expr, mask: Expr | None = None, *, single: bool = True) -> None:
        """Store a scalar or a vector, converted to the tensor's type; with a mask only lanes whose mask is true.

        `single`: whether that may be one lane only (`narrowed`).
        """
        if lanes_of(value) == 1 or self.halves is None:
            store_vector(self.loops, self.buffer, index, value, mask)
        else:
            single = single and mask is not None
            narrow = narrowed(self.loops, value, instruction=self._instruction, single=single)
            store_vector(self.loops, self.halves, index, narrow, mask)

    @property
    def stores_pairs(self) -> bool:
        """Whether two contiguous vectors can be stored by one instruction, without a mask."""
        return self._instruction and self.halves is not None

    def store_pair(self, index: Index, first: Expr, second: Expr) -> None:
        """Store two contiguous vectors; only if `stores_pairs`."""
        assert self.halves is not None
        store_vector(self.loops, self.halves, index, narrowed_pair(self.loops, first, second))

    def store_words(self, index: Index, words: Expr, mask: Expr | None = None) -> None:
        """Store a vector of words of two contiguous elements; `mask` is of elements. Only if `stores_pairs`."""
        assert self.halves is not None
        store_vector(self.loops, self.halves, index, halves_of(words), mask)


class GradientStore:
    """Stores gradients of type `dtype` to a tensor, or adds them to what the tensor holds."""

    def __init__(
        self,
        loops: Loops,
        buffer: Buffer,
        dtype: str,
        adds: bool,
        machine: Machine | None = None,
        halves: Buffer | None = None,
    ) -> None:
        """Describe the tensor; `halves` is its view as HALF, by which vectors of bfloat16 are loaded and stored."""
        self.adds, self._numbers = adds, Numbers(loops, buffer, dtype, machine, halves)

    def store(self, index: Index, value: Expr, mask: Expr | None = None) -> None:
        """Store a scalar or a vector; masks are for tensors of which vectors can be moved (`moves_vectors`)."""
        if self.adds:
            value = self._numbers.load(index, lanes_of(value), mask) + value
        self._numbers.store(index, value, mask)


__all__ = [
    "GradientStore",
    "Numbers",
    "accumulate",
    "accumulators",
    "converts_halves",
    "element_bytes",
    "load_vector",
    "moves_vectors",
    "store_vector",
    "where",
]
