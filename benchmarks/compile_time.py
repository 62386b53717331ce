# SPDX-License-Identifier: Apache-2.0
"""How long kernels take to compile: CPU time of one process, from a problem to code in memory (JIT).

    python benchmarks/compile_time.py                                   # all gradients of the four whole networks
    python benchmarks/compile_time.py --suites deeplab --passes         # and where the time of each goes
    python benchmarks/compile_time.py --suites resnet50 --transforms    # Winograd's, where it can be

Prints the slowest, the median, and the share within half a second. Seconds of a process, so that what else the machine
does matters little.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter

import tvm
from tvm.ir.instrument import pass_instrument

import tvm_convgrad
from tvm_convgrad.bench.suites import NETWORKS, SUITES, suite
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.registry import kernel_named
from tvm_convgrad.training.compile.targets import parse_target

GRADIENTS = ("backward_weight", "backward_data")


@pass_instrument
class PassTimes:
    """CPU seconds of each pass, without those of the passes that it runs itself."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._open: list[list[float]] = []

    def run_before_pass(self, _module: tvm.IRModule, _info: tvm.transform.PassInfo) -> None:
        self._open.append([time.process_time(), 0.0])

    def run_after_pass(self, _module: tvm.IRModule, info: tvm.transform.PassInfo) -> None:
        begin, inner = self._open.pop()
        spent = time.process_time() - begin
        self.seconds[info.name] += spent - inner
        if self._open:
            self._open[-1][1] += spent


def main() -> None:
    """Compile every gradient of the suites and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=list(NETWORKS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--layouts", nargs="+", choices=("NCHW", "NHWC"), default=["NCHW", "NHWC"])
    parser.add_argument("--target", default="native", help="llvm, native, or TVM's JSON form of a CPU")
    parser.add_argument("--transforms", action="store_true", help="Winograd's kernels only")
    parser.add_argument("--passes", action="store_true", help="print the slowest passes of each")
    parser.add_argument("--slowest", type=int, default=8, help="how many of the slowest to print")
    options = parser.parse_args()
    tvm_convgrad.register()
    target = parse_target(options.target)
    machine = machine_of(target)
    problems = dict.fromkeys(
        problem
        for name in options.suites
        for batch in options.batches
        for layout in options.layouts
        for problem in suite(name, batch, layout)
    )
    tvm.compile(tvm.IRModule({}), target)  # what is loaded once
    found = []
    for problem in problems:
        for direction in GRADIENTS:
            times = PassTimes()
            begin = time.process_time()
            forced = kernel_named("winograd", direction) if options.transforms else None
            choice = chooser.choose(problem, direction, machine, forced)
            if not choice.is_kernel:
                continue
            function = chooser.build(problem, direction, machine, choice, "main")
            planned = time.process_time()
            with tvm.transform.PassContext(instruments=[times] if options.passes else []):
                library = tvm.compile(tvm.IRModule({"main": function}), target)
            lowered = time.process_time()
            library["main"]  # which is when LLVM makes machine code
            done = time.process_time()
            parts = f"plan {planned - begin:.2f}, TVM {lowered - planned:.2f}, machine code {done - lowered:.2f}"
            passes = ", ".join(f"{name} {seconds:.2f}" for name, seconds in times.seconds.most_common(4))
            found.append((done - begin, f"{direction} {problem.descriptor} [{choice.name}]: {parts}", passes))
    found.sort(reverse=True)
    for seconds, text, passes in found[: options.slowest]:
        print(f"{seconds:.2f} s  {text}" + (f"; {passes}" if passes else ""))
    every = [seconds for seconds, *_ in found]
    within = sum(seconds <= 0.5 for seconds in every) / len(every)
    print(
        f"{len(every)} kernels: {statistics.median(every):.2f} s in the median, {max(every):.2f} at the most, ", end=""
    )
    print(f"{within:.1%} within 0.5 s, {sum(every):.0f} s in all")


if __name__ == "__main__":
    main()
