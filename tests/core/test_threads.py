# SPDX-License-Identifier: Apache-2.0
"""TVM's pool: a number of threads that it does not have is refused, and other processes do not inherit its number."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import tvm

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.threads import VARIABLE, available_cores, intended_threads, limit_thread, use_threads


def limit() -> int:
    """What TVM reads in each call: with 1 it does not use the pool that it has."""
    return int(ctypes.CDLL(None)["_ZN3tvm7runtime9threading14MaxConcurrencyEv"]())


def test_a_refused_number_does_not_take_the_pool_away() -> None:
    made = use_threads()
    with pytest.raises(SetupError, match=f"TVM's pool has {made}|this process may use {made} CPUs"):
        use_threads(made + 1)
    assert limit() == made


def test_more_threads_than_cpus_are_refused_before_there_is_a_pool() -> None:
    """A pool of more threads than CPUs did not end: the process kept all CPUs busy."""
    program = "from tvm_convgrad.threads import use_threads; use_threads(1000)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert f"1000 threads: this process may use {len(os.sched_getaffinity(0))} CPUs" in done.stderr


def test_a_pool_that_exists_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of torchrun share the cores, but not those of a pool that was made before."""
    made = use_threads()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("TVM_BIND_THREADS", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert use_threads() == made
    assert limit() == intended_threads() == made


def test_other_threads_have_pools_of_that_number() -> None:
    made, found = use_threads(), []

    def in_thread() -> None:
        limit_thread(made)
        found.append(tvm.get_global_func("runtime.NumThreads")())

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert found == [made]


CHILD = "from tvm_convgrad.threads import intended_threads; print(intended_threads())"
PARENT = f"""
import multiprocessing, os, subprocess, sys
from tvm_convgrad.threads import intended_threads, use_threads
own = os.sched_getaffinity(0)
print(use_threads({{wanted}}), intended_threads(), flush=True)
assert os.sched_getaffinity(0) == own
print(multiprocessing.get_context("spawn").Pool(1).apply(intended_threads), flush=True)
subprocess.run([sys.executable, "-c", {CHILD!r}], check=True)
"""


@pytest.mark.parametrize(("wanted", "stated"), [(1, None), (1, "2")])
def test_child_processes_have_what_the_user_states(wanted: int | None, stated: str | None) -> None:
    """Not what their parent has chosen: workers of a loader, or another training, have all cores of the machine.

    TVM would bind a process of one thread to the first core, and with it all others that do the same.
    """
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "LOCAL_WORLD_SIZE")}
    environment |= {VARIABLE: stated} if stated else {}
    command = [sys.executable, "-c", PARENT.format(wanted=wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    own, of_children = wanted or int(stated or available_cores()), int(stated or available_cores())
    assert done.stdout.split() == [str(own), str(own), *[str(of_children)] * 2]
