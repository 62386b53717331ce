# SPDX-License-Identifier: Apache-2.0
"""The backend of CUTLASS: kernels compiled into the cache, asked whether they compute a problem, and called."""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import os
import platform
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import tvm_convgrad
from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.kernels.plan import REPRESENTATIVE_BATCH
from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.calls import call_numbers
from tvm_convgrad.offload.common import Engine
from tvm_convgrad.offload.cutlass import rules
from tvm_convgrad.offload.cutlass.kernels import MATHS, Choice, Instance, choose
from tvm_convgrad.offload.cutlass.source import cuda_source
from tvm_convgrad.offload.cutlass.toolchain import cutlass_headers, required, toolchain
from tvm_convgrad.problem import ConvProblem

INTERFACE = 1
"""Of the runtime: of the numbers that it reads, and of the meaning of its functions."""

FILE = f"libconvgrad_cutlass.so.{INTERFACE}"
VARIABLE = "CONVGRAD_CUTLASS"
FLOAT32 = ("simt", "3xtf32", "tf32")
"""How float32 operands are multiplied: exactly as float32, nearly so on tensor cores, or rounded to 10 bits there."""

LEAST_ARCH = 75
_DIGITS = 15
_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}
_SOURCES = Path(__file__).parent / "runtime"


class Cutlass:
    """CUTLASS's implicit-GEMM kernels, compiled by nvcc for NVIDIA GPUs from Turing on."""

    name = "cutlass"
    kinds: tuple[str, ...] = ("cuda",)
    entry = f"convgrad.cutlass.{INTERFACE}.run"
    setting: tuple[str, str] | None = None

    def unavailable(self, target: Any) -> str:
        """Why programs for a target cannot use it at all, with the remedy."""
        if target is not None:
            if target.kind.name not in self.kinds:
                return f"the target is {target.kind.name}; CUTLASS is used on NVIDIA GPUs (--target cuda:sm_90)"
            arch = arch_number(target)
            if arch is None or arch < LEAST_ARCH:
                return f"the target's arch is {target.attrs.get('arch')}; its kernels are for sm_{LEAST_ARCH} and newer"
        if platform.system() != "Linux":
            return f"its runtime is for Linux, and this is {platform.system()}"
        found = toolchain()
        return found if isinstance(found, str) else ""

    def refusal(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> str:
        """Why it does not compute a face of a problem, by its rules, or why there is no kernel for the target's GPU."""
        refused = rules.refusal(face, problem, epilogue)
        choice = refused or _chosen(face, problem, epilogue, target)
        return choice if isinstance(choice, str) else ""

    def engine(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> Engine | str:
        """The kernel, compiled and asked whether it computes the problem; for any batch, it is asked for some."""
        choice = _chosen(face, problem, epilogue, target)
        assert isinstance(choice, Choice), "what the rules refuse is not asked for"
        some = replace(problem, batch=REPRESENTATIVE_BATCH) if isinstance(problem.batch, str) else problem
        workspace = ctypes.c_int64()
        numbers = self.numbers(face, some, epilogue, target)
        check = _library(choice.instance).convgrad_cutlass_check
        check.restype = ctypes.c_char_p
        refused = check((ctypes.c_int64 * len(numbers))(*numbers), ctypes.byref(workspace))
        if refused is not None:
            return f"its kernel {choice.instance.name} says: {refused.decode()}"
        details = [f"{MATHS[choice.instance.math].unit}, deterministic"]
        if choice.slices > 1:
            apart = choice.instance.output != choice.instance.result
            details.append(f"{choice.slices} slices {'side by side' if apart else 'in turn'}")
        return Engine(choice.instance.name, ", ".join(details), workspace.value)

    def numbers(self, face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> list[int]:
        """The fields of Call in runtime/call.h."""
        choice = _chosen(face, problem, epilogue, target)
        assert isinstance(choice, Choice), "what the rules refuse is not asked for"
        return [
            *call_numbers(face, problem, epilogue, _TYPES),
            choice.slices,
            int(_key(cuda_source(choice.instance), choice.instance.arch), 16),
        ]

    def digest(self) -> str:
        """Of the sources, and of what compiles them."""
        found = toolchain()
        return "" if isinstance(found, str) else _key("", 0)

    def version(self) -> str:
        """Of CUTLASS and of nvcc."""
        found = required()
        return f"CUTLASS {found.cutlass}, compiled by nvcc {found.release}"

    def library(self) -> Path:
        """The runtime that finds kernels and calls them, built if it was not."""
        required()
        key, options = _recipe()
        return libraries.build(self.name, key, FILE, _SOURCES / "runtime.cc", options)


def arch_number(target: Any) -> int | None:
    """The SM of a CUDA target, times ten; None where it states none."""
    stated = re.fullmatch(r"sm_(\d+)[af]?", str(target.attrs.get("arch", "")))
    return int(stated[1]) if stated else None


def float32_math() -> str:
    """How float32 operands are multiplied, from the variable CONVGRAD_CUTLASS.

    Raises:
        UnsupportedError: a word that is none of FLOAT32.
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


def _chosen(face: str, problem: ConvProblem, epilogue: Epilogue, target: Any) -> Choice | str:
    arch = arch_number(target)
    assert arch is not None, "such targets are refused"
    return choose(face, problem, epilogue, arch, float32_math(), REPRESENTATIVE_BATCH)


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


@lru_cache(maxsize=1)
def _recipe() -> tuple[str, tuple[str, ...]]:
    """The key of the runtime, and the options that compile it."""
    import tvm
    from tvm_ffi import libinfo

    tvm_lib = Path(tvm.__file__).parent / "lib"
    ffi_lib = Path(libinfo.find_libtvm_ffi()).parent
    includes = (libinfo.find_include_path(), libinfo.find_dlpack_include_path(), tvm.libinfo.find_include_path())
    options = (
        *(f"-isystem{folder}" for folder in includes),
        *(f"-L{folder}" for folder in (ffi_lib, tvm_lib)),
        *("-Wl,--no-as-needed", "-ltvm_ffi", "-ltvm_runtime", "-ldl"),
        f"-Wl,-rpath,{ffi_lib}:{tvm_lib}",
    )
    digest = hashlib.sha256()
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    versions = [importlib.metadata.version(each) for each in ("apache-tvm", "apache-tvm-ffi")]
    digest.update("\0".join([tvm_convgrad.__version__, *versions, *options]).encode())
    return digest.hexdigest()[:16], options


__all__ = ["FILE", "FLOAT32", "INTERFACE", "VARIABLE", "Cutlass", "arch_number", "float32_math", "kernel_library"]
