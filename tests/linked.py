# SPDX-License-Identifier: Apache-2.0
"""Executables for a test, compiled as fast as can be: what LLVM makes of kernels is for tests/kernels to check."""

from __future__ import annotations

from typing import Any

import tvm

from relax_ops.single_run import QUICK_CONFIG, linked
from tvm_convgrad.training.compile.lower import compile_module, compile_step
from tvm_convgrad.training.step.module import StepModule

PLAIN = {"kind": "llvm", "opt-level": 0}
"""Any CPU of this architecture, without LLVM's optimiser."""


def quick_step(step: StepModule) -> Any:
    """A virtual machine of a step that went through all of `compile_step` but LLVM's optimiser: a fifth of its time."""
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        return linked(compile_step(step, PLAIN))


def quick_module(module: Any) -> Any:
    """The same of a module of straight-line functions."""
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        return linked(compile_module(module, PLAIN))
