# SPDX-License-Identifier: Apache-2.0
"""Which implementation legalization takes by default, and why: kernels on CPUs, compositions elsewhere."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.lowering import forced_forms, recorded_choices
from relax_ops.program import directions_module
from relax_ops.single_run import quick_machine
from tests.relax.programs import call, module, tensor
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.core.problem import ConvProblem

PROBLEM = ConvProblem.from_descriptor("g2mb2ic4ih7iw6oc6kh3kw2sh2sw1ph1pw0")
TARGETS = {
    "AVX-512": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"},
    "AVX2": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"},
    "SSE": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"},
    "NEON": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic", "mattr": ["+neon"]},
}
OTHERS = {
    "cuda": {"kind": "cuda", "arch": "sm_80", "max_num_threads": 1024, "thread_warp_size": 32},
    "riscv": {"kind": "llvm", "mtriple": "riscv64-linux-gnu", "mcpu": "generic-rv64"},
}


def functions_of(mod: Any) -> list[str]:
    """The names of a module's TIR functions."""
    return [v.name_hint for v, f in mod.functions_items() if isinstance(f, tvm.tirx.PrimFunc)]


def legalized(mod: Any, target: Any) -> tuple[Any, list[Any]]:
    with recorded_choices() as record:
        if target is None:
            return relax.transform.LegalizeOps()(mod), record
        with tvm.target.Target(target):
            return relax.transform.LegalizeOps()(mod), record


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_instruction_set_gets_kernels(direction: str, target: str) -> None:
    mod, record = legalized(directions_module([("main", DIRECTIONS[direction], PROBLEM)]), TARGETS[target])
    assert functions_of(mod) == [f"conv2d_{direction}_kernel"]
    (entry,) = record
    assert (entry.direction, entry.problem, entry.choice.is_kernel) == (direction, PROBLEM, True)
    assert entry.op == ("conv2d" if direction == "forward" else f"conv2d_{direction}")


@pytest.mark.parametrize("target", [*OTHERS, None])
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_other_targets_get_the_composition_and_the_reason(direction: str, target: str | None) -> None:
    described = OTHERS[target] if target else None
    mod, record = legalized(directions_module([("main", DIRECTIONS[direction], PROBLEM)]), described)
    assert not [name for name in functions_of(mod) if "kernel" in name]
    (entry,) = record  # the composition's own convolutions are not in the record
    assert not entry.choice.is_kernel
    assert ("CPU" if target else "no target is in scope") in entry.choice.reason


def test_symbolic_height_and_empty_tensors_get_the_composition_and_the_reason() -> None:
    h = tvm.tirx.Var("h", "int64")
    grad, data = tensor("grad", [2, 4, h, 5]), tensor("data", [2, 2, h, 5])
    made = call("conv2d_backward_weight", grad, data, kernel_size=3, padding=1)
    _, (entry,) = legalized(module(lambda _: made, [grad, data]), TARGETS["AVX2"])
    assert entry.choice.reason == "the height or width is known only at run time"
    empty = replace(PROBLEM, batch=0)
    _, (entry,) = legalized(directions_module([("main", DIRECTIONS["backward_weight"], empty)]), TARGETS["AVX2"])
    assert "has no elements" in entry.choice.reason


@pytest.mark.parametrize("direction", ["backward_weight", "backward_data"])
def test_a_forced_composition_is_made_of_stock_operations_alone(direction: str) -> None:
    with forced_forms(**{direction: "composition"}):
        mod, (entry,) = legalized(directions_module([("main", DIRECTIONS[direction], PROBLEM)]), TARGETS["AVX2"])
    assert entry.choice.reason == "composition is forced"
    assert not [name for name in functions_of(mod) if "kernel" in name]
    assert [name for name in functions_of(mod) if name.startswith("conv2d")]


def test_equal_problems_compile_once_and_others_do_not_share() -> None:
    variants = [
        PROBLEM,
        PROBLEM,
        PROBLEM.with_layouts("NHWC", "OHWI", "NHWC"),
        PROBLEM.with_layouts("NHWC", "HWIO", "NCHW"),
        PROBLEM.with_dtypes("float16", "float32", "float64"),
        PROBLEM.with_dtypes("float64", "float64", "float64"),
        replace(PROBLEM, strides=(1, 1), data_extents=(4, 6)),  # dW and dY of the same shapes as the first
    ]
    directions = [
        (f"f{i}_{direction}", DIRECTIONS[direction], p)
        for i, p in enumerate(variants)
        for direction in DIRECTIONS
        if direction != "forward"
    ]
    mod, _ = legalized(directions_module(directions), "llvm")
    assert len(functions_of(mod)) == 2 * (len(variants) - 1)
    machine = quick_machine(directions_module(directions))
    rng = np.random.default_rng(0)
    for name, direction, problem in directions:
        operands = [
            rng.integers(-3, 4, [int(e) for e in problem.tensors[operand][0]]).astype(problem.tensors[operand][1])
            for operand in direction.operands
        ]
        found = machine[name](*map(tvm.runtime.tensor, operands)).numpy()
        np.testing.assert_array_equal(found, reference.DIRECTIONS[direction.name](problem, *operands))


@pytest.mark.parametrize("last", [False, True], ids=["channels first", "channels last"])
@pytest.mark.parametrize("hidden", [0, 1])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_transposed_convolutions_take_dgrads_kernel(rank: int, groups: int, hidden: int, last: bool) -> None:
    axes = SPATIAL[rank]
    extents = tuple(range(7 + hidden, 7 + hidden + 2 * rank, 2))
    problem = ConvProblem(2, 4, 6, extents, (3,) * rank, (2,) * rank, ((1, 1),) * rank, (1,) * rank, groups)
    if last:
        problem = problem.with_layouts(f"N{axes}C", f"{axes}IO", f"N{axes}C")
    grad, weight = (tensor(name, problem.tensors[name][0]) for name in ("grad", "weight"))
    made = getattr(relax.op.nn, f"conv{rank}d_transpose")(
        grad,
        weight,
        strides=problem.strides,
        padding=(1,) * (2 * rank),
        output_padding=(hidden,) * rank,
        groups=groups,
        data_layout=problem.grad_layout,
        kernel_layout=problem.kernel_layout.translate(str.maketrans("IO", "OI")),
    )
    mod = module(lambda _: made, [grad, weight])
    _, (entry,) = legalized(mod, "llvm")
    assert (entry.op, entry.direction, entry.problem) == (f"conv{rank}d_transpose", "backward_data", problem)
    rng = np.random.default_rng(0)
    arrays = [rng.integers(-3, 4, problem.tensors[name][0]).astype("float32") for name in ("grad", "weight")]
    wanted = reference.backward_data(problem, *arrays)
    for form in ("kernel", "composition"):
        with forced_forms(forward=form):
            found = quick_machine(mod)["main"](*map(tvm.runtime.tensor, arrays)).numpy()
        np.testing.assert_array_equal(found, wanted)
