# SPDX-License-Identifier: Apache-2.0
"""The number of threads of TVM's pool: as many as there are cores.

TVM takes half of the CPUs for hyper-threads, whether they are or not, and binds the main thread to the cores that it
uses: threads that PyTorch starts later inherit that and crowd on them. So the number is set before TVM's pool exists.
"""

from __future__ import annotations

import os
from pathlib import Path

from tvm_convgrad.core.errors import SetupError

VARIABLE = "TVM_NUM_THREADS"

CPUS = frozenset(os.sched_getaffinity(0))
"""The CPUs that this process could use when this was imported, before TVM bound its main thread."""


def available_cores() -> int:
    """The cores that this process may use; the hyper-threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return len(cores)


def local_ranks() -> int:
    """How many processes of a distributed run share this machine, as torchrun tells (LOCAL_WORLD_SIZE); else 1."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or 1)


def intended_threads() -> int:
    """What `use_threads` makes if it is not told: TVM_NUM_THREADS, or this process's share of all cores.

    The processes of a distributed run share the cores of their machine. TVM is not loaded.
    """
    stated = os.environ.get(VARIABLE, "")
    return int(stated) if stated.isdecimal() and int(stated) else max(available_cores() // local_ranks(), 1)


def use_threads(wanted: int | None = None) -> int:
    """Make TVM's pool of so many threads; call it before anything is run.

    Threads of several processes of a distributed run are not bound to cores, as each process would take the first ones.

    Args:
        wanted: None is TVM_NUM_THREADS or, without it, this process's share of all cores (or what TVM's pool has if it
            was made before).

    Returns:
        The number of threads.

    Raises:
        SetupError: TVM's pool was made before with another number than `wanted`, or there are fewer cores.
    """
    ours = wanted is not None or not os.environ.get(VARIABLE)
    if ours:
        os.environ[VARIABLE] = str(wanted or intended_threads())
    if local_ranks() > 1:
        os.environ.setdefault("TVM_BIND_THREADS", "0")
    import tvm  # commands set the number before they pay for loading TVM

    made = int(tvm.get_global_func("runtime.NumThreads")())
    if ours:
        os.environ[VARIABLE] = str(made)  # TVM reads it in each call, too: with 1 it does not use the pool that it has
    if wanted not in (None, made):
        raise SetupError(
            f"{wanted} threads: TVM's pool has {made}. It has no more than there are cores ({available_cores()}), and "
            "keeps its number once it is made; use fewer, in a new process."
        )
    return made
