# SPDX-License-Identifier: Apache-2.0
"""The instruction sets of this CPU, by LLVM's names, read without TVM."""

from __future__ import annotations

import platform
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
}
ARM_FLAGS = {"fullfp16": "asimdhp", "dotprod": "asimddp", "i8mm": "i8mm", "bf16": "bf16", "sve": "sve"}
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
