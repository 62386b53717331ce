# SPDX-License-Identifier: Apache-2.0
"""Run what is compiled once on one, two, three and seven threads: TVM's pool has seven on any machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable

import numpy as np
import tvm

THREADS = (1, 2, 3, 7)
_SAME = "same bits on all numbers of threads"


def check_same_bits(run: Callable[[], Iterable[np.ndarray]]) -> None:
    """In a program of `run_with_threads`: what `run` gives is the same, bit for bit, on each number of threads."""
    results = []
    for count in THREADS:
        tvm.get_global_func("runtime.config_threadpool")(1, count)
        assert tvm.get_global_func("runtime.NumThreads")() == count
        results.append([array.tobytes() for array in run()])
    assert all(result == results[0] for result in results)
    print(_SAME)


def run_with_threads(program: str, checks: int) -> list[str]:
    """Run a program that calls `check_same_bits` so many times, in a process of its own; the other lines it prints."""
    # Idle threads that spin would wait for each other's cores where tests run side by side.
    environment = {**os.environ, "TVM_NUM_THREADS": str(max(THREADS)), "TVM_THREAD_POOL_SPIN_COUNT": "0"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines.count(_SAME) == checks
    return [line for line in lines if line != _SAME]
