# SPDX-License-Identifier: Apache-2.0
"""Whichever module is imported first, TVM finds the plugin whole: `import tvm` registers it in the middle of that."""

from __future__ import annotations

import subprocess
import sys

import pytest

FIRST = (
    "relax_ops.lowering",
    "tvm_convgrad.bench.layers",
    "tvm_convgrad.bench.steps",
    "tvm_convgrad.kernels.loops",
    "tvm_convgrad.kernels.wgrad",
    "tvm_convgrad.offload.partition",
    "tvm_convgrad.training.step",
    "tvm_convgrad.tuning.search",
)


@pytest.mark.parametrize("module", FIRST)
def test_a_module_can_be_the_first_import(module: str) -> None:
    program = f"import {module}, tvm; tvm.ir.Op.get('relax.nn.conv2d_backward_weight')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
