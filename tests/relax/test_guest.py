# SPDX-License-Identifier: Apache-2.0
"""Installing this package changes in TVM only what it is for; the rest is in force inside `tvm_convgrad.rules()`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

import tvm_convgrad
from relax_ops.dispatch import INSIDE_RULES, WHERE_STOCK_FAILS, overridden
from tests.relax import stock_failures
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.switches import VARIABLE, disabled

ROOT = Path(__file__).parents[2]


def run(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A Python program in a process of its own: `-c` text, or `-m` and a module."""
    arguments = ["-m", program] if program.isidentifier() or "." in program.split()[0] else ["-c", program]
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


def test_each_replaced_gradient_is_one_that_tvm_gets_wrong():
    """Where TVM has a rule, ours takes its place for the calls for which TVM raises, or errs: here is one of each."""
    replaced = {each.operator for each in overridden() if each.in_force == WHERE_STOCK_FAILS}
    assert replaced <= stock_failures.CASES.keys()
    alone = run("tests.relax.stock_failures", TVM_DEVICE_BACKEND_AUTOLOAD="0")
    assert alone.returncode == 0, alone.stderr
    outcomes = json.loads(alone.stdout.splitlines()[-1])
    assert [name for name, outcome in outcomes.items() if outcome == "right"] == []
    assert {name: case() for name, case in stock_failures.CASES.items()} == dict.fromkeys(outcomes, "right")


def test_the_page_lists_them():
    page = (ROOT / "docs" / "TVM.md").read_text()
    rows = page.partition("It replaces TVM's gradient")[2].partition("`tests/relax")[0].splitlines()
    names = [row.split("|")[1] for row in rows if row.startswith("| `") and "(layout)" not in row]
    listed = {f"relax.{name}" for each in names for name in re.findall(r"`(.*?)`", each)}
    assert listed == {each.operator for each in overridden() if each.in_force == WHERE_STOCK_FAILS}


def relu_at_zero() -> float:
    x = relax.Var("x", relax.TensorType((1,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(builder.emit(op.sum(builder.emit(op.nn.relu(x)))))
        builder.emit_func_output(y)
    module = relax.transform.Gradient("main", require_grads=[x])(builder.get())
    machine = relax.VirtualMachine(tvm.compile(module, "llvm"), tvm.cpu())
    _, (found,) = machine["main_adjoint"](tvm.runtime.tensor(np.zeros(1, "float32")))
    return float(found.numpy()[0])


def test_relu_is_tvms_own_outside_of_rules_and_pytorchs_inside():
    assert relu_at_zero() == 1
    with tvm_convgrad.rules():
        assert relu_at_zero() == 0
        with tvm_convgrad.rules():
            assert relu_at_zero() == 0
        assert relu_at_zero() == 0
    assert relu_at_zero() == 1


def test_rules_end_with_an_exception_and_hold_for_one_thread():
    seen = []
    thread = threading.Thread(target=lambda: seen.append(relu_at_zero()))

    def fails() -> None:
        with tvm_convgrad.rules():
            thread.start()
            thread.join()
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert seen == [1]
    assert relu_at_zero() == 1


def two_operators() -> tvm.IRModule:
    """A convolution and a relu, for the lowering of each."""
    x = relax.Var("x", relax.TensorType((1, 8, 8, 8), "float32"))
    w = relax.Var("w", relax.TensorType((8, 8, 3, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(builder.emit(op.nn.relu(builder.emit(op.nn.conv2d(x, w)))))
        builder.emit_func_output(y)
    return builder.get()


def lowered() -> tvm.IRModule:
    with tvm.target.Target("llvm"):
        return relax.transform.LegalizeOps()(two_operators())


def test_lowering_outside_of_rules_takes_kernels_for_convolutions_and_tvms_own_for_the_rest():
    outside = lowered()
    with tvm_convgrad.rules():
        inside = lowered()
    names = {variable.name_hint for variable in outside.get_global_vars()}
    assert "conv2d_forward_kernel" in names
    stock = relax.transform.LegalizeOps(skip_ops=["relax.nn.conv2d"])(two_operators())
    tvm.ir.assert_structural_equal(outside["relu"], stock["relu"])
    with pytest.raises(ValueError, match="StructuralEqual"):
        tvm.ir.assert_structural_equal(outside["relu"], inside["relu"])


PARTS_OFF = """
import tvm
from tests.relax import stock_failures, test_guest
names = {v.name_hint for v in test_guest.lowered().get_global_vars()}
outcomes = [stock_failures.CASES[name]() for name in ("relax.mean", "relax.nn.softplus")]
print("conv2d_forward_kernel" in names, *outcomes)
"""


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ("", "True right right"),
        ("kernels", "False right right"),
        ("gradients", "True raises TypeError raises UnsupportedError"),
        ("gradients,kernels", "False raises TypeError raises UnsupportedError"),
    ],
)
def test_parts_that_are_turned_off(parts, expected):
    done = run(PARTS_OFF, **{VARIABLE: parts})
    assert done.stdout.splitlines()[-1] == expected, done.stderr


def test_an_unknown_part_is_refused_each_time():
    program = """
import tvm, tvm_convgrad
for _ in range(2):
    try:
        tvm_convgrad.register()
    except tvm_convgrad.ConvGradError as error:
        print(error)
"""
    done = run(program, **{VARIABLE: "foo"})
    assert done.stdout.count("there is no part 'foo'; name some of") == 2, done.stderr


def test_an_unknown_part_is_refused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "kernels,gradient")
    with pytest.raises(
        SetupError, match="CONVGRAD_DISABLE=kernels,gradient: there is no part 'gradient'; name some of"
    ):
        disabled("kernels")


def test_what_is_registered_over_tvm_is_told():
    found = {(each.operator, each.attribute): each.in_force for each in overridden() if each.over_stock}
    assert found["relax.add", "FPrimalGradient"] == INSIDE_RULES
    assert found["relax.nn.relu", "FLegalize"] == INSIDE_RULES
    assert found["relax.nn.conv2d", "FPrimalGradient"] == WHERE_STOCK_FAILS
