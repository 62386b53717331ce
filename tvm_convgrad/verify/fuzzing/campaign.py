# SPDX-License-Identifier: Apache-2.0
"""A campaign of the fuzzer: many cases, checked on all cores. `convgrad verify --fuzz N` runs it.

A case depends on its number and the seed only, so that a campaign is the same on every machine and for any number of
processes, and a longer one begins with the cases of a shorter one. All cases are interpreted; one in COMPILED_EVERY is
compiled as well, and one batch of these in OPTIMISED_EVERY with LLVM's optimiser.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial

from tvm_convgrad import register
from tvm_convgrad.core.catalogue import DIRECTIONS, WORDS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.fuzzing.cases import KernelCase
from tvm_convgrad.verify.fuzzing.check import check_case, draw_case, read_case
from tvm_convgrad.verify.fuzzing.compiled import compile_and_check, runs_here
from tvm_convgrad.verify.fuzzing.shrink import shrink
from tvm_convgrad.verify.suite import Verdict

COMPILED_EVERY, OPTIMISED_EVERY = 40, 8
"""One case in COMPILED_EVERY is compiled, and one compiled batch in OPTIMISED_EVERY is optimised."""

_BATCH = 25
"""Cases that one process compiles and runs."""

_CHUNK = 10
"""Cases that a process interprets before it asks for more."""


def case_number(number: int, seed: int, directions: Sequence[str] = tuple(DIRECTIONS)) -> KernelCase:
    """Case `number` of a seed."""
    return draw_case(random.Random(f"{seed} {number}"), directions)


def fuzz(
    count: int, seed: int, *, directions: Sequence[str] = tuple(DIRECTIONS), workers: int = 0, first: int = 0
) -> Iterator[Verdict]:
    """A verdict for each of `count` cases, in their order, then for each that is compiled.

    A wrong case is followed by a smaller one with a fault, if there is one.

    Args:
        count: the number of cases.
        seed: of the cases and of their operands.
        directions: names of directions in the catalogue.
        workers: the number of processes that interpret; 0 is one for each core. No more are started than have work,
            and none for what one process does: the start of each costs as much as a hundred cases.
        first: the number of the first case.
    """
    workers = workers or len(os.sched_getaffinity(0))
    numbers = range(first, first + count)
    work = partial(_interpreted, seed=seed, directions=tuple(directions))
    busy = min(workers, -(-count // _CHUNK))
    if busy <= 1:
        yield from itertools.chain.from_iterable(map(work, numbers))
    else:
        with ProcessPoolExecutor(busy, multiprocessing.get_context("spawn")) as pool:
            yield from itertools.chain.from_iterable(pool.map(work, numbers, chunksize=_CHUNK))
    cases = [case_number(number, seed, directions) for number in numbers if number % COMPILED_EVERY == 0]
    cases = [case for case in cases if runs_here(case)]
    batches = [cases[start : start + _BATCH] for start in range(0, len(cases), _BATCH)]
    with ThreadPoolExecutor(workers) as threads:
        for verdicts in threads.map(_compiled, itertools.count(), batches, itertools.repeat(seed)):
            yield from verdicts


def _interpreted(number: int, seed: int, directions: tuple[str, ...]) -> list[Verdict]:
    """The verdict of a case, and of a smaller one if it is wrong."""
    register()
    case = case_number(number, seed, directions)
    fault = check_case(case, seed)
    found = [_verdict(case, fault)]
    if fault:
        small = shrink(case, partial(check_case, seed=seed))
        if small != case:
            found.append(_verdict(small, check_case(small, seed)))
    return found


def _compiled(number: int, cases: Sequence[KernelCase], seed: int) -> list[Verdict]:
    """The verdicts of batch `number` of compiled cases."""
    optimised = number % OPTIMISED_EVERY == OPTIMISED_EVERY - 1
    faults = compile_and_check(cases, seed, optimised=optimised)
    return [_verdict(case, fault, "compiled ") for case, fault in zip(cases, faults, strict=True)]


def replayed(problem: ConvProblem, direction: str, tiling: str, seed: int) -> list[Verdict]:
    """The verdicts of a case by its string: interpreted, and compiled if this CPU has its instructions."""
    case = read_case(problem, direction, tiling)
    found = [_verdict(case, check_case(case, seed))]
    if runs_here(case):
        fault = compile_and_check([case], seed, optimised=True)[0]
        found.append(_verdict(case, fault, "compiled "))
    return found


def _verdict(case: KernelCase, fault: str, how: str = "") -> Verdict:
    kernel, status = f"{how}{case.kernel.label(case.direction)}, {case.machine.name}", "wrong" if fault else "right"
    tiling = case.tiling_text if fault else ""
    return Verdict(
        WORDS[case.direction], case.problem.descriptor, kernel, status, fault or "all elements equal", tiling
    )


__all__ = ["case_number", "fuzz", "replayed"]
