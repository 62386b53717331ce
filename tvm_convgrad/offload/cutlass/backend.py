# SPDX-License-Identifier: Apache-2.0
"""The backend of CUTLASS: kernels compiled into the cache, checked (can_implement), and called."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from functools import lru_cache
from pathlib import Path

from tvm.target import Target

import tvm_convgrad
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import REPRESENTATIVE_BATCH, ConvProblem, planned
from tvm_convgrad.offload import host, libraries
from tvm_convgrad.offload.calls import call_numbers
from tvm_convgrad.offload.contract import Backend, Engine
from tvm_convgrad.offload.cutlass import rules
from tvm_convgrad.offload.cutlass.entry import ENTRY
from tvm_convgrad.offload.cutlass.kernels import MATHS, Choice, Instance, choose
from tvm_convgrad.offload.cutlass.source import cuda_source
from tvm_convgrad.offload.cutlass.toolchain import cutlass_headers, required, toolchain

INTERFACE = 1
"""Of the runtime: of the numbers that it reads, and of the meaning of its functions."""

FILE = host.file_of(ENTRY.name, INTERFACE)
VARIABLE = str(ENTRY.variable)
FLOAT32 = ("simt", "3xtf32", "tf32")
"""How float32 operands are multiplied: exactly as float32, nearly so on tensor cores, or rounded to 10 bits there."""

LEAST_ARCH = 75
_DIGITS = 15
_SOURCES = Path(__file__).parent / "runtime"


class Cutlass(Backend):
    """CUTLASS's implicit-GEMM kernels, compiled by nvcc for NVIDIA GPUs from Turing on."""

    entry = ENTRY
    run_function = f"convgrad.cutlass.{INTERFACE}.run"

    def target_refusal(self, target: Target) -> str:
        """Why there are no kernels for a GPU: it is older than Turing."""
        arch = arch_number(target)
        if arch is None or arch < LEAST_ARCH:
            return f"the target's arch is {target.attrs.get('arch')}; its kernels are for sm_{LEAST_ARCH} and newer"
        return ""

    def missing(self) -> str:
        """What is missing of what compiles kernels: nvcc, of the packages or a toolkit, and CUTLASS's headers."""
        found = toolchain()
        return found if isinstance(found, str) else ""

    def refusal(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> str:
        """Why it does not compute a direction of a problem, by its rules, or why the target's GPU has no kernel."""
        refused = rules.refusal(direction, problem, epilogue)
        choice = refused or _chosen(direction, problem, epilogue, target)
        return choice if isinstance(choice, str) else ""

    def engine(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> Engine | str:
        """The kernel, compiled, with its own check of the problem (can_implement); for any batch, of some batch."""
        choice = _chosen(direction, problem, epilogue, target)
        assert isinstance(choice, Choice), "the rules refuse the problem"
        workspace = ctypes.c_int64()
        numbers = self.numbers(direction, planned(problem), epilogue, target)
        check = _library(choice.instance).convgrad_cutlass_check
        check.restype = ctypes.c_char_p
        refused = check((ctypes.c_int64 * len(numbers))(*numbers), ctypes.byref(workspace))
        if refused is not None:
            return f"its kernel {choice.instance.name} refuses it: {refused.decode()}"
        details = [f"{MATHS[choice.instance.math].unit}, deterministic"]
        if choice.slices > 1:
            apart = choice.instance.output != choice.instance.result
            details.append(f"{choice.slices} slices {'side by side' if apart else 'in turn'}")
        return Engine(choice.instance.name, ", ".join(details), workspace.value)

    def numbers(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> list[int]:
        """The fields of Call in runtime/call.h."""
        choice = _chosen(direction, problem, epilogue, target)
        assert isinstance(choice, Choice), "the rules refuse the problem"
        return [
            *call_numbers(direction, problem, epilogue, ENTRY.dtypes),
            choice.slices,
            int(_key(cuda_source(choice.instance), choice.instance.arch), 16),
        ]

    def digest(self) -> str:
        """Of the sources, and of what compiles them."""
        return "" if self.missing() else _key("", 0)

    def version(self) -> str:
        """Of CUTLASS and of nvcc."""
        found = required()
        return f"CUTLASS {found.cutlass}, compiled by nvcc {found.release}"

    def library(self) -> Path:
        """The runtime that finds kernels and calls them, built if it was not."""
        required()
        key, options = libraries.recipe(_SOURCES, links=["-ldl"])
        return libraries.build(self.name, key, FILE, _SOURCES / "runtime.cc", options)

    def rounds_float32(self) -> bool:
        """Whether CONVGRAD_CUTLASS is tf32."""
        return float32_math() == "tf32"


def arch_number(target: Target) -> int | None:
    """The SM of a CUDA target, times ten; None where it states none."""
    stated = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")))
    return int(stated[1]) if stated else None


def float32_math() -> str:
    """How float32 operands are multiplied, from the variable CONVGRAD_CUTLASS.

    Raises:
        UnsupportedError: a word that is not one of FLOAT32.
    """
    stated = os.environ.get(VARIABLE, "").strip() or FLOAT32[0]
    if stated not in FLOAT32:
        raise UnsupportedError(f"{VARIABLE}={stated}: use {', '.join(FLOAT32)}")
    return stated


def kernel_library(instance: Instance) -> Path:
    """The library of an instance, compiled if the cache lacks it.

    Raises:
        SetupError: nvcc or a header is missing, or it fails.
    """
    tools, source = required(), cuda_source(instance)
    key = _key(source, instance.arch)
    command = (
        str(tools.nvcc),
        *("-std=c++17", "-O3", "-shared", "-Xcompiler=-fPIC", "-cudart=static", "--expt-relaxed-constexpr", "-w"),
        f"-gencode=arch=compute_{instance.arch},code=sm_{instance.arch}",
        *(f"-L{folder}" for folder in tools.libraries),
    )
    includes = [f"-I{folder}" for folder in (_SOURCES, tools.headers)]
    file = f"libconvgrad_cutlass_{key}.so"
    return libraries.build("cutlass-kernel", key, file, source, includes, command=command)


def _chosen(direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> Choice | str:
    arch = arch_number(target)
    assert arch is not None, "such targets are refused"
    return choose(direction, problem, epilogue, arch, float32_math(), REPRESENTATIVE_BATCH)


@lru_cache(maxsize=256)
def _library(instance: Instance) -> ctypes.CDLL:
    return ctypes.CDLL(str(kernel_library(instance)))


@lru_cache(maxsize=256)
def _key(source: str, arch: int) -> str:
    """Of a kernel: its source and headers, what compiles it, and for which GPU. Fifteen digits, a positive int64."""
    tools = required()
    digest = hashlib.sha256()
    for header in sorted(_SOURCES.glob("*.h")):
        digest.update(header.read_bytes())
    parts = (source, str(arch), tools.release, tools.cutlass, str(cutlass_headers()), tvm_convgrad.__version__)
    digest.update("\0".join(parts).encode())
    return digest.hexdigest()[:_DIGITS]


BACKEND = Cutlass()

__all__ = [
    "BACKEND",
    "FILE",
    "FLOAT32",
    "INTERFACE",
    "VARIABLE",
    "Cutlass",
    "arch_number",
    "float32_math",
    "kernel_library",
]
