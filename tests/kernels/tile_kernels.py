# SPDX-License-Identifier: Apache-2.0
"""The kernels of tiles (AMX) under test: built for their machine, and run from a library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.kernels.harness import compiled, forced
from tests.kernels.test_dot_products import _blank
from tests.kernels.tile_emulation import emulated
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue

AVX512 = tvm.target.Target({"kind": "llvm", "mcpu": "skylake-avx512"})
"""The target of kernels whose other instructions are emulated."""

needs_avx512 = pytest.mark.skipif("avx512bw" not in local_features(), reason="compiled only: the rest needs AVX-512")


@dataclass(frozen=True)
class TileKernel:
    """A kernel by its name, the machine that it is planned for, and the target that it is compiled for."""

    name: str
    machine: Machine
    target: tvm.target.Target

    def function(self, problem: ConvProblem, direction: str, epilogue: Epilogue = NO_EPILOGUE, choice=None):
        """The PrimFunc of a direction, by the kernel's own plan unless another choice is given."""
        choice = choice or forced(self.name)(problem, direction, self.machine)
        assert choice.is_kernel, choice
        return chooser.build(problem, direction, self.machine, choice, "main", epilogue)

    def ran(self, function, problem: ConvProblem, direction: str, operands, tmp_path: Path, target=None) -> np.ndarray:
        """The result of a kernel, loaded from a file: TVM's linker in memory has no variables of threads."""
        path = str(tmp_path / "kernel.so")
        compiled(function, target or self.target).export_library(path)
        found = tvm.runtime.tensor(_blank(problem, direction))
        tvm.runtime.load_module(path)["main"](*map(tvm.runtime.tensor, operands), found)
        return found.numpy()


def run_without_tiles(function, arrays, tmp_path: Path) -> None:
    """Run a kernel as machine code in arrays, on an AVX-512 CPU, as a process that may not use tiles."""
    path = str(tmp_path / "refused.so")
    compiled(emulated(function, granted=False), AVX512).export_library(path)
    tensors = list(map(tvm.runtime.tensor, arrays))
    tvm.runtime.load_module(path)["main"](*tensors)
    for array, tensor in zip(arrays, tensors, strict=True):
        array[...] = tensor.numpy()
