# SPDX-License-Identifier: Apache-2.0
"""Mutate programs of a Relay corpus and import them: each must be refused by a ConvGradError, or import.

    python benchmarks/relay_fuzz.py ../shared/relay_corpus --count 10000 [--seed 0] [--jobs 2]

Mutations flip, insert, remove, repeat and copy bytes, exchange numbers, and truncate the file. A worker process may
take 2 GiB, an import 10 s; a crash, a hang, another exception or more memory is a fault, and its mutation
is printed so that --seed and its number replay it. The exit code is 1 if there is any.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.importer import corpus, mutations


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=corpus.FOLDER)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first mutation")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()

    files = mutations.files(options.folder, corpus.entries(options.folder))
    start, states, faults = time.perf_counter(), Counter[str](), 0
    numbers = range(options.first, options.first + options.count)
    jobs = [(files[number % len(files)], options.seed, number) for number in numbers]
    with multiprocessing.get_context("spawn").Pool(options.jobs, mutations.limit, maxtasksperchild=500) as pool:
        pending = [(job, pool.apply_async(mutations.outcome, job)) for job in jobs]
        for job, result in pending:
            try:
                state = result.get(timeout=300)
            except multiprocessing.TimeoutError:
                state = "fault: no answer within 300 s; the process crashed or hangs"
            kind = state.partition(":")[0]
            states[kind] += 1
            if kind == "fault":
                faults += 1
                print(f"mutation {job[2]} of {job[0]}: {state}", flush=True)
    print(f"{options.count} mutations of {len(files)} files: {dict(states)}, {time.perf_counter() - start:.0f} s")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
