# SPDX-License-Identifier: Apache-2.0
"""Arrays that begin or end at a page that may not be touched: an access beyond them ends the process."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np

from tvm_convgrad.core.rounding import round_up

Array = np.ndarray[Any, Any]

_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_PAGE = mmap.PAGESIZE


class GuardedMemory:
    """Memory for copies of arrays, each between two pages without any rights.

    Attributes:
        at_end: whether arrays end at the page behind them; else they begin at the end of the page before them.
    """

    def __init__(self, at_end: bool) -> None:
        self.at_end = at_end
        self._held: list[tuple[mmap.mmap, int, int]] = []
        self._libc = ctypes.CDLL(None, use_errno=True)

    def copy(self, array: Array) -> Array:
        """A copy of an array, of its shape and type; it is valid as long as this object is."""
        room = round_up(max(array.nbytes, 1), _PAGE)
        memory = mmap.mmap(-1, room + 2 * _PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        start = _PAGE + (room - array.nbytes if self.at_end else 0)
        found = np.frombuffer(memory, np.uint8, array.nbytes, start).view(array.dtype).reshape(array.shape)
        found[...] = array
        for guard in (address, address + _PAGE + room):
            self._protect(guard, _NONE)
            self._held.append((memory, guard, room))
        return found

    def _protect(self, address: int, rights: int) -> None:
        if self._libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(_PAGE), rights):
            raise OSError(ctypes.get_errno(), "mprotect failed")


__all__ = ["GuardedMemory"]
