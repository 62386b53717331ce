# SPDX-License-Identifier: Apache-2.0
"""What kernels need to know of a CPU: vector width, registers, caches, and how many parts to cut work into."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.threads import available_cores

CORES_ATTRIBUTE = "num-cores"
"""The attribute of a TVM target that says how many cores the CPU has."""

DEFAULT_CORES = 8
"""The number of cores that kernels are made for where the target does not say it: the same on every machine that
builds, as it fixes the order of sums."""

FEWEST_PARTS, MOST_PARTS = 2, 64
"""Bounds of the number of parts of a sum, whatever the number of cores."""

CLOCK = 3.5e9
"""Cycles a second that estimates are given for; only their ratios decide."""

PARALLEL_FROM = 50_000
"""Multiply-accumulates; less is not worth waking threads for."""

MOST_PIECES = 256
"""Pieces of a sum: four for each of 64 cores."""

PAGE_BYTES, NEAR_PAGES, FAR_PAGES = 4096, 64, 400
"""Pages that a core's first translations reach, and so many that each access pays for one."""


@dataclass(frozen=True)
class Machine:
    """A CPU as kernels see it.

    Attributes:
        name: of the instruction set, for reports.
        vector_bytes: of one register.
        registers: how many vector registers there are.
        l2_bytes: what a core's own cache should hold at once: panels are cut to a part of it.
        parts: into how many pieces a reduction may be cut, from the target's number of cores. It is fixed when the
            kernel is made, so that the order of sums, and thereby the result, depends neither on how many threads run
            nor on the machine that builds.
        has_masks: whether loads and stores of some lanes only are single instructions.
        parallel_from: multiply-accumulates of a loop nest from which on its outermost loop is parallel.
    """

    name: str
    vector_bytes: int
    registers: int
    l2_bytes: int = 1 << 20
    parts: int = 2
    has_masks: bool = False
    parallel_from: int = PARALLEL_FROM

    def lanes(self, dtype: str) -> int:
        """Elements of a type in one register."""
        return self.vector_bytes // DTYPE_BYTES[dtype]


CPUS = {
    machine.name: machine
    for machine in (
        Machine("AVX-512", 64, 32, has_masks=True),
        Machine("AVX2", 32, 16, 1 << 18, has_masks=True),
        Machine("SSE", 16, 16, 1 << 18),
        Machine("NEON", 16, 32, 1 << 19),
    )
}
"""The instruction sets that kernels are made for, by their names."""


def beyond_near_pages(count: int, stride: int) -> float:
    """How far `count` places, `stride` bytes apart, spread over more pages than are near: from 0 to 1, all far."""
    pages = count * min(1.0, stride / PAGE_BYTES)
    return min(1.0, max(0.0, (pages - NEAR_PAGES) / (FAR_PAGES - NEAR_PAGES)))


def machine_of(target: Any) -> Machine | None:
    """The machine of a TVM target, or None if it is no CPU that kernels are made for.

    It depends on the text of the target only, not on the machine that builds.

    Raises:
        UnsupportedError: the target's number of cores is less than 1.
    """
    if target is None or target.kind.name != "llvm":
        return None
    return _machine(str(target))


def cores_of(target: Any) -> int:
    """How many cores kernels for a TVM target are made for: its attribute num-cores, or DEFAULT_CORES.

    Raises:
        UnsupportedError: num-cores is less than 1.
    """
    stated = target.attrs.get(CORES_ATTRIBUTE)
    if stated is not None and int(stated) < 1:
        raise UnsupportedError(f"target: {CORES_ATTRIBUTE} is {int(stated)}; it must be at least 1, or left out")
    return DEFAULT_CORES if stated is None else int(stated)


def with_cores(target: Any, cores: int) -> Any:
    """A TVM target of kind llvm with another number of cores."""
    import tvm

    return tvm.target.Target({**json.loads(str(target)), CORES_ATTRIBUTE: cores})


def native_target() -> Any:
    """The TVM target of this CPU: its instructions, and the number of cores that this process may use."""
    import tvm

    mcpu = str(tvm.target.codegen.llvm_get_system_cpu())
    return tvm.target.Target({"kind": "llvm", "mcpu": mcpu, CORES_ATTRIBUTE: available_cores()})


@lru_cache(maxsize=64)
def _machine(described: str) -> Machine | None:
    import tvm
    from tvm.target import codegen

    target = tvm.target.Target(described)
    features = set(map(str, codegen.llvm_get_cpu_features(target)))
    attributes = set(map(str, target.attrs.get("mattr", None) or ()))
    features |= {a[1:] for a in attributes if a.startswith("+")}
    features -= {a[1:] for a in attributes if a.startswith("-")}
    triple = str(target.attrs.get("mtriple", "") or codegen.llvm_get_system_triple())
    parts = max(FEWEST_PARTS, min(cores_of(target), MOST_PARTS))
    if triple.startswith(("x86_64", "amd64", "i686")):
        if "avx512f" in features:
            return replace(CPUS["AVX-512"], parts=parts)
        if "avx2" in features and "fma" in features:
            return replace(CPUS["AVX2"], parts=parts)
        return replace(CPUS["SSE"], parts=parts)
    if triple.startswith(("aarch64", "arm64")):
        return replace(CPUS["NEON"], parts=parts)
    return None
