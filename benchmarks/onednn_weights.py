# SPDX-License-Identifier: Apache-2.0
"""What a training step spends on bringing weights into oneDNN's formats, on one thread.

    python benchmarks/onednn_weights.py [--batch 8] [--layout NCHW] [--calls 5]

For each network: milliseconds of all calls of a step (the first layer without dgrad), each the best of some, of the
processor's time, so that others' work does not count; of the reorders of weights in forward and dgrad, and of weight
gradients, by oneDNN's own clock; how many layers have one format for both, of those whose weight is reordered at all;
and the most that a step could gain if a weight were reordered once: the dearer one of each layer's two reorders.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tvm_convgrad.bench.suites import NETWORKS, suite
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE
from tvm_convgrad.offload.registry import backend, load_runtime

MARK = "convgrad"
NAMES = ("resnet50", "mobilenet_v2", "vgg16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--layout", default="NCHW", choices=("NCHW", "NHWC"))
    parser.add_argument("--calls", type=int, default=5)
    parser.add_argument("--suite", choices=NETWORKS, help=argparse.SUPPRESS)  # the process that calls oneDNN
    arguments = parser.parse_args()
    if arguments.suite is not None:
        call_all(suite(arguments.suite, arguments.batch, arguments.layout), arguments.calls)
        return
    environment = os.environ | {"ONEDNN_VERBOSE": "profile_exec", "TVM_NUM_THREADS": "1"}
    for name in NAMES:
        command = [sys.executable, *sys.argv, "--suite", name]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        print(f"{name:13} {summary(suite(name, arguments.batch, arguments.layout), done.stdout.splitlines())}")


def call_all(problems: Iterable[ConvProblem], calls: int) -> None:
    """Call each direction of each problem; oneDNN reports on the standard output, between two marks."""
    onednn, c = backend("onednn"), ctypes.CDLL(None)
    load_runtime("onednn", onednn.library())
    run = tvm_ffi.get_global_func(onednn.run_function)
    for number, problem in enumerate(problems):
        for direction, what in DIRECTIONS.items():
            numbers = onednn.numbers(direction, problem, NO_EPILOGUE, None)
            block = (ctypes.c_int64 * len(numbers))(*numbers)
            tensors = [
                tvm.runtime.tensor(np.ones([int(extent) for extent in problem.tensors[tensor][0]], "float32"))
                for tensor in (*what.operands, what.result)
            ]
            c.puts(f"{MARK},{number},{direction}".encode())
            times = []
            for _ in range(calls):
                begin = time.thread_time()
                run(ctypes.c_void_p(ctypes.addressof(block)), *tensors)
                times.append(time.thread_time() - begin)
            c.puts(f"{MARK},{1e3 * min(times)}".encode())
    c.fflush(None)


def summary(problems: dict[ConvProblem, int], lines: Iterable[str]) -> str:
    """Of what oneDNN has reported on the calls of these problems."""
    calls: dict[tuple[int, str], float] = {}
    reorders: dict[tuple[int, str], dict[str, float]] = defaultdict(dict)  # of each, the least time
    formats: dict[tuple[int, str], str] = {}
    key = (0, "")
    for fields in (line.split(",") for line in lines):
        if fields[0] == MARK and len(fields) == 2:
            calls[key] = float(fields[1])
        elif fields[0] == MARK:
            key = (int(fields[1]), fields[2])
        elif fields[0] == "onednn_verbose" and fields[1] == "exec":
            what, milliseconds = ",".join(fields[2:-1]), float(fields[-1])
            if fields[3] == "reorder":
                reorders[key][what] = min(milliseconds, reorders[key].get(what, milliseconds))
            elif fields[3] == "convolution":
                formats[key] = next(part for part in fields[6].split() if part.startswith("wei"))
    total, most, reordered, same = 0.0, 0.0, 0, 0
    spent: dict[str, float] = defaultdict(float)
    for number, (problem, count) in enumerate(problems.items()):
        weights = {}
        for direction in DIRECTIONS if number else ("forward", "backward_weight"):
            total += count * calls[number, direction]
            found = reorders[number, direction].items()
            weights[direction] = sum(once for what, once in found if what.endswith(f",{weight_of(problem)}"))
            spent[direction] += count * weights[direction]
        most += count * max(weights["forward"], weights["backward_data"]) if number else 0.0
        if number and any(weight_of(problem) in what for what in reorders[number, "forward"]):
            reordered += count
            same += count * (formats[number, "forward"] == formats[number, "backward_data"])
    times = ", ".join(f"{direction} {milliseconds:.2f}" for direction, milliseconds in spent.items())
    return (
        f"calls {total:7.1f} ms; weights: {times} ms; one format for {same} of {reordered} layers; "
        f"at most {most:.2f} ms to gain, {100 * most / total:.2f} %"
    )


def weight_of(problem: ConvProblem) -> str:
    """The extents of the weight as oneDNN writes them."""
    out, into, groups = problem.out_channels, problem.in_channels // problem.groups, problem.groups
    extents: list[Any] = [out, into] if groups == 1 else [groups, out // groups, into]
    return "x".join(map(str, [*extents, *problem.kernel]))


if __name__ == "__main__":
    main()
