# SPDX-License-Identifier: Apache-2.0
"""Freeing the pages of a library's constants, of which TVM makes copies when it loads the library.

An inference library carries its weights as constants, and a step for a GPU its initial state. After loading they are
in memory once more than needed: as pages of the mapped file, which the system takes back only when it runs short, and
which count as the process's until then.
"""

from __future__ import annotations

import ctypes
import re
import sys
from pathlib import Path

_DONTNEED = 4
"""MADV_DONTNEED of Linux: drop the pages; whoever reads them again gets them from the file."""

_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) r--p \S+ \S+ \d+ +(.*)\n((?:\w+: .*\n)*)", re.MULTILINE)


def give_back(library: Path) -> int:
    """Drop the resident pages of a loaded library's read-only data; returns the bytes of the mappings (Linux; else 0).

    Only mappings that are neither writable nor code, and that nobody has written to, are touched: what the linker has
    relocated is read-only too, but is not in the file.
    """
    maps = Path("/proc/self/smaps")
    if sys.platform != "linux" or not maps.exists():
        return 0
    path, total = str(library.resolve()), 0
    libc = ctypes.CDLL(None, use_errno=True)
    for low, high, name, facts in _MAPPING.findall(maps.read_text()):
        if name == path and re.search(r"^Anonymous: +0 kB$", facts, re.MULTILINE):
            begin, size = int(low, 16), int(high, 16) - int(low, 16)
            if libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(size), _DONTNEED) == 0:
                total += size
    return total


__all__ = ["give_back"]
