# SPDX-License-Identifier: Apache-2.0
"""Engines that cuDNN itself proposes for a call on a GPU; it needs the GPU's properties, not the GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tvm_convgrad.offload import host

NUMERICAL = (
    "tensor cores",
    "rounds inputs",
    "narrow sums",
    "FFT",
    "not deterministic",
    "Winograd",
    "Winograd 4x4",
    "Winograd 6x6",
    "Winograd 13x13",
    "strict NaN",
)
"""cudnnBackendNumericalNote_t in words."""

COMPILED = "compiled at run time"
"""The note of an engine that cuDNN compiles in the process that runs it."""

BEHAVIOR = (COMPILED, "reorders filter", "reorders bias", "CUDA graphs", "cuBLASLt")
"""cudnnBackendBehaviorNote_t in words."""

_DRIVER = "libcuda.so.1"


@dataclass(frozen=True)
class Listed:
    """An engine as the heuristics propose it.

    Attributes:
        index: its global number, which with the knobs names it in this version of cuDNN.
        workspace: bytes; 0 where there is no plan.
        notes: numerical and behavior notes in words.
        knobs: (type, value) pairs.
        refusal: why it is not used; empty if it may be.
    """

    index: int
    workspace: int
    notes: tuple[str, ...]
    knobs: tuple[tuple[int, int], ...]
    refusal: str

    def __str__(self) -> str:
        knobs = ",".join(f"{key}={value}" for key, value in self.knobs)
        return f"engine {self.index}" + (f" ({knobs})" if knobs else "")


@lru_cache(maxsize=4096)
def engines(numbers: tuple[int, ...], properties: str, most: int, interface: int) -> tuple[Listed, ...] | str:
    """What cuDNN proposes for a call on a GPU, best first, up to `most` that may be used; or why it refuses the graph.

    Args:
        numbers: the call as the runtime reads it.
        properties: of the GPU, JSON.
        interface: of the runtime, which is loaded.
    """
    try:
        text = host.ask("cudnn", interface, "engines", numbers, properties, most)
    except ValueError as error:
        return str(error).splitlines()[0].removeprefix("cudnn: ")
    if text.startswith("|"):
        return text[1:]
    return tuple(_listed(line) for line in text.splitlines())


def _listed(line: str) -> Listed:
    index, workspace, numerical, behavior, knobs, refusal = line.split("|", 5)
    notes = (*_words(numerical, NUMERICAL), *_words(behavior, BEHAVIOR))
    pairs = (pair.split("=") for pair in knobs.split(",") if pair)
    return Listed(int(index), int(workspace), notes, tuple((int(key), int(value)) for key, value in pairs), refusal)


def _words(numbers: str, table: tuple[str, ...]) -> list[str]:
    found = [int(number) for number in numbers.split(",") if number]
    return [table[number] if number < len(table) else f"note {number}" for number in found]


def load_driver(stand_in: Callable[[], Path]) -> None:
    """Load NVIDIA's driver, or where the system has none what stands in for it; cuDNN finds either by its soname.

    Args:
        stand_in: builds that library.
    """
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:
        ctypes.CDLL(str(stand_in()), mode=ctypes.RTLD_GLOBAL)


__all__ = ["COMPILED", "Listed", "engines", "load_driver"]
