# SPDX-License-Identifier: Apache-2.0
"""Our own kernels of float16 or bfloat16 beside our own of float32, on one thread, for one instruction set.

    python -m benchmarks.narrow_types --dtype float16 --cpu x86-64-v3 --suite resnet50,mobilenet_v2 --batch 8

`--cpu` is LLVM's name of a CPU that this machine can run the code of; without it, this CPU. Each distinct layer runs in
wgrad, dgrad and forward, the two types in turns; a ratio is float32's time over that of the type, the median over the
pairs, of the processor's time, so that others' work does not count. Dense layers have kernels wider than 1.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from statistics import median

import numpy as np
import tvm

from tvm_convgrad.bench.measure import geometric_mean
from tvm_convgrad.bench.suites import NETWORKS, suite
from tvm_convgrad.codegen.hardware import Machine, machine_of, native_target, with_cores
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE
from tvm_convgrad.threads import use_threads

LEAST = 4e-3
"""Seconds that a timed turn lasts at least."""
CLOCK = 1e-5
"""Seconds below which one call is too short for the clock."""


def kind_of(problem: ConvProblem) -> str:
    """What its row in the table is called."""
    if problem.groups > 1:
        return "depthwise" if problem.is_depthwise else "grouped"
    return "1x1" if set(problem.kernel) == {1} else "dense"


def call_of(problem: ConvProblem, direction: str, machine: Machine, target: tvm.target.Target) -> Callable[[], object]:
    """One call of the kernel for a problem, with its operands."""
    choice = chooser.choose(problem, direction, machine)
    if not choice.is_kernel:
        raise SystemExit(f"{direction} of {problem.descriptor} has no kernel on {machine.name}: {choice}")
    function = chooser.build(problem, direction, machine, choice, "main", NO_EPILOGUE)
    library = tvm.compile(tvm.IRModule({"main": function}), target=target)
    operands, _ = numbers_of(problem, direction, 0)
    tensors = [tvm.runtime.tensor(np.ascontiguousarray(operand)) for operand in operands]
    result = tvm.runtime.empty(*problem.tensors[DIRECTIONS[direction].result])
    run = library["main"]
    return lambda: run(*tensors, result)


def ratio(calls: tuple[Callable[[], object], Callable[[], object]], pairs: int) -> float:
    """The median over the pairs of the first call's time over the second's, after a call of each that is not timed."""
    for call in calls:
        call()
    once = max(time_of(calls[0], 1), CLOCK)
    runs = max(1, round(LEAST / once))
    return median(time_of(calls[0], runs) / time_of(calls[1], runs) for _ in range(pairs))


def time_of(call: Callable[[], object], runs: int) -> float:
    """Seconds of this thread's processor time that some runs take."""
    begin = time.thread_time()
    for _ in range(runs):
        call()
    return time.thread_time() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("float16", "bfloat16"), default="float16")
    parser.add_argument("--cpu", help="LLVM's name of a CPU, such as x86-64-v3; default: this one")
    parser.add_argument("--suite", default="resnet50,mobilenet_v2", help=f"of {', '.join(NETWORKS)}, with commas")
    parser.add_argument("--layout", choices=("NCHW", "NHWC"), default="NCHW")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=9)
    given = parser.parse_args()
    use_threads(1)
    target = with_cores(tvm.target.Target({"kind": "llvm", "mcpu": given.cpu}) if given.cpu else native_target(), 1)
    machine = machine_of(target)
    if machine is None:
        raise SystemExit(f"--cpu {given.cpu}: no kernels are made for it")
    problems = {p: None for name in given.suite.split(",") for p in suite(name, given.batch, given.layout)}
    ratios: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for problem in problems:
        for direction in DIRECTIONS:
            narrow = problem.with_dtypes(given.dtype, given.dtype, given.dtype)
            calls = call_of(problem, direction, machine, target), call_of(narrow, direction, machine, target)
            ratios[kind_of(problem), direction][problem.descriptor] = ratio(calls, given.pairs)
    print(f"{given.dtype} beside float32 on {machine.name}, {given.layout}, batch {given.batch}, one thread")
    for (kind, direction), found in sorted(ratios.items()):
        worst = min(found, key=lambda descriptor: found[descriptor])
        print(
            f"{kind:10} {direction:16} {len(found):3} layers: geometric mean {geometric_mean(found.values()):.2f}, "
            f"least {found[worst]:.2f} ({worst})"
        )


if __name__ == "__main__":
    main()
