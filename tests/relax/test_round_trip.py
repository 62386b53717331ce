# SPDX-License-Identifier: Apache-2.0
"""The operators in programs: TVMScript text and JSON and back, equality, purity, registration."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
import tvm
import tvm_ffi
from tvm import relax

import tvm_convgrad
from relax_ops.ir import problem_of
from relax_ops.program import direction_call, directions_module
from tests.relax.programs import NAMES, call, module, operands_of, sizes, tensor
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.operators import random_problems


def program(name: str, symbolic: bool) -> Any:
    operands, attributes = operands_of(name, int(name[4]), symbolic)
    return module(lambda _: call(name, *operands, **attributes), [*operands, *sizes(attributes)])


@pytest.mark.parametrize("symbolic", [False, True], ids=["static", "symbolic"])
@pytest.mark.parametrize("name", NAMES)
def test_text_and_json(name: str, symbolic: bool) -> None:
    mod = program(name, symbolic)
    text = mod.script()
    assert f"R.nn.{name}(" in text
    tvm.ir.assert_structural_equal(tvm.script.from_source(text), mod)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)
    assert tvm.script.from_source(text).script() == text


def test_text_of_random_problems() -> None:
    drawn = random_problems(60, 5)
    directions = [
        (f"f{i}_{direction}", DIRECTIONS[direction], p)
        for i, p in enumerate(drawn)
        for direction in DIRECTIONS
        if direction != "forward"
    ]
    mod = directions_module(directions)
    tvm.ir.assert_structural_equal(tvm.script.from_source(mod.script()), mod)
    tvm.ir.assert_structural_equal(tvm.ir.load_json(tvm.ir.save_json(mod)), mod)


def test_the_problem_can_be_read_back_from_a_call() -> None:
    for problem in random_problems(60, 6):
        for direction in (DIRECTIONS["backward_weight"], DIRECTIONS["backward_data"]):
            builder = relax.BlockBuilder()
            operands = [tensor(name, *problem.tensors[name]) for name in direction.operands]
            found = problem_of(builder.normalize(direction_call(builder, direction, problem, *operands)))
            assert found == problem


def test_symbolic_problem_of_a_call() -> None:
    operands, attributes = operands_of("conv2d_backward_data", 2, symbolic=True)
    found = problem_of(relax.BlockBuilder().normalize(call("conv2d_backward_data", *operands, **attributes)))
    assert (found.batch, found.data_extents) == ("n", (7, "w"))
    assert ConvProblem.from_descriptor(found.descriptor) == found


def test_attributes_take_part_in_equality() -> None:
    name = "conv2d_backward_weight"
    operands, attributes = operands_of(name, 2)

    def mod(**changes: Any) -> Any:
        return module(lambda _: call(name, *operands, **{**attributes, **changes}), operands)

    assert tvm_ffi.structural_equal(mod(), mod())
    assert tvm_ffi.structural_hash(mod()) == tvm_ffi.structural_hash(mod())
    assert not tvm_ffi.structural_equal(mod(), mod(out_dtype="float32"))
    assert not tvm_ffi.structural_equal(mod(), mod(kernel_layout="IOHW"))


def test_pure_so_that_dead_and_double_calls_go() -> None:
    operands, attributes = operands_of("conv2d_backward_weight", 2)

    def expression(builder: Any) -> Any:
        first = builder.emit(call("conv2d_backward_weight", *operands, **attributes))
        second = builder.emit(call("conv2d_backward_weight", *operands, **attributes))
        builder.emit(call("conv2d_backward_weight", *operands, **{**attributes, "out_dtype": "float32"}))
        return relax.op.add(first, second)

    mod = module(expression, operands)
    assert mod["main"].is_pure
    mod = relax.transform.EliminateCommonSubexpr()(mod)
    mod = relax.transform.DeadCodeElimination()(mod)
    assert mod.script().count("conv2d_backward_weight(") == 1


def test_register_is_idempotent() -> None:
    operator = tvm.ir.Op.get("relax.nn.conv2d_backward_data")
    before = operator.get_attr("FInferType")
    for _ in range(3):
        tvm_convgrad.register()
    assert tvm.ir.Op.get("relax.nn.conv2d_backward_data").get_attr("FInferType") == before
    for name in NAMES:
        for attribute in ("FInferType", "FPurity", "FLegalize", "FPrimalGradient", "TMixedPrecisionPolicy"):
            assert tvm.ir.Op.get(f"relax.nn.{name}").get_attr(attribute) is not None, (name, attribute)


_IMPORTED = """
import json, sys
before = set(sys.modules)
import {what}
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def imported_by(what: str, **environment: str) -> set[str]:
    """Modules that a fresh process has loaded after importing `what`."""
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTED.format(what=what)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_tvm_registers_and_loads_no_more_than_it_must() -> None:
    """The cost of `import tvm` is kept small by what is not imported; benchmarks/import_time.py measures it."""
    bare = imported_by("tvm", TVM_DEVICE_BACKEND_AUTOLOAD="0")
    ours = imported_by("tvm") - bare
    assert "relax_ops.register" in ours
    heavy = {"torch", "onnx", "matplotlib", "typer", "rich", "filelock", "platformdirs", "sklearn", "hypothesis"}
    assert not {name.split(".")[0] for name in ours} & heavy
    unneeded = {"evaluate", "op", "reference", "bulk", "fuzz", "verification", "cli", "training", "report"}
    assert not {f"tvm_convgrad.{name}" for name in unneeded} & ours


def test_import_of_the_package_is_light() -> None:
    loaded = {name.split(".")[0] for name in imported_by("tvm_convgrad")}
    assert not loaded & {"tvm", "tvm_ffi", "torch", "onnx", "matplotlib", "typer", "rich", "relax_ops"}


def test_without_autoload_tvm_is_stock_until_register_is_called() -> None:
    code = """
import tvm
stock = "relax.nn.conv2d_backward_data" in tvm.ir.Op.list_op_names()
import tvm_convgrad
tvm_convgrad.register()
print(stock, "relax.nn.conv2d_backward_data" in tvm.ir.Op.list_op_names())
"""
    environment = {**os.environ, "TVM_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
