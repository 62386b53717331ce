# SPDX-License-Identifier: Apache-2.0
"""JAX's convolutions as custom calls that write zeros. XLA knows nothing of them, and so keeps all that they read."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.interpreters import mlir

import tvm_convgrad.jax as bridge
from benchmarks.bridge_bound.result import Bound
from tvm_convgrad.bench.bridge import Request
from tvm_convgrad.bench.bridge_jax import Step, compiled_step, training_step
from tvm_convgrad.bench.bridge_pairs import Run, in_turns
from tvm_convgrad.bridge.compiler import compiler_command
from tvm_convgrad.core.catalogue import FORWARD
from tvm_convgrad.jax.lowering import own
from tvm_convgrad.jax.primitive import Call, convolution_p

TARGET = "convgrad_zeros"


def _register() -> None:
    """Make the custom call known to XLA."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "zeros.so"
        source = Path(__file__).with_name("zeros.cc")
        command = [*compiler_command(), "-std=c++17", "-O2", "-w", "-shared", "-fPIC", f"-I{jax.ffi.include_dir()}"]
        subprocess.run([*command, "-o", str(library), str(source)], check=True)
        loaded = ctypes.CDLL(str(library))
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(loaded.convgrad_zeros), platform="cpu")


_lower_own = mlir.lower_fun(own, multiple_results=False)
_lower_zeros = jax.ffi.ffi_lowering(TARGET)


def _program(step: Step, parameters: list[jax.Array], forward: bool) -> Step:
    """The step whose gradients of convolutions are zeros; with `forward` convolutions, too."""

    def lower(context: mlir.LoweringRuleContext, first: Any, second: Any, *, call: Call) -> Sequence[Any]:
        if call.direction == FORWARD.name and not forward:
            return _lower_own(context, first, second, call=call)
        return _lower_zeros(context, first, second)

    mlir.register_lowering(convolution_p, lower, platform="cpu")
    jax.clear_caches()  # of what was lowered by another rule
    with bridge.patch():
        return compiled_step(step, parameters)


def measure(request: Request) -> Bound:
    """The bounds of one network."""
    _register()
    step, parameters = training_step(request)

    def ready(program: Step) -> Run:
        return lambda: jax.block_until_ready(program(parameters))

    without = ready(compiled_step(step, parameters))
    programs = [ready(_program(step, parameters, forward)) for forward in (False, True)]
    gradients, both = (in_turns(program, without, request.seconds) for program in programs)
    return Bound.of(request, gradients, both)
