# SPDX-License-Identifier: Apache-2.0
"""What the package offers is what it says, in whichever order its modules are imported."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import pytest

import tvm_convgrad
from tvm_convgrad import training

OPTIONAL = {"tvm_convgrad.torch": "torch", "tvm_convgrad.jax": "jax"}
"""Modules that need a package beside TVM, by name, and that package."""


def test_names_survive_importing_every_module() -> None:
    for module in pkgutil.iter_modules(tvm_convgrad.__path__, "tvm_convgrad."):
        if importlib.util.find_spec(OPTIONAL.get(module.name, "tvm")):
            importlib.import_module(module.name)
    assert callable(tvm_convgrad.evaluate)
    assert callable(tvm_convgrad.convert_layout)
    assert callable(tvm_convgrad.op.conv2d_backward_weight)
    assert all(hasattr(tvm_convgrad, name) for name in tvm_convgrad.__all__)


@pytest.mark.parametrize(("module", "package"), OPTIONAL.items())
def test_a_module_whose_package_is_missing_says_what_to_install(module: str, package: str) -> None:
    program = f"import sys; sys.modules[{package!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"pip install 'tvm-convgrad[{package}]'" in done.stderr.splitlines()[-1]


def test_training_offers_what_it_says() -> None:
    """`ensemble` is a function and the name of a folder's module: importing that must not take its place."""
    for name in training.__all__:
        assert callable(getattr(training, name)), name
    assert sorted(training.__all__) == training.__all__


NOTHING_OF_RELAY = """
import sys
import tvm, tvm_convgrad
tvm_convgrad.register()
tvm_convgrad.op.conv2d_backward_data
assert not [name for name in sys.modules if name.split(".")[0] == "relay_ops"], sys.modules
assert "relax_ops.register" in sys.modules
"""


def test_nothing_of_the_relay_binding_is_imported_where_tvm_has_no_relay() -> None:
    assert importlib.util.find_spec("relay_ops") is not None
    subprocess.run([sys.executable, "-c", NOTHING_OF_RELAY], check=True)
