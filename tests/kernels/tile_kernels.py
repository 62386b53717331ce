# SPDX-License-Identifier: Apache-2.0
"""The kernels of tiles (AMX) under test: built for their machine, and run from a library."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tvm

from tests.kernels.harness import compiled, forced
from tests.kernels.test_dot_products import _blank
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue


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

    def ran(self, function, problem: ConvProblem, direction: str, operands, tmp_path: Path) -> np.ndarray:
        """The result of a kernel, loaded from a file: TVM's linker in memory has no variables of threads."""
        path = str(tmp_path / "kernel.so")
        compiled(function, self.target).export_library(path)
        found = tvm.runtime.tensor(_blank(problem, direction))
        tvm.runtime.load_module(path)["main"](*map(tvm.runtime.tensor, operands), found)
        return found.numpy()
