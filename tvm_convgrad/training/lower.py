# SPDX-License-Identifier: Apache-2.0
"""Compiling a training step for a target."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline

from tvm_convgrad.training.step import StepModule


def compile_step(step: StepModule, target: Any = "llvm") -> Any:
    """The executable of a step."""
    target = tvm.target.Target(target)
    return tvm.compile(step.module, target=target, relax_pipeline=cpu_pipeline.get_default_pipeline(target))
