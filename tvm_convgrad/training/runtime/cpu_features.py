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
"""LLVM's names of instruction sets that code may need, and their names in Linux's /proc/cpuinfo."""


@cache
def local_features() -> frozenset[str]:
    """The instruction sets of this CPU, by LLVM's names."""
    if platform.machine() != "x86_64":
        return frozenset()  # none is ever required there: see required_features
    info = Path("/proc/cpuinfo").read_text()
    flags = set(next((line for line in info.splitlines() if line.startswith("flags")), "").split())
    return frozenset(name for name, flag in X86_FLAGS.items() if flag in flags)
