# SPDX-License-Identifier: Apache-2.0
"""The table of rules: one owner for each operator, registered above stock, repeatable."""

from __future__ import annotations

import types

import pytest

import relax_ops.gradients as package
from tests.gradients.harness import tvm
from tvm_convgrad.errors import SetupError


def test_every_rule_is_registered_and_registering_again_is_harmless():
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    assert package.register_gradients() == [name for name in package.all_gradients() if name not in known]
    for name in package.all_gradients():
        if name in known:
            assert tvm.ir.Op.get(name).get_attr("FPrimalGradient") is not None, name


def test_two_owners_of_one_operator_are_refused(monkeypatch):
    families = [
        types.SimpleNamespace(__name__="one", GRADIENTS={"relax.add": None}),
        types.SimpleNamespace(__name__="two", GRADIENTS={"relax.add": None}),
    ]
    monkeypatch.setattr(package, "_families", lambda: families)
    with pytest.raises(SetupError, match=r"relax\.add"):
        package.all_gradients()
