# SPDX-License-Identifier: Apache-2.0
"""Stack slots: where `Loops.let` keeps the named values of a loop body, in place of TIR's own variables.

LLVM promotes the slots to registers, so they cost nothing at run time, and they make TVM compile much faster: TVM
substitutes the value of a TIR variable into each later expression that uses it and simplifies the whole again, in every
pass and once more when it generates LLVM's code, which for chains of variables is most of the time to compile. It does
not substitute through memory. And a pass that measures how much of each buffer is used (CompactBufferAllocation)
evaluates each access with all integer variables before it, in time that grows with the square of a kernel's length.
"""

from __future__ import annotations

from collections.abc import Callable

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.tir import buffer_data, decl_buffer

STACK_BYTES = 1023
"""The largest buffer that TVM allocates on the stack, from where LLVM promotes it to registers."""

_BYTES = {"int32": 4, "float32": 4, "float64": 8}


class StackSlots:
    """The slots of one loop body: each is written once, before it is read."""

    def __init__(self, name: Callable[[str], str]) -> None:
        """Args:
        name: makes a name unique within the PrimFunc.
        """
        self._name = name
        self._buffers: list[tuple[tir.Buffer, tir.Buffer]] = []
        self._last: dict[tuple[str, int], tuple[tir.Buffer, range]] = {}

    def take(self, dtype: str, lanes: int) -> tuple[tir.Buffer, int]:
        """The buffer and the index in it of a new slot; slots of one type and width share buffers."""
        buffer, left = self._last.get((dtype, lanes)) or (None, range(0))
        if buffer is None or not left:
            buffer, left = self._allocated(dtype, lanes)
        self._last[dtype, lanes] = buffer, left[1:]
        return buffer, left[0]

    def _allocated(self, dtype: str, lanes: int) -> tuple[tir.Buffer, range]:
        """The alias of a new buffer with one extra element, for the reasons that `Loops.panel` gives; its indices."""
        size = max(1, (STACK_BYTES // _BYTES[dtype] - 1) // lanes) * lanes
        name = self._name("slots")
        buffer = decl_buffer((size + 1,), dtype, name=f"{name}_memory")
        alias = decl_buffer((size,), dtype, name=name, data=buffer_data(buffer))
        self._buffers.append((buffer, alias))
        return alias, range(0, size, lanes)

    def begin(self) -> list[tir.Stmt]:
        """The statements at the begin of the loop body: allocations."""
        statements = []
        for buffer, alias in self._buffers:
            statements += [tir.AllocBuffer(buffer), tir.DeclBuffer(alias, data=buffer_data(buffer))]
        return statements + self.end()

    def end(self) -> list[tir.Stmt]:
        """The statements at its end: stores to the extra elements, which keep the memory reserved until here."""
        return [
            tir.BufferStore(buffer, tir.const(0, str(buffer.dtype)), [tir.IntImm("int32", int(alias.shape[0]))])
            for buffer, alias in self._buffers
        ]


def fits_slot(dtype: str) -> bool:
    """Whether values of a type are kept in slots: not conditions, which TIR stores as bytes, nor narrow floats."""
    return dtype in _BYTES


__all__ = ["StackSlots", "fits_slot"]
