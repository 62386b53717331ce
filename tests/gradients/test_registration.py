# SPDX-License-Identifier: Apache-2.0
"""The table of rules: one owner for each operator, registered above stock; adding an operator is adding one file."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path

import pytest

from relax_ops import rules
from relax_ops.rules.contract import OperatorRules
from tests.gradients.harness import tvm
from tvm_convgrad.core.errors import SetupError

ATTRIBUTES = {"gradient": "FPrimalGradient", "layout": "FRelaxInferLayout", "legalize": "FLegalize"}


def test_every_rule_of_an_operator_that_tvm_has_is_registered():
    missing = rules.missing_operators()
    for name, found in rules.operator_rules().items():
        if name in missing:
            continue
        for field, attribute in ATTRIBUTES.items():
            if getattr(found, field) is not None:
                assert tvm.ir.Op.get(name).get_attr(attribute) is not None, (name, attribute)


def test_what_can_be_mapped_has_a_rule_for_the_mapped_axis():
    """But for operators whose mapped axis becomes a part of the channels, where it has to be said by construction."""
    folded = {"relax.nn.batch_norm", "relax.nn.prelu"}
    for name, found in rules.operator_rules().items():
        assert found.vmap is None or found.mapped_axis is not None or name in folded, name
        assert not found.linear or found.vmap is not None, name


def test_two_owners_of_one_operator_are_refused():
    files = [types.SimpleNamespace(__name__=name, RULES=(OperatorRules(("relax.add",)),)) for name in ("one", "two")]
    with pytest.raises(SetupError, match=r"RULES of two and of one both claim relax\.add"):
        rules.merged(files)


def test_a_file_without_rules_is_refused():
    with pytest.raises(SetupError, match=r"relax_ops\.rules\.empty has no RULES"):
        rules.merged([types.SimpleNamespace(__name__="relax_ops.rules.empty")])


def test_an_operator_is_one_file():
    """A file in another folder has an operator of its own with all its rules; they work, and nothing names the file."""
    environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "0"}
    program = Path(__file__).with_name("one_file") / "program.py"
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
