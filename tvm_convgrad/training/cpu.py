# SPDX-License-Identifier: Apache-2.0
"""Compilation targets by name, and the CPU features that code for them needs and that this machine has."""

from __future__ import annotations

import json
import platform
import re
from functools import cache
from pathlib import Path
from typing import Any

from tvm_convgrad.errors import SetupError, UnsupportedError
from tvm_convgrad.offload.cuda import local_target

_GPU = re.compile(r"cuda:(sm_\d+[af]?)")

# LLVM's names of instruction sets that code may need, and Linux's in /proc/cpuinfo.
_X86_FLAGS = {
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


def parse_target(text: str, gpus: bool = False) -> Any:
    """A TVM target: "llvm" (any CPU of this architecture), "native" (this CPU), or TVM's JSON form of one.

    The text of the target that is returned says all that kernels depend on; "native" becomes this CPU's name and number
    of cores.

    Args:
        gpus: whether it may be an NVIDIA GPU as well: "cuda:sm_90", or "cuda", the first one of this machine.

    Raises:
        UnsupportedError: no such target, or not one that may be.
        SetupError: "cuda" on a machine without a GPU.
    """
    import tvm

    from tvm_convgrad.kernels.target import cores_of, native_target

    arch = _GPU.fullmatch(text)
    if gpus and text == "cuda":
        try:
            return local_target()
        except SetupError as error:
            raise SetupError(f"{error} For a GPU elsewhere, name its architecture: --target cuda:sm_90.") from error
    if gpus and arch is not None:
        return tvm.target.Target({"kind": "cuda", "arch": arch[1]})
    if text == "native":
        return native_target()
    try:
        described = json.loads(text) if text.lstrip().startswith("{") else {"kind": "cuda" if arch else text}
        kind = str(described["kind"])
        # Targets that are no CPUs are not even made: TVM would look for their toolkits and complain.
        known = kind == "llvm" or kind not in tvm.target.Target.list_kinds()
        target = tvm.target.Target(text if described == {"kind": text} else described) if known else None
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UnsupportedError(
            f'target {text!r} is not one that TVM knows; use llvm, native, or JSON such as {{"kind": "llvm", "mcpu": '
            f'"haswell"}} ({str(error).splitlines()[0]})'
        ) from error
    if target is None or target.kind.name != "llvm":
        raise UnsupportedError(
            f"target {text!r} is not a CPU; use llvm or native"
            + (
                ", or an NVIDIA GPU: cuda (this machine's), or by its architecture, such as cuda:sm_90."
                if gpus
                else "."
            )
        )
    cores_of(target)  # raises if the number makes no sense
    return target


def required_features(target: Any) -> list[str]:
    """The instruction sets beyond the architecture's base that LLVM may use for `target`."""
    import tvm
    from tvm.target import codegen

    if target.kind.name == "cuda":
        target = tvm.target.Target("llvm")  # of the host
    return sorted(set(map(str, codegen.llvm_get_cpu_features(target))) & set(_X86_FLAGS))


@cache
def local_features() -> frozenset[str]:
    """The instruction sets of this CPU, by LLVM's names."""
    if platform.machine() != "x86_64":
        return frozenset()  # none is ever required there: see required_features
    info = Path("/proc/cpuinfo").read_text()
    flags = set(next((line for line in info.splitlines() if line.startswith("flags")), "").split())
    return frozenset(name for name, flag in _X86_FLAGS.items() if flag in flags)
