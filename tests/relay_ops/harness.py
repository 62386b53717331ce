# SPDX-License-Identifier: Apache-2.0
"""What the Relay tests share: the grid's module, calls as programs, exact comparison."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import tvm
from tvm import relay
from tvm.contrib import graph_executor

from relay_ops.ir import call_of
from tvm_convgrad.core.catalogue import Direction
from tvm_convgrad.core.problem import ConvProblem


def load_grid() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "relay_grid.py"
    spec = importlib.util.spec_from_file_location("relay_grid", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variables(problem: ConvProblem, *names: str) -> list[Any]:
    return [relay.var(name, shape=problem.tensors[name][0], dtype=problem.tensors[name][1]) for name in names]


def typed(function: Any) -> Any:
    return relay.transform.InferType()(tvm.IRModule.from_expr(function))


def call_program(direction: Direction, problem: ConvProblem) -> Any:
    operands = variables(problem, *direction.operands)
    return typed(relay.Function(operands, call_of(direction, problem, *operands)))


def run(module: Any, arrays: dict[str, Any], opt_level: int = 3) -> list[Any]:
    """Without LLVM's optimiser, which takes a fifth of the time: tests/relay_ops/test_cpu_kernels.py has it."""
    with tvm.transform.PassContext(opt_level=opt_level):
        factory = relay.build(module, "llvm -opt-level=0")
    return execute(factory, arrays)


def execute(factory: Any, arrays: dict[str, Any]) -> list[Any]:
    executor = graph_executor.GraphModule(factory["default"](tvm.cpu()))
    for name, array in arrays.items():
        executor.set_input(name, array)
    executor.run()
    return [executor.get_output(i).numpy() for i in range(executor.get_num_outputs())]


def integers(problem: ConvProblem, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng([seed, len(problem.descriptor)])
    return {name: rng.integers(-3, 4, shape).astype(dtype) for name, (shape, dtype) in problem.tensors.items()}


def assert_equal(found: Any, wanted: Any) -> None:
    """Every element equal; float64's exact integers, rounded to the type that was found."""
    assert found.shape == wanted.shape
    differing = np.argwhere(found != wanted.astype(found.dtype))
    assert differing.size == 0, f"{len(differing)} of {wanted.size} differ, the first at {differing[:1].tolist()}"


def calls(module: Any, *names: str) -> list[Any]:
    """Every call of these operators, in all functions."""
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, relay.Call) and isinstance(node.op, tvm.ir.Op) and node.op.name in names:
            found.append(node)

    for function in module.functions.values():
        relay.analysis.post_order_visit(function, visit)
    return found
