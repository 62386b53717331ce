# SPDX-License-Identifier: Apache-2.0
"""Other instruction sets: what the plan sees of them, that kernels compile for them and are right where they run."""

from dataclasses import replace

import pytest
import tvm

from tests.kernels.harness import check_machine_code, kernel_of
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.verify.operators import ALL_DIRECTIONS

PROBLEM = ConvProblem.from_descriptor("mb2ic18ih9iw9oc20oh5ow5kh3kw3sh2sw2ph1pw1")
TARGETS = {
    "AVX-512": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "skylake-avx512"},
    "AVX2": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "haswell"},
    "SSE": {"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "x86-64"},
    "NEON": {"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "generic", "mattr": ["+neon"]},
}


@pytest.mark.parametrize("name", TARGETS)
def test_machine_and_code(name):
    machine = machine_of(tvm.target.Target(TARGETS[name]))
    assert machine is not None
    assert machine.name == name
    for direction in ALL_DIRECTIONS:
        choice, library = kernel_of(PROBLEM, direction, TARGETS[name])
        assert choice.is_kernel
        register = {"AVX-512": "zmm", "AVX2": "ymm", "SSE": "xmm", "NEON": ".4s"}[name]
        assert register in library.mod.inspect_source("s")


@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
def test_plain_llvm_runs_right(direction):
    check_machine_code(PROBLEM, direction, "llvm")


@pytest.mark.parametrize("direction", ALL_DIRECTIONS)
def test_avx2_runs_right(direction):
    features = set(map(str, tvm.target.codegen.llvm_get_cpu_features(tvm.target.Target(TARGETS["AVX2"]))))
    if not features & {"avx2"} or machine_of(tvm.target.Target({"kind": "llvm", "mcpu": _cpu()})).name == "SSE":
        pytest.skip("this machine has no AVX2")
    check_machine_code(PROBLEM, direction, TARGETS["AVX2"])


def test_other_targets_and_symbols_get_the_composition_with_a_reason():
    choice = chooser.choose(PROBLEM, "forward", machine_of(tvm.target.Target("cuda")))
    assert not choice.is_kernel
    assert "CPU" in choice.reason
    machine = machine_of(tvm.target.Target(TARGETS["AVX2"]))
    choice = chooser.choose(replace(PROBLEM, data_extents=("h", 9)), "forward", machine)
    assert not choice.is_kernel
    assert "run time" in choice.reason
    assert choice.refused


def _cpu() -> str:
    return tvm.target.codegen.llvm_get_system_cpu()
