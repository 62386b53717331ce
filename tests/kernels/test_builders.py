# SPDX-License-Identifier: Apache-2.0
"""The same target's text gives the same kernels on every machine that builds, however many cores it has."""

import json
import os
import subprocess
import sys

import pytest
import tvm

from tvm_convgrad.codegen import hardware as target_module
from tvm_convgrad.codegen.hardware import DEFAULT_CORES, cores_of, machine_of, native_target, with_cores
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.targets import required_features
from tvm_convgrad.training.compile.artifact_writer import built_for_of
from tvm_convgrad.training.compile.targets import parse_target

PROGRAM = """
import hashlib, os, sys
cores = int(sys.argv[1])
os.cpu_count = lambda: cores
os.sched_getaffinity = lambda _process: set(range(cores))
import tvm, tvm_ffi
from tests.linked import PLAIN
from tests.training.small_models import relax_module, weights
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.kernels import chooser
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

TEXTS = (
    "mb8ic64ih28oc16oh28kh3ph1", "mb4ic3ih32oc32oh16kh3sh2ph1", "g32mb8ic32ih14oc32oh14kh3ph1_lay=NHWC:OHWI:NHWC",
    "g8mb8ic32ih14oc32oh14kh3ph1", "g32mb4ic32ih28oc32oh28kh3ph1",
)
X86 = {"kind": "llvm", "mtriple": "x86_64-linux-gnu"}
for described in ({**X86, "mcpu": "haswell"}, {**X86, "mcpu": "skylake-avx512", "num-cores": 4}):
    machine = machine_of(tvm.target.Target(described))
    for problem in map(ConvProblem.from_descriptor, TEXTS):
        for direction in DIRECTIONS:
            choice = chooser.choose(problem, direction, machine)
            function = chooser.build(problem, direction, machine, choice, "main")
            print(problem.descriptor, direction, choice.plan, tvm_ffi.structural_hash(function))
step = build_step(from_module(relax_module(4), parameters=weights()), accumulate=2)
executable, lowered = compile_with_plan(step, PLAIN, ("auto",))
print([str(entry.choice.plan) for entry in lowered])
(code,) = [module for module in executable.mod.imports if module.kind == "llvm"]
code.write_to_file(sys.argv[2], "o")
print(hashlib.sha256(open(sys.argv[2], "rb").read()).hexdigest())
"""


def _built(cores: int, threads: int, tmp_path) -> list[str]:
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(cores),
        "TVM_NUM_THREADS": str(threads),
        "CONVGRAD_TUNINGS": str(tmp_path / "none.json"),
    }
    command = [sys.executable, "-c", PROGRAM, str(cores), str(tmp_path / f"{cores}.o")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_machine_that_builds_does_not_count(tmp_path) -> None:
    """Nor do its threads, and the order in which Python's sets are iterated."""
    few, many = _built(2, 1, tmp_path), _built(64, 3, tmp_path)
    assert len(few) == 2 * 5 * 3 + 2
    assert few == many
    assert any("split k" in line for line in few)


@pytest.mark.parametrize(("stated", "parts"), [(None, DEFAULT_CORES), (1, 2), (2, 2), (5, 5), (64, 64), (1000, 64)])
def test_parts_come_from_the_target(stated, parts) -> None:
    described = {"kind": "llvm", "mtriple": "x86_64-linux-gnu", **({} if stated is None else {"num-cores": stated})}
    target = tvm.target.Target(described)
    assert machine_of(target).parts == parts
    assert built_for_of(target) == {"target": str(target), "cores": stated or DEFAULT_CORES}
    assert machine_of(with_cores(target, 3)).parts == 3


def test_native_says_how_many_cores_there_are(monkeypatch) -> None:
    for count in (3, 6):
        monkeypatch.setattr(target_module, "available_cores", lambda count=count: count)
        for target in (native_target(), parse_target("native")):
            assert json.loads(str(target))["num-cores"] == count == cores_of(target)


@pytest.mark.parametrize(
    ("hidden", "name"), [("avx512bf16", "AVX-512"), ("avx512f", "AVX2"), ("amx-tile", "AVX512-BF16"), ("fma", "SSE")]
)
def test_native_leaves_out_what_a_hypervisor_hides(monkeypatch, hidden: str, name: str) -> None:
    """LLVM names the model of the CPU, and some of its instructions may not be there."""
    monkeypatch.setattr(target_module.llvm, "llvm_get_system_cpu", lambda: "sapphirerapids")
    whole = set(
        map(
            str, target_module.llvm.llvm_get_cpu_features(tvm.target.Target({"kind": "llvm", "mcpu": "sapphirerapids"}))
        )
    )
    monkeypatch.setattr(target_module, "local_features", lambda: frozenset(whole - {hidden}))
    target = native_target()
    assert machine_of(target).name == name
    assert hidden not in required_features(target)
    assert f"-{hidden}" in target.attrs["mattr"]


@pytest.mark.parametrize("cores", [0, -1])
def test_a_number_of_cores_that_makes_no_sense_is_refused(cores) -> None:
    with pytest.raises(UnsupportedError, match=f"num-cores is {cores}; it must be at least 1"):
        parse_target(json.dumps({"kind": "llvm", "num-cores": cores}))
