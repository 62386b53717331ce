# SPDX-License-Identifier: Apache-2.0
"""A command that builds for a CPU imports TVM without what only GPUs need, and with all that plugs into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tvm

from tvm_convgrad.training.compile.start_tvm import PLUGS

GPUS = (Path(tvm.__file__).parent / "backend" / "cuda" / "tile_primitive").is_dir()
"""Whether this TVM has a backend for GPUs that it loads at the end of its import; older ones have none."""

PROGRAM = """
import json, os, sys
sys.modules["torch"] = None  # tvm-ffi would import it, which takes a second
from tvm_convgrad.commands.option_values import parse_target
kind = parse_target(sys.argv[1], gpus=True).kind.name
import tvm
from tvm import relax
print(json.dumps({
    "kind": kind,
    "gpus": "tvm.backend.cuda.tile_primitive" in sys.modules,
    "disco": tvm.runtime.disco is not None,
    "sorting": tvm.get_global_func("tvm.contrib.sort.argsort", allow_missing=True) is not None,
    "plugged": "relax_ops.register" in sys.modules,
    "switch": os.environ.get("TVM_DEVICE_BACKEND_AUTOLOAD"),
}))
"""


@pytest.mark.parametrize(
    ("target", "switch", "expected"),
    [
        ("native", None, {"kind": "llvm", "gpus": False, "plugged": True}),
        ("native", "0", {"kind": "llvm", "gpus": False, "plugged": False}),
        ("cuda:sm_90", None, {"kind": "cuda", "gpus": GPUS, "plugged": True}),
    ],
)
def test_what_tvm_is_imported_with(target: str, switch: str | None, expected: dict[str, object]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != PLUGS}
    environment |= {PLUGS: switch} if switch is not None else {}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, target], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["switch"] == switch
    assert {name: found[name] for name in expected} == expected
    if switch is None and target == "native":
        assert (found["disco"], found["sorting"]) == (True, True)
