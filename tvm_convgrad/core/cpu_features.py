# SPDX-License-Identifier: Apache-2.0
"""The instruction sets of this CPU, by LLVM's names, read without TVM; and whether Linux lets a process use tiles."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from functools import cache
from pathlib import Path

X86_FLAGS = {
    name: name.replace(".", "_").replace("-", "_")
    for name in ("sse4.1", "sse4.2", "avx", "avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl")
} | {
    "avx512vnni": "avx512_vnni",
    "avx512bf16": "avx512_bf16",
    "avx512fp16": "avx512_fp16",
    "avxvnni": "avx_vnni",
    "amx-tile": "amx_tile",
    "amx-bf16": "amx_bf16",
    "amx-fp16": "amx_fp16",
}
ARM_FLAGS = {"fullfp16": "asimdhp", "dotprod": "asimddp", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve"}
TILE_FEATURES = frozenset({"amx-tile", "amx-bf16", "amx-fp16"})
"""Those that no code needs to be loaded: kernels of tiles ask for them when they are called, and have other loops."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
"""Linux's number of arch_prctl on x86-64, its ARCH_REQ_XCOMP_PERM, and the feature that the data of tiles are."""

FLAGS = X86_FLAGS | ARM_FLAGS
"""LLVM's names of instruction sets that code may need, and their names in Linux's /proc/cpuinfo."""


@cache
def local_features() -> frozenset[str]:
    """The instruction sets of this CPU, by LLVM's names."""
    known = {"x86_64": X86_FLAGS, "aarch64": ARM_FLAGS}.get(platform.machine(), {})
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if known and info.is_file() else []
    flags = set(next((line for line in lines if line.startswith(("flags", "Features"))), "").split())
    return frozenset(name for name, flag in known.items() if flag in flags)


def tile_refusal(product: str = "amx-bf16") -> str:
    """Why kernels of AMX use no tiles in this process, or nothing; Linux is asked for the permission.

    Args:
        product: the instruction set that multiplies the tiles, "amx-bf16" or "amx-fp16".

    Example:
        >>> from tvm_convgrad.core.cpu_features import tile_refusal
        >>> isinstance(tile_refusal(), str)
        True
    """
    missing = sorted({"amx-tile", product} - local_features())
    if missing:
        return f"this CPU has no {' and no '.join(missing)}, or a hypervisor hides it"
    if platform.machine() != "x86_64" or sys.platform != "linux":
        return "tiles are asked for by a call of Linux on x86-64"
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        return ""
    return f"Linux refuses the data of tiles ({os.strerror(ctypes.get_errno())}); it allows them from version 5.16 on"
