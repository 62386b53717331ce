# SPDX-License-Identifier: Apache-2.0
"""`Job`: one kernel to compile, and the key of its library: all that its code depends on, read without TVM."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import tvm_convgrad
from tvm_convgrad.bridge.compiler import compiler_identity
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.entries import default_path
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.threads import available_cores

EXTRA: Mapping[str, tuple[str, ...]] = {"": (), "bias": ("bias",), "bias_grad": ("bias_grad",)}
"""What a kernel can compute beside its direction: the names of fields of an Epilogue that are set."""

SYMBOL = "kernel"
"""The name that every kernel has in its library."""

HOST, XLA_HOST, TORCH_ENTRIES = "host", "xla", "torch"
"""The jobs that are not kernels: what kernels call, on OpenMP's threads and on XLA's (JAX); PyTorch's entries."""

HEADERS = {XLA_HOST: "jaxlib", TORCH_ENTRIES: "torch"}
"""The packages whose headers those jobs need."""

_SOURCES = (
    "core",
    "codegen",
    "kernels",
    "bridge/job.py",
    "bridge/make.py",
    "bridge/runtime",
    "training/compile/kernel_object.py",
    "training/passes/internal_calls.py",
)
"""What a library is made by."""

_PACKAGES = ("apache-tvm", "apache-tvm-ffi")


@dataclass(frozen=True)
class Job:
    """One kernel.

    Attributes:
        direction: of the catalogue.
        descriptor: of the problem, which is static.
        extra: a key of EXTRA.
    """

    direction: str
    descriptor: str
    extra: str = ""

    @property
    def problem(self) -> ConvProblem:
        """The problem of the descriptor."""
        return ConvProblem.from_descriptor(self.descriptor)

    @property
    def tensors(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and element type of what the kernel takes, in order: operands, bias, result, gradient of the bias."""
        problem, direction = self.problem, DIRECTIONS[self.direction]
        whole = {name: (tuple(map(int, shape)), dtype) for name, (shape, dtype) in problem.tensors.items()}
        found = [whole[name] for name in direction.operands]
        shape, dtype = whole[direction.result]
        if self.extra == "bias":
            channels = problem.out_channels if direction.result == "grad" else problem.in_channels
            found.append(((channels,), dtype))
        found.append((shape, dtype))
        if self.extra == "bias_grad":
            found.append(((problem.out_channels,), dtype))
        return tuple(found)

    @property
    def key(self) -> str:
        """What the library is found by."""
        return digest([self.direction, self.descriptor, self.extra])


def digest(parts: list[object]) -> str:
    """The key of something that depends on these parts, which JSON can write, and on what makes kernels here."""
    whole = json.dumps([parts, surroundings()], sort_keys=True)
    return hashlib.sha256(whole.encode()).hexdigest()


@lru_cache(maxsize=1)
def surroundings() -> list[object]:
    """What kernels depend on beside the job: CPU, cores, C library, our sources, TVM, and the tuned plans."""
    sources, root = hashlib.sha256(), Path(tvm_convgrad.__file__).parent
    for name in _SOURCES:
        found = [root / name] if (root / name).is_file() else (root / name).rglob("*")
        for path in sorted(path for path in found if path.suffix in (".py", ".cc", ".h")):
            sources.update(f"{path.relative_to(root)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return [
        tvm_convgrad.__version__,
        sources.hexdigest(),
        [installed_version(package) for package in _PACKAGES],
        _states("tvm"),
        _states("tvm_ffi"),
        platform.machine(),
        _cpu(),
        available_cores(),
        _c_library(),
        _tunings(),
    ]


def library_key(name: str, any_compiler: bool = False) -> str:
    """The key of the library of a job that is not a kernel.

    Such a library is C++, so that it depends on the compiler. Where there is none, one that any compiler made serves.
    """
    package = HEADERS.get(name)
    made_by = [] if any_compiler else compiler_identity()
    headers = [] if package is None else [installed_version(package), _states(package)]
    return digest([name, *headers, made_by])


def package_folder(package: str) -> Path | None:
    """Where an installed package is, or None. It is not imported, and may be one that must not be."""
    found = importlib.util.find_spec(package) or importlib.machinery.PathFinder.find_spec(package)
    return Path(found.origin).parent if found is not None and found.origin else None


def installed_version(package: str) -> str:
    """The version of an installed package, or nothing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _states(package: str) -> list[tuple[str, int, int]]:
    """The libraries of a package, with their sizes and times."""
    folder = package_folder(package)
    if folder is None:
        return []
    libraries = sorted((folder / "lib").glob("*.so"))
    return [(library.name, (state := library.stat()).st_size, state.st_mtime_ns) for library in libraries]


def _cpu() -> list[str]:
    """This CPU as the system describes it: its model and its instruction sets."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = ("model", "vendor_id", "cpu family", "flags", "Features", "CPU part", "CPU implementer")
    return list(dict.fromkeys(line for line in lines if line.startswith(names)))


def _c_library() -> str:
    """The C library and its version: what is linked against a newer one is not loaded."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (OSError, ValueError):  # of another C library than GNU's
        return "-".join(platform.libc_ver())


def _tunings() -> str:
    try:
        return hashlib.sha256(default_path().read_bytes()).hexdigest()
    except OSError:
        return ""


__all__ = [
    "EXTRA",
    "HEADERS",
    "HOST",
    "SYMBOL",
    "TORCH_ENTRIES",
    "XLA_HOST",
    "Job",
    "digest",
    "installed_version",
    "library_key",
    "package_folder",
    "surroundings",
]
