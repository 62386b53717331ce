# SPDX-License-Identifier: Apache-2.0
"""Compiling a module for a single run: without LLVM's optimiser and checks of arguments, in a fifth of the time."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import tvm
from tvm import relax
from tvm.target import Target

from relax_ops.compat import FUSES_FORMULAS, SHRINKS_BUFFERS
from tvm_convgrad.codegen.hardware import native_target

QUICK_CONFIG = {"tirx.disable_assert": True}
"""The config of a PassContext in which kernels do not check arguments."""


def quick_machine(module: tvm.IRModule, target: str | Target = "llvm") -> relax.VirtualMachine:
    """A VirtualMachine on this CPU of what `quick_executable` compiles; arguments as there."""
    return linked(quick_executable(module, target))


def linked(executable: relax.VMExecutable) -> relax.VirtualMachine:
    """A VirtualMachine of an executable, linked and loaded as a library.

    LLVM's compiler in memory takes three times as long to generate code as its writer of objects and a linker.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "linked.so")
        executable.export_library(path)
        library = tvm.runtime.load_module(path)
    return relax.VirtualMachine(library, tvm.cpu())


def quick_executable(module: tvm.IRModule, target: str | Target = "llvm") -> relax.VMExecutable:
    """An executable for this CPU of an IRModule, compiled for a single run: fused, checks and optimiser off.

    Args:
        module: what to compile.
        target: of kind llvm, or "native".
    """
    described = json.loads(str(native_target() if target == "native" else tvm.target.Target(target)))
    target = tvm.target.Target({**described, "opt-level": 0})
    with tvm.transform.PassContext(config=QUICK_CONFIG, disabled_pass=SHRINKS_BUFFERS), target:
        for make in ("LegalizeOps", "AnnotateTIROpPattern", "FuseOps", "FuseTIR") if _fuses(module) else ():
            module = getattr(relax.transform, make)()(module)
        return tvm.compile(module, target)


def _fuses(module: tvm.IRModule) -> bool:
    """Whether TVM can fuse a module's operators: 0.26 cannot where extents are formulas, such as h - 2."""
    functions = [function for function in module.functions.values() if isinstance(function, relax.Function)]
    return FUSES_FORMULAS or not any(relax.analysis.defined_symbolic_vars(function) for function in functions)


__all__ = ["QUICK_CONFIG", "linked", "quick_executable", "quick_machine"]
