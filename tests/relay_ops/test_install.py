# SPDX-License-Identifier: Apache-2.0
"""The installation that docs/RELAY.md gives for a TVM that has Relay: without apache-tvm, used in a fresh process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMMAND = re.compile(r"^    (pip install --no-deps \..*)$", re.MULTILINE)
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "tvm_convgrad", "relax_ops", "relay_ops", "legalize")

USE = """
import importlib.metadata, sys
import numpy, tvm_convgrad, tvm
from tvm import relay
from tvm.contrib import graph_executor
from relay_ops.differentiate import value_and_gradients

assert tvm_convgrad.__file__.startswith(sys.argv[1]), tvm_convgrad.__file__
x, w = relay.var("x", shape=(1, 2, 4, 4)), relay.var("w", shape=(2, 1, 2, 2))
step = value_and_gradients(relay.Function([x, w], relay.nn.conv2d(x, w, channels=2, kernel_size=(2, 2), groups=2)))
executor = graph_executor.GraphModule(relay.build(step, "llvm")["default"](tvm.cpu()))
executor.run(x=numpy.ones((1, 2, 4, 4), "float32"), w=numpy.full((2, 1, 2, 2), 3, "float32"))
assert (executor.get_output(2).numpy() == 9).all()  # nine positions of ones
assert executor.get_output(1).numpy().sum() == 2 * 9 * 4 * 3
installed = {each.metadata["Name"] for each in importlib.metadata.distributions(path=[sys.argv[1]])}
assert installed == {"tvm-convgrad"}, installed
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_install_beside_a_tvm_that_has_relay(tmp_path):
    """Of the documented packages all but this one are in the environment already; pip is given no index to ask."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    for name in SOURCES:  # a copy: building leaves files beside the sources
        place = ROOT / name
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(place, source / name, ignore=ignored) if place.is_dir() else shutil.copy(place, source)
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    run(*pip, "--no-deps", "--no-index", "--no-build-isolation", "--target", target, source)
    environment = os.environ | {"PYTHONPATH": str(target)}
    loaded = set(run(sys.executable, "-c", USE, target, cwd=tmp_path, env=environment).splitlines()[-1].split())
    documented = {COMMAND.search((ROOT / page).read_text()).group(1) for page in ("README.md", "docs/RELAY.md")}
    assert len(documented) == 1, documented
    (named,) = (set(command.split()[4:]) for command in documented)
    ours = {"ml_dtypes", "platformdirs", "filelock", "typer", "rich", "matplotlib", "tvm_ffi", "onnx", "torch"}
    assert loaded & ours <= named, "more than what the documented command installs"
    requirements = (ROOT / "pyproject.toml").read_text()
    assert all(f'"{package}>=' in requirements for package in named)
