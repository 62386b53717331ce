# SPDX-License-Identifier: Apache-2.0
"""What the package offers is what it says, in whichever order its modules are imported."""

from __future__ import annotations

import importlib
import pkgutil

import tvm_convgrad


def test_names_survive_importing_every_module() -> None:
    for module in pkgutil.iter_modules(tvm_convgrad.__path__, "tvm_convgrad."):
        importlib.import_module(module.name)
    assert callable(tvm_convgrad.evaluate)
    assert callable(tvm_convgrad.convert_layout)
    assert callable(tvm_convgrad.op.conv2d_backward_weight)
    assert all(hasattr(tvm_convgrad, name) for name in tvm_convgrad.__all__)
