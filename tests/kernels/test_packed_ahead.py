# SPDX-License-Identifier: Apache-2.0
"""W packed ahead of all calls: the bits of kernels that pack it in each, over the fuzzer's problems and tilings."""

from __future__ import annotations

import inspect
import random
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax, tirx

from tests.linked import quick_module
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.exact import Array
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.verify.fuzzing.cases import KernelCase
from tvm_convgrad.verify.fuzzing.check import choice_of, differences, draw_case, kernel_of, numbers_of
from tvm_convgrad.verify.interpreter import execute

CASES = 150


def packed_of(case: KernelCase, weight: Array) -> Array | None:
    return chooser.packed_weight(case.compiled_problem, case.direction, case.machine, choice_of(case), weight)


def test_packed_and_unpacked_kernels_give_the_same_bits() -> None:
    """Exact on integers, and the bits of the other kernel on any numbers."""
    dice, met = random.Random(22), Counter[str]()
    while met["packed"] < CASES:
        case = draw_case(dice, ("forward", "backward_data"))
        batch = int(case.problem.batch)
        numbers = numbers_of(case, 0)
        panels = packed_of(case, numbers.operands[1])
        if panels is None:
            met[case.problem.kernel_dtype] += 1
            continue
        plain = kernel_of(case)
        ahead = chooser.build(
            case.compiled_problem, case.direction, case.machine, choice_of(case), "kernel", case.epilogue, packed=True
        )
        expected = replace(numbers, operands=(numbers.operands[0], panels, *numbers.operands[2:]))
        arrays = [np.array(array, order="C") for array in (*expected.operands, *numbers.results)]
        assert (execute(ahead, arrays, batch) or differences(arrays, expected)) == "", case
        random_numbers = np.random.default_rng(met["packed"])
        normal = [
            random_numbers.standard_normal(a.shape).astype(a.dtype) for a in (*numbers.operands, *numbers.results)
        ]
        others = [array.copy() for array in normal]
        others[1] = packed_of(case, normal[1])
        assert execute(plain, normal, batch) == execute(ahead, others, batch) == ""
        assert normal[-1].tobytes() == others[-1].tobytes(), case
        met.update(["packed", *(tiling.order for tiling in case.plan.tilings)])
        met["nests"] += len(case.plan.tilings) > 1
        met["groups"] += case.problem.groups > 1
        met["pixels"] += any(tiling.over_pixels for tiling in case.plan.tilings)
        met["ragged"] += case.problem.out_channels // case.problem.groups % 16 != 0
    assert all(met[name] >= 5 for name in ("source", "weights", "nests", "groups", "pixels", "ragged")), met
    assert met["bfloat16"] >= 5  # of which words are made, so that nothing is packed ahead


def test_numbers_that_are_converted_stay() -> None:
    problem = ConvProblem.from_descriptor("mb1ic8ih6oc8oh6kh3ph1_dt=f16:f16:f16")
    machine = machine_of(tvm.target.Target({"kind": "llvm", "mcpu": "haswell"}))
    assert machine is not None
    choice = chooser.choose(problem, "forward", machine)
    assert chooser.packed_weight(problem, "forward", machine, choice, np.zeros((8, 8, 3, 3), "float16")) is None


def convolution(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return relax.op.nn.conv2d(x, w, padding=1)


def with_bias(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    bias = relax.const(np.arange(6, dtype="float32").reshape(1, 6, 1, 1))
    return relax.op.nn.relu(relax.op.add(relax.op.nn.conv2d(x, w, padding=1), bias))


def transposed(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return relax.op.nn.conv2d_transpose(x, w, strides=2)


def product(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return relax.op.matmul(x, w)


@pytest.mark.parametrize(
    ("body", "x_shape", "w_shape"),
    [
        (convolution, (2, 5, 7, 7), (6, 5, 3, 3)),
        (with_bias, (2, 5, 7, 7), (6, 5, 3, 3)),
        (transposed, (2, 5, 7, 7), (5, 6, 3, 3)),
        (product, (24, 64), (64, 80)),
    ],
    ids=lambda given: getattr(given, "__name__", ""),
)
def test_constant_weights_are_packed_when_a_module_is_compiled(
    body: Callable[[relax.Expr, relax.Expr], relax.Expr], x_shape: tuple[int, ...], w_shape: tuple[int, ...]
) -> None:
    """The function with a constant gives the bits of the one that is given W, and its kernel alone takes panels."""
    numbers = np.random.default_rng(0)
    arrays = [numbers.standard_normal(shape).astype("float32") for shape in (x_shape, w_shape)]
    results = []
    with noted_kernels() as kernels:
        for constant in (False, True):
            given = [
                relax.Var(name, relax.TensorType(a.shape, "float32")) for name, a in zip("xw", arrays, strict=True)
            ]
            builder = relax.BlockBuilder()
            with builder.function("main", given[:1] if constant else given):
                with builder.dataflow():
                    weight = relax.const(arrays[1]) if constant else given[1]
                    output = builder.emit_output(body(given[0], weight))
                builder.emit_func_output(output)
            machine = quick_module(builder.get())
            passed = [tvm.runtime.tensor(array) for array in (arrays[:1] if constant else arrays)]
            results.append(machine["main"](*passed).numpy())
    assert results[0].tobytes() == results[1].tobytes()
    assert kernels == [False, True]


@contextmanager
def noted_kernels() -> Iterator[list[bool]]:
    """Whether W is packed ahead for each kernel that is built inside the block."""
    built: list[bool] = []
    original = chooser.build

    def noted(*arguments: Any, **named: Any) -> tirx.PrimFunc:
        built.append(inspect.signature(original).bind(*arguments, **named).arguments.get("packed", False))
        return original(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chooser, "build", noted)
        yield built
