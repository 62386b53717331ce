# SPDX-License-Identifier: Apache-2.0
"""What the package offers is what it says, in whichever order its modules are imported."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import subprocess
import sys

import tvm_convgrad
from tvm_convgrad import training


def test_names_survive_importing_every_module() -> None:
    for module in pkgutil.iter_modules(tvm_convgrad.__path__, "tvm_convgrad."):
        importlib.import_module(module.name)
    assert callable(tvm_convgrad.evaluate)
    assert callable(tvm_convgrad.convert_layout)
    assert callable(tvm_convgrad.op.conv2d_backward_weight)
    assert all(hasattr(tvm_convgrad, name) for name in tvm_convgrad.__all__)


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
