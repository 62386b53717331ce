# SPDX-License-Identifier: Apache-2.0
"""A fingerprint of all generated kernels: the choice, its tiling and estimate, and the hash of the PrimFunc.

    python benchmarks/fingerprint.py write before.txt                  # at one commit
    python benchmarks/fingerprint.py write after.txt                   # at another
    python benchmarks/fingerprint.py compare before.txt after.txt      # exit code 1 if they differ

A change that only moves or renames code leaves every line as it is. The problems are

- the convolutions of all bench suites, batches 1, 8 and 32, both layouts, three directions, each on four instruction
  sets, and Winograd's kernels of those that have one;
- 2,000 fuzzed problems, each on one instruction set: the kernel that is chosen (with a random epilogue, and for any
  batch where the layouts allow it) and up to three of the tuner's candidates.

One line a kernel: instruction set, direction, descriptor, variant | kernel | tilings | estimate in seconds | hash.
Tilings are the values of their fields without the names. A composition has no hash, and no tiling.

`write --every 10` takes one job in ten: half a minute on two cores instead of six.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import random
import sys
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import fields, replace
from itertools import islice
from pathlib import Path

import tvm_ffi

from tvm_convgrad.bench.suites import SUITES, suite
from tvm_convgrad.codegen.hardware import CPUS, Machine
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.candidates import candidates
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import kernels_of
from tvm_convgrad.verify.operators import random_problems

DIRECTIONS = ("forward", "backward_weight", "backward_data")
BATCHES = (1, 8, 32)
LAYOUTS = ("NCHW", "NHWC")
FUZZED, SEED, CANDIDATES = 2000, 16, 3
EPILOGUES = {
    direction: ("accumulate", "bias_grad") if direction == "backward_weight" else ("bias", "relu", "accumulate")
    for direction in DIRECTIONS
}
SHOWN = 20
"""Differences that `compare` prints of each kind."""


def line_of(
    problem: ConvProblem,
    direction: str,
    machine: Machine,
    variant: str,
    choice: Choice,
    epilogue: Epilogue = NO_EPILOGUE,
) -> str:
    """The fingerprint of one kernel."""
    key = f"{machine.name} {direction} {problem.descriptor} {variant}"
    if choice.plan is None:
        return f"{key} | {choice.name} | - | 0 | -"
    function = chooser.build(problem, direction, machine, choice, "kernel", epilogue)
    digest = tvm_ffi.structural_hash(function) % 2**64
    tilings = " ".join(
        ",".join(str(getattr(tiling, item.name)) for item in fields(tiling)) for tiling in choice.plan.tilings
    )
    return f"{key} | {choice.name} | {tilings} | {choice.estimate:.9e} | {digest:016x}"


def lines_of_suites(machine: Machine, name: str, batch: int, layout: str) -> Iterator[str]:
    """Every direction of a suite's problems, and Winograd's kernel of those that have one."""
    for problem in suite(name, batch, layout):
        for direction in DIRECTIONS:
            yield line_of(problem, direction, machine, "chosen", chooser.choose(problem, direction, machine))
            for kernel in kernels_of(direction):
                forced = chooser.choose(problem, direction, machine, kernel)
                if not kernel.exact and forced.is_kernel:
                    yield line_of(problem, direction, machine, kernel.name, forced)


def lines_of_fuzzed(problem: ConvProblem, machine: Machine) -> Iterator[str]:
    """Every direction of a fuzzed problem: what is chosen, and candidates of the tuner."""
    for direction in DIRECTIONS:
        rng = random.Random(zlib.crc32(f"{direction} {problem.descriptor}".encode()))
        fused = [name for name in EPILOGUES[direction] if rng.random() < 0.5]
        taken = replace(problem, batch="n") if rng.random() < 0.25 else problem
        choice = chooser.choose(taken, direction, machine)
        epilogue = Epilogue(**dict.fromkeys(fused, True))
        yield line_of(taken, direction, machine, f"chosen+{','.join(fused)}", choice, epilogue)
        for number, other in enumerate(islice(candidates(problem, direction, machine), 1, 1 + CANDIDATES)):
            yield line_of(problem, direction, machine, f"candidate{number}", other)


def work() -> list[tuple[object, ...]]:
    """What the processes share: one suite of a batch, a layout and an instruction set, or some fuzzed problems."""
    machines = [machine for machine in CPUS.values() if not machine.dots]
    jobs: list[tuple[object, ...]] = [
        ("suite", machine, name, batch, layout)
        for name in SUITES
        for batch in reversed(BATCHES)
        for layout in LAYOUTS
        for machine in machines
    ]
    problems = random_problems(FUZZED, SEED)
    for first in range(0, FUZZED, 50):
        jobs.append(("fuzzed", machines[first // 50 % len(machines)], problems[first : first + 50]))
    return jobs


def lines_of(job: tuple[object, ...]) -> list[str]:
    """The lines of one job."""
    if job[0] == "suite":
        return list(lines_of_suites(*job[1:]))  # type: ignore[arg-type]
    machine, problems = job[1:]
    return [line for problem in problems for line in lines_of_fuzzed(problem, machine)]  # type: ignore[attr-defined, arg-type]


def write(path: Path, processes: int, every: int) -> None:
    """Write the fingerprint of one job in `every`, sorted."""
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        lines = sorted({line for found in pool.imap_unordered(lines_of, work()[::every]) for line in found})
    path.write_text("\n".join(lines) + "\n")
    print(f"{path}: {len(lines)} kernels")


def read(path: Path) -> dict[str, list[str]]:
    """(kernel, tiling, estimate, hash) of a file's lines by their keys."""
    table = {}
    for line in path.read_text().splitlines():
        key, *rest = line.split(" | ")
        table[key] = rest
    return table


def show(title: str, texts: Iterable[str]) -> bool:
    """Print up to SHOWN texts; whether there are any."""
    every = list(texts)
    if every:
        print(f"{title}: {len(every)}")
        print("".join(f"  {text}\n" for text in every[:SHOWN]), end="")
    return bool(every)


def compare(before: Path, after: Path) -> int:
    """Print how two fingerprints differ; 1 if they do."""
    old, new = read(before), read(after)
    both = [key for key in old if key in new]
    differ = show("only in the first", (key for key in old if key not in new))
    differ |= show("only in the second", (key for key in new if key not in old))
    for place, name in enumerate(("kernel", "tiling", "estimate", "code")):
        pairs = ((key, old[key][place], new[key][place]) for key in both)
        differ |= show(f"other {name}", (f"{key}: {a} -> {b}" for key, a, b in pairs if a != b))
    print("they differ" if differ else f"{len(both)} kernels are identical")
    return int(differ)


def main() -> int:
    """Write a fingerprint, or compare two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write the fingerprint of this tree")
    writing.add_argument("path", type=Path)
    writing.add_argument("--processes", type=int, default=os.cpu_count())
    writing.add_argument("--every", type=int, default=1, metavar="N", help="take one job in N")
    comparing = commands.add_parser("compare", help="compare two files")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    options = parser.parse_args()
    if options.command == "compare":
        return compare(options.before, options.after)
    write(options.path, options.processes, options.every)
    return 0


if __name__ == "__main__":
    sys.exit(main())
