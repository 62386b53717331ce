# SPDX-License-Identifier: Apache-2.0
"""The record of the hardware: what instruction sets and CPUs have, with units, from the text of a TVM target.

The estimates of all kernels use these numbers. A kernel's model may scale them, but it does not define them again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import ClassVar

from tvm.target import Target
from tvm.target import codegen as llvm

from tvm_convgrad.codegen import tir
from tvm_convgrad.core.cpu_features import FLAGS, local_features
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.threads import available_cores

CORES_ATTRIBUTE = "num-cores"
"""The attribute of a TVM target that says how many cores the CPU has."""

DEFAULT_CORES = 8
"""The number of cores that kernels are made for if the target has no such attribute. It is the same wherever they are
built, as it fixes the order of sums."""

FEWEST_PARTS, MOST_PARTS = 2, 64
"""Bounds of the parts of a reduction, whatever the number of cores."""

PARALLEL_FROM = 50_000
"""The multiply-accumulates of a loop nest from which on its outermost loop is parallel: fewer do not pay for waking the
threads."""

MOST_PIECES = 256
"""The most parts of a reduction that a tiling may have: four for each of 64 cores."""

MOST_PARTIAL_SUMS = 1 << 28
"""The most sums that all parts of a reduction keep beside each other: 1 GiB in float32, and an eighth of what indices
of int32 reach. Parts for 64 cores of a weight with 37 million elements would be more."""


@dataclass(frozen=True)
class Machine:
    """A CPU, as far as kernels and their estimates depend on it. Rates are those of one core while all cores work.

    Attributes:
        name: of the instruction set, for reports.
        vector_bytes: bytes of a vector register.
        registers: the number of vector registers.
        l2_bytes: bytes of a core's own second-level cache; blocks, slabs and panels are made to fit a part of it.
        parts: the number of cores that work is divided among, and the most parts of a reduction (split-K) that the
            planner takes; from the target's number of cores. It is fixed when the kernel is made, so that the order of
            sums, and thereby the result, depends neither on how many threads run nor on the machine that builds.
        has_masks: whether masked loads and stores are single instructions.
        has_half_masks: whether they are for elements of 16 bits as well.
        parallel_from: multiply-accumulates of a loop nest from which on its outermost loop is parallel.
        dots: the 16-bit types that an instruction multiplies in pairs and sums in float32 (`codegen.dot_product`).
        dot_cost: how many vector multiply-adds start in the time of one such instruction: on an Emerald Rapids four
            (measured in registers), so that it does half as many products.
        tiles: those of which an instruction multiplies whole tiles, if the process may use them
            (`codegen.tile_product`).
        transposed_store: cycles to store a vector of results that is transposed on its way. 8 was measured on a Zen 5
            with AVX-512 (float32, float16 and bfloat16), 16 there with AVX2; 12 on an Emerald Rapids, with one port
            for shuffles of 512 bits. Of CPUs of 512-bit vectors AMD's take the first, and Intel's the last.
        handover_rate: bytes a cycle of a panel that all cores pack before they compute: each writes a part of it, and
            reads all of it. 2 was fitted on an Emerald Rapids with two threads, 10 on AMD's CPUs.

    The same for all CPUs, as only the ratios of estimates decide:
        clock: cycles a second.
        fma_latency: cycles from one multiply-add of an accumulator to the next.
        fmas: vector multiply-adds that start in a cycle.
        dot_latency: cycles from one dot product of pairs of an accumulator to the next; each does the work of two
            multiply-adds.
        tile_rate: rows of a tile that are multiplied in a cycle; tile_latency: cycles from one product of a tile of
            sums to the next; tile_load, tile_load_far: cycles to load a row of a tile from the first-level and from the
            second-level cache. They were measured on an Emerald Rapids, the last one between 1.3 and 1.5 by itself; it
            was fitted to tilings that were timed there.
        l1_bytes: bytes of a core's first-level cache.
        line_bytes: bytes of a line of every cache.
        shared_bytes: bytes of the cache that cores share; larger tensors come from memory.
        shared_rate, memory_rate: bytes a cycle that are read from the shared cache and from memory.
        mixed_rate: bytes a cycle that are read from and written to memory together.
        page_bytes: bytes of a page.
        near_pages: pages of a core's first-level TLB.
        far_pages: pages from which on every access misses it.
    """

    clock: ClassVar[float] = 3.5e9
    fma_latency: ClassVar[float] = 4.0
    fmas: ClassVar[int] = 2
    dot_latency: ClassVar[float] = 6.0
    tile_rate: ClassVar[float] = 1.0
    tile_latency: ClassVar[float] = 16.0
    tile_load: ClassVar[float] = 0.5
    tile_load_far: ClassVar[float] = 1.2
    l1_bytes: ClassVar[int] = 1 << 15
    line_bytes: ClassVar[int] = 64
    shared_bytes: ClassVar[int] = 8 << 20
    shared_rate: ClassVar[float] = 6.0
    memory_rate: ClassVar[float] = 4.5
    mixed_rate: ClassVar[float] = 3.0
    page_bytes: ClassVar[int] = 4096
    near_pages: ClassVar[int] = 64
    far_pages: ClassVar[int] = 400

    name: str
    vector_bytes: int
    registers: int
    l2_bytes: int = 1 << 20
    parts: int = 2
    has_masks: bool = False
    has_half_masks: bool = False
    parallel_from: int = PARALLEL_FROM
    dots: tuple[str, ...] = ()
    tiles: tuple[str, ...] = ()
    dot_cost: int = 1
    transposed_store: float = 16.0
    handover_rate: float = 10.0

    @property
    def gains_by_dots(self) -> bool:
        """Whether dot products do more products than multiply-adds of operands that are converted."""
        return bool(self.dots) and self.dot_cost < 2

    def lanes(self, dtype: str) -> int:
        """Elements of a type in one register."""
        return self.vector_bytes // DTYPE_BYTES[dtype]


CPUS = {
    machine.name: machine
    for machine in (
        Machine(
            "AVX-512", 64, 32, has_masks=True, has_half_masks=tir.HALF_VECTORS, transposed_store=12.0, handover_rate=2.0
        ),
        Machine(
            "AVX512-BF16",
            64,
            32,
            has_masks=True,
            has_half_masks=tir.HALF_VECTORS,
            dots=("bfloat16",),
            transposed_store=8.0,
        ),
        Machine(
            "AMX-BF16",
            64,
            32,
            1 << 21,
            has_masks=True,
            has_half_masks=tir.HALF_VECTORS,
            dots=("bfloat16",),
            tiles=("bfloat16",),
            dot_cost=4,
            transposed_store=12.0,
            handover_rate=2.0,
        ),
        Machine(
            "AMX-FP16",
            64,
            32,
            1 << 21,
            has_masks=True,
            has_half_masks=tir.HALF_VECTORS,
            dots=("bfloat16",),
            tiles=("bfloat16", "float16"),
            dot_cost=4,
            transposed_store=12.0,
            handover_rate=2.0,
        ),
        Machine("AVX2", 32, 16, 1 << 18, has_masks=True),
        Machine("SSE", 16, 16, 1 << 18),
        Machine("NEON", 16, 32, 1 << 19),
        Machine("NEON-BF16", 16, 32, 1 << 19, dots=("bfloat16",), transposed_store=8.0),
    )
}
"""The instruction sets that kernels are made for, by their names."""


def beyond_near_pages(count: int, stride: int) -> float:
    """How far `count` places, `stride` bytes apart, spread over more pages than are near: 0 is not at all, 1 is far."""
    pages = count * min(1.0, stride / Machine.page_bytes)
    return min(1.0, max(0.0, (pages - Machine.near_pages) / (Machine.far_pages - Machine.near_pages)))


def machine_of(target: Target | None) -> Machine | None:
    """The machine of a TVM target, or None if it is no CPU that kernels are made for.

    It depends on the text of the target only, not on the machine that builds.

    Raises:
        UnsupportedError: the target's number of cores is less than 1.
    """
    if target is None or target.kind.name != "llvm":
        return None
    return _machine(str(target))


def is_gpu(target: object) -> bool:
    """Whether a target is a TVM target for NVIDIA GPUs."""
    return isinstance(target, Target) and target.kind.name == "cuda"


def cores_of(target: Target) -> int:
    """How many cores kernels for a TVM target are made for: its attribute num-cores, or DEFAULT_CORES.

    Raises:
        UnsupportedError: num-cores is less than 1.
    """
    stated = target.attrs.get(CORES_ATTRIBUTE)
    if stated is not None and int(stated) < 1:
        raise UnsupportedError(f"target: {CORES_ATTRIBUTE} is {int(stated)}; it must be at least 1, or left out")
    return DEFAULT_CORES if stated is None else int(stated)


def with_cores(target: Target, cores: int) -> Target:
    """A TVM target of kind llvm with another number of cores."""
    text = str(target)  # JSON, or the options of a command where TVM has Relay
    fields = json.loads(text) if text.startswith("{") else dict(target.export())
    return Target({**fields, CORES_ATTRIBUTE: cores})


def native_target() -> Target:
    """The TVM target of this CPU: its instructions, and the number of cores that this process may use.

    LLVM tells the CPU's model. Instruction sets of the model that this CPU lacks, such as those that a hypervisor
    hides, are taken out of it.
    """
    mcpu = str(llvm.llvm_get_system_cpu())
    target = Target({"kind": "llvm", "mcpu": mcpu, CORES_ATTRIBUTE: available_cores()})
    here = local_features()  # empty where the system does not tell
    lacking = sorted((set(map(str, llvm.llvm_get_cpu_features(target))) & FLAGS.keys()) - here) if here else []
    if not lacking:
        return target
    mattr = [f"-{name}" for name in lacking]
    return Target({"kind": "llvm", "mcpu": mcpu, "mattr": mattr, CORES_ATTRIBUTE: available_cores()})


def _with(machine: Machine, other: Machine, names: tuple[str, ...]) -> Machine:
    """The machine with some fields of another."""
    return replace(machine, **{name: getattr(other, name) for name in names})


@lru_cache(maxsize=64)
def _machine(described: str) -> Machine | None:
    """The machine of a target of kind llvm, by the target's text."""
    target = Target(described)
    features = set(map(str, llvm.llvm_get_cpu_features(target)))
    attributes = set(map(str, target.attrs.get("mattr", None) or ()))
    features |= {a[1:] for a in attributes if a.startswith("+")}
    features -= {a[1:] for a in attributes if a.startswith("-")}
    triple = str(target.attrs.get("mtriple", "") or llvm.llvm_get_system_triple())
    parts = max(FEWEST_PARTS, min(cores_of(target), MOST_PARTS))
    if triple.startswith(("x86_64", "amd64", "i686")):
        if "avx512f" in features:
            dots = {"avx512bf16", "avx512bw"} <= features and llvm.llvm_version_major() >= tir.DOT_PRODUCTS_FROM_LLVM
            halves = tir.HALF_VECTORS and "avx512bw" in features
            # The permission to use tiles is asked for by a call of Linux.
            tiles = dots and {"amx-tile", "amx-bf16"} <= features and "linux" in triple
            tile_name = "AMX-FP16" if "amx-fp16" in features else "AMX-BF16"
            name = tile_name if tiles else "AVX512-BF16" if dots else "AVX-512"
            machine = replace(CPUS[name], parts=parts, has_half_masks=halves)
            # AMD's CPUs have SSE4a, with BF16 and without it.
            alike = CPUS["AVX512-BF16" if "sse4a" in features else "AMX-BF16"]
            machine = _with(machine, alike, ("transposed_store", "handover_rate"))
            if dots and not tiles and "sse4a" not in features and {"avx512fp16", "avxvnni"} & features:
                # Cores that have AMX, where a hypervisor or the target leaves it out.
                machine = _with(machine, alike, ("l2_bytes", "dot_cost"))
            return machine
        if "avx2" in features and "fma" in features:
            return replace(CPUS["AVX2"], parts=parts)
        return replace(CPUS["SSE"], parts=parts)
    if triple.startswith(("aarch64", "arm64")):
        dots = "bf16" in features and llvm.llvm_version_major() >= tir.DOT_PRODUCTS_FROM_LLVM
        return replace(CPUS["NEON-BF16" if dots else "NEON"], parts=parts)
    return None
