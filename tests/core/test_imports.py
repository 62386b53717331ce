# SPDX-License-Identifier: Apache-2.0
"""Whichever module is imported first, TVM finds the plugin whole: `import tvm` registers it in the middle of that."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_convgrad.core

FIRST = (
    "relax_ops.lowering",
    "tvm_convgrad.bench.layers",
    "tvm_convgrad.bench.steps",
    "tvm_convgrad.codegen.loops",
    "tvm_convgrad.kernels.wgrad.kernel",
    "tvm_convgrad.offload.partition",
    "tvm_convgrad.training.step.build",
    "tvm_convgrad.tuning.search",
)


@pytest.mark.parametrize("module", FIRST)
def test_a_module_can_be_the_first_import(module: str) -> None:
    program = f"import {module}, tvm; tvm.ir.Op.get('relax.nn.conv2d_backward_weight')"
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", sorted(Path(tvm_convgrad.core.__path__[0]).glob("*.py")), ids=lambda path: path.stem)
def test_core_imports_core_only_and_at_the_top(path: Path) -> None:
    tree = ast.parse(path.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    assert all(node in tree.body for node in imports), "an import inside a function or condition"
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [str(node.module) for node in imports if isinstance(node, ast.ImportFrom)]
    ours = [
        name for name in names if name.split(".")[0] in ("legalize", "relax_ops", "relay_ops", "tvm", "tvm_convgrad")
    ]
    assert all(name.startswith("tvm_convgrad.core") for name in ours), ours
