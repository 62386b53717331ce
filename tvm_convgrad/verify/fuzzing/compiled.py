# SPDX-License-Identifier: Apache-2.0
"""Compiled cases: machine code in guarded memory, on several numbers of threads; each gives the right bits on all.

    python -m tvm_convgrad.verify.fuzzing.compiled SEED [optimised] < cases

A case is a line "direction TAB descriptor TAB tiling", its fault a line of JSON. An access out of bounds ends the
process; `compile_and_check`, which starts it, reports it for the first case that has no line.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_ops.single_run import QUICK_CONFIG
from tvm_convgrad import register
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.targets import required_features
from tvm_convgrad.verify.fuzzing.cases import KernelCase
from tvm_convgrad.verify.fuzzing.check import differences, kernel_of, numbers_of, read_case
from tvm_convgrad.verify.fuzzing.guarded import Array, GuardedMemory

SECONDS = 900
"""Seconds after which a process is ended, as its machine code does not terminate."""

THREADS = (1, 2, 3, 7)
"""The numbers of threads on which each case runs."""

TARGETS: dict[str, dict[str, object]] = {
    "AVX-512": {"kind": "llvm", "mcpu": "skylake-avx512"},
    "AVX512-BF16": {"kind": "llvm", "mcpu": "cooperlake"},
    "AMX-BF16": {"kind": "llvm", "mcpu": "cooperlake", "mattr": ["+amx-tile", "+amx-bf16"]},
    "AMX-FP16": {"kind": "llvm", "mcpu": "cooperlake", "mattr": ["+amx-tile", "+amx-bf16", "+amx-fp16"]},
    "AVX2": {"kind": "llvm", "mcpu": "haswell"},
    "SSE": {"kind": "llvm", "mcpu": "x86-64"},
}
"""The target of each instruction set that cases are compiled for."""


def runs_here(case: KernelCase) -> bool:
    """Whether this CPU has the instructions of the case's machine."""
    return case.machine.name in TARGETS and set(required_features(_target(case))) <= local_features()


def compile_and_check(cases: Sequence[KernelCase], seed: int, *, optimised: bool = False) -> list[str]:
    """What is wrong with each case, or an empty string, in a process of its own.

    Args:
        cases: those that this CPU runs.
        seed: of the numbers.
        optimised: compile with LLVM's optimiser, as users do; five times as slow.
    """
    faults: list[str] = []
    while len(faults) < len(cases):
        faults += _in_a_process(cases[len(faults) :], seed, optimised)
    return faults


def _in_a_process(cases: Sequence[KernelCase], seed: int, optimised: bool) -> list[str]:
    """The faults of the first cases, up to one that ended the process."""
    lines = "".join(f"{case.direction}\t{case.problem.descriptor}\t{case.tiling_text}\n" for case in cases)
    folder = str(Path(__file__).parents[3])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "TVM_NUM_THREADS": str(max(THREADS)),
        "TVM_THREAD_POOL_SPIN_COUNT": "0",
    }
    module = "tvm_convgrad.verify.fuzzing.compiled"
    command = [sys.executable, "-m", module, str(seed), *(["optimised"] if optimised else [])]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        out, err = process.communicate(lines, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    faults = [str(json.loads(line)) for line in out.splitlines()]
    if len(faults) < len(cases):
        code = process.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        last = (err.strip().splitlines() or ["no message"])[-1]
        faults.append(f"machine code ended the process ({how}; 11: out of bounds, 9: after {SECONDS} seconds): {last}")
    return faults


def _target(case: KernelCase) -> object:
    import tvm

    return tvm.target.Target(TARGETS[case.machine.name])


def _check(case: KernelCase, seed: int, optimised: bool) -> str:
    """What is wrong with one case, in this process."""
    import tvm

    described = {**TARGETS[case.machine.name], **({} if optimised else {"opt-level": 0})}
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        library = tvm.compile(tvm.IRModule({"kernel": kernel_of(case)}), tvm.target.Target(described))
    numbers = numbers_of(case, seed)
    for count in THREADS:
        tvm.get_global_func("runtime.config_threadpool")(1, count)
        memory = GuardedMemory(at_end=count % 2 == 1)
        arrays = [memory.copy(array) for array in (*numbers.operands, *numbers.results)]
        library["kernel"](*map(_tensor, arrays))
        fault = differences(arrays, numbers)
        if fault:
            return f"{fault} (compiled, {count} threads)"
    return ""


def _tensor(array: Array) -> object:
    """A tensor on an array's memory, which numpy can share for its own types only."""
    import tvm_ffi

    if array.dtype.name != "bfloat16":
        return tvm_ffi.from_dlpack(array)
    return tvm_ffi.from_dlpack(array.view("uint16"))._create_view(array.shape, "bfloat16")


def main(arguments: Sequence[str]) -> None:
    """Check the cases of standard input, a line of JSON for each."""
    register()
    seed, optimised = int(arguments[0]), "optimised" in arguments[1:]
    for line in sys.stdin:
        direction, descriptor, tiling = line.rstrip("\n").split("\t")
        case = read_case(ConvProblem.from_descriptor(descriptor), direction, tiling)
        try:
            fault = _check(case, seed, optimised)
        except Exception as error:  # whatever the compiler raises is a finding
            fault = f"it cannot be compiled: {type(error).__name__}: {error}"
        print(json.dumps(fault), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
