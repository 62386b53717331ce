# SPDX-License-Identifier: Apache-2.0
"""The fuzzer itself: it reaches what it claims to reach, repeats, and catches planted faults."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from tvm_convgrad.core.exact import compare, numbers_of, reduction_length
from tvm_convgrad.core.geometry import effective_kernel
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify import bulk
from tvm_convgrad.verify import operators as fuzz

PLAIN = ConvProblem.from_descriptor("g2mb2ic4ih5iw4oc6kh3kw2sh2sw1ph1pw0")


def test_a_seed_is_a_list_of_problems() -> None:
    assert fuzz.random_problems(20, 7) == fuzz.random_problems(20, 7)
    assert fuzz.random_problems(10, 7) == fuzz.random_problems(20, 7)[:10]
    assert fuzz.random_problems(20, 7) != fuzz.random_problems(20, 8)


def test_every_kind_of_problem_is_drawn() -> None:
    drawn = fuzz.random_problems(2000, 0)
    assert len(set(drawn)) > 1900
    assert {p.rank for p in drawn} == {1, 2, 3}
    for field in ("data_dtype", "kernel_dtype", "grad_dtype"):
        assert {getattr(p, field) for p in drawn} == {"float16", "bfloat16", "float32", "float64"}
    kinds = {
        "mixed operands": lambda p: p.data_dtype != p.kernel_dtype,
        "depthwise": lambda p: p.is_depthwise and p.out_channels == p.groups,
        "depthwise with multiplier": lambda p: p.is_depthwise and p.out_channels > p.groups,
        "grouped": lambda p: 1 < p.groups < p.in_channels,
        "asymmetric padding": lambda p: any(low != high for low, high in p.padding),
        "padding beyond the kernel": lambda p: any(
            max(pair) >= effective_kernel(k, d) for pair, k, d in zip(p.padding, p.kernel, p.dilation, strict=True)
        ),
        "one output element": lambda p: set(p.grad_extents) == {1},
        "stride beyond the kernel": lambda p: any(s > k for s, k in zip(p.strides, p.kernel, strict=True)),
        "dilation and stride": lambda p: max(p.dilation) > 1 and max(p.strides) > 1,
        "hidden elements": lambda p: any(
            (int(x) + sum(pair) - effective_kernel(k, d)) % s
            for x, pair, k, d, s in zip(p.data_extents, p.padding, p.kernel, p.dilation, p.strides, strict=True)
        ),
        "channels last": lambda p: p.data_layout[-1] == "C" == p.grad_layout[-1],
        "three different layouts": lambda p: len({p.data_layout, p.grad_layout, "N" + p.kernel_layout[1:]}) == 3,
    }
    for name, holds in kinds.items():
        assert sum(map(holds, drawn)) >= 20, name


def test_rank_and_dtypes_can_be_given() -> None:
    rng = random.Random(1)
    drawn = [fuzz.random_problem(rng, 3, ("float16",)) for _ in range(20)]
    assert {(p.rank, p.data_dtype, p.kernel_dtype, p.grad_dtype) for p in drawn} == {(3,) + ("float16",) * 3}


@pytest.mark.parametrize("direction", fuzz.ALL_DIRECTIONS)
def test_numbers_are_exact(direction: str) -> None:
    for problem in fuzz.random_problems(100, 3):
        operands, wanted = numbers_of(problem, direction)
        largest = [float(np.abs(array.astype("float64")).max()) for array in operands]
        assert reduction_length(problem, direction) * largest[0] * largest[1] < 2**24
        assert np.isfinite(wanted.astype("float64")).all()


def test_numbers_depend_on_the_seed_alone() -> None:
    first, again, other = (numbers_of(PLAIN, "backward_data", seed)[0] for seed in (1, 1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_compare() -> None:
    one = np.ones((2, 3), "float32")
    assert compare(one, one) == ("right", "6 elements equal")
    assert compare(one.T, one)[0] == "wrong"
    assert compare(one.astype("float64"), one)[0] == "wrong"
    assert compare(np.full_like(one, np.nan), one)[0] == "wrong"
    off = one.copy()
    off[1, 2] = 2
    assert compare(off, one) == ("wrong", "1 of 6 elements differ, the first at [1, 2]: 2.0 instead of 1.0")


def test_all_directions_and_forms_of_a_problem_are_right() -> None:
    verdicts = list(fuzz.check_problems([PLAIN], impls=("auto", "composition:tiled", "composition:dilated")))
    assert [(v.direction, v.impl) for v in verdicts] == [
        ("forward", "auto"),
        ("wgrad", "auto"),
        ("wgrad", "composition:tiled"),
        ("dgrad", "auto"),
        ("dgrad", "composition:dilated"),
    ]
    assert {v.status for v in verdicts} == {"right"}


def test_a_wrong_composition_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from legalize import forms

    true = forms.DATA_FORMS["transposed"]

    def shifted(builder: Any, problem: Any, *rest: Any) -> Any:
        value = true.compose(builder, problem, *rest)
        return builder.flip(value, [2])

    monkeypatch.setitem(forms.DATA_FORMS, "transposed", forms.Form(shifted))
    found = fuzz.check_problem(PLAIN, impls=("composition:transposed",), directions=("backward_data",))
    assert [(v.direction, v.status) for v in found] == [("dgrad", "wrong")]
    assert "elements differ" in found[0].detail


def test_a_raising_composition_is_pinned_on_its_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    from legalize import forms

    true = forms.WEIGHT_FORMS["swapped"]

    def fussy(builder: Any, problem: Any, *rest: Any) -> Any:
        if problem.rank == 1:
            raise ValueError("no lines, please")
        return true.compose(builder, problem, *rest)

    monkeypatch.setitem(forms.WEIGHT_FORMS, "swapped", forms.Form(fussy))
    line = ConvProblem.from_descriptor("mb1ic1iw5oc1kw3")
    verdicts = list(fuzz.check_problems([PLAIN, line], impls=("composition:swapped",), directions=("backward_weight",)))
    assert [(v.descriptor, v.status) for v in verdicts] == [(PLAIN.descriptor, "right"), (line.descriptor, "wrong")]
    assert "no lines, please" in verdicts[1].detail


def test_elements_that_a_kernel_forgets_come_out_as_nan() -> None:
    import tvm
    from tvm import relax
    from tvm.script import tirx as T

    @T.prim_func
    def half(source: T.Buffer((100,), "float32"), target: T.Buffer((100,), "float32")) -> None:
        for i in range(50):
            target[i] = source[i]

    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((100,), "float32"))
    kernel = builder.add_func(half, "half")
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.call_tir(kernel, [x], relax.TensorType((100,), "float32")))
        builder.emit_func_output(y)
    machine = bulk.quick_machine(builder.get())
    ones = tvm.runtime.tensor(np.ones(100, "float32"))
    for _ in range(2):
        bulk.poison_pool(400)
        result = machine["main"](ones).numpy()
        assert (result[:50] == 1).all()
        assert np.isnan(result[50:]).all()
