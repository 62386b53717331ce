# SPDX-License-Identifier: Apache-2.0
"""Named values of a loop body in memory on the stack, which LLVM turns into registers, in place of TIR's own names.

TVM puts what a name stands for into each later expression that uses it, and simplifies the whole again, in every pass
and once more when it makes LLVM's code: chains of names cost it most of the time to compile. It does not look through
memory. And a pass that measures how much of each buffer is used (CompactBufferAllocation) evaluates each access with
all names of integers that came before, so that the time would grow with the square of a kernel's length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.tirx.buffer import buffer_data, decl_buffer

STACK = 1023
"""Bytes of the largest buffer that TVM keeps on the stack, whence LLVM takes it into registers."""

_BYTES = {"int32": 4, "float32": 4, "float64": 8}


class Cells:
    """The cells of one run of a loop's body: each is written once, before it is read."""

    def __init__(self, name: Callable[[str], str]) -> None:
        self._name = name
        self._whole: list[tuple[Any, Any]] = []
        self._last: dict[tuple[str, int], tuple[Any, int]] = {}

    def take(self, dtype: str, lanes: int) -> tuple[Any, int]:
        """A buffer and the index in it of a new cell for a value; cells of one type and width share buffers."""
        buffer, at = self._last.get((dtype, lanes), (None, 0))
        if buffer is None or at + lanes > int(buffer.shape[0]):
            buffer, at = self._made(dtype, lanes), 0
        self._last[dtype, lanes] = buffer, at + lanes
        return buffer, at

    def _made(self, dtype: str, lanes: int) -> Any:
        """A buffer seen through a second name, as `Loops.panel` has it."""
        size = max(1, (STACK // _BYTES[dtype] - 1) // lanes) * lanes
        name = self._name("cells")
        whole = decl_buffer((size + 1,), dtype, name=f"{name}_memory")
        seen = decl_buffer((size,), dtype, name=name, data=buffer_data(whole))
        self._whole.append((whole, seen))
        return seen

    def begin(self) -> list[Any]:
        """The statements that the body begins with."""
        statements = []
        for whole, seen in self._whole:
            statements += [tirx.AllocBuffer(whole), tirx.DeclBuffer(seen, data=buffer_data(whole))]
        return statements + self.end()

    def end(self) -> list[Any]:
        """Those that it ends with: until then no other buffer gets this memory."""
        return [
            tirx.BufferStore(whole, tirx.const(0, str(whole.dtype)), [tirx.IntImm("int32", int(seen.shape[0]))])
            for whole, seen in self._whole
        ]


def fits_cell(dtype: str) -> bool:
    """Whether values of a type are kept in cells: not conditions, which TIR keeps as bytes, nor narrow floats."""
    return dtype in _BYTES


__all__ = ["Cells", "fits_cell"]
