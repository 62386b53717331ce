# SPDX-License-Identifier: Apache-2.0
"""The number of threads of TVM's pool: as many as there are cores.

TVM takes half of the CPUs for hyper-threads, whether they are or not, and binds the main thread to the cores that it
uses: threads that PyTorch starts later inherit that and crowd on them. So the number is set before TVM's pool exists,
and in TVM's library, not in the environment, which processes that are started later would inherit.
"""

from __future__ import annotations

import ctypes
import os
import threading
from pathlib import Path

from tvm_convgrad.core.errors import SetupError

VARIABLE = "TVM_NUM_THREADS"
_BIND = "TVM_BIND_THREADS"

JOBS = "CONVGRAD_JOBS"
"""The variable of how many processes compile the kernels of a build, the one that builds included."""

_SET_MAXIMUM = "_ZN3tvm7runtime9threading17SetMaxConcurrencyEi"
"""tvm::runtime::threading::SetMaxConcurrency(int), which applies to the calling thread, as do TVM's pools."""

CPUS = frozenset(os.sched_getaffinity(0))
"""The CPUs that this process could use when this was imported, before TVM bound its main thread."""


def available_cores() -> int:
    """The cores that this process may use; the hyper-threads of one core count once."""
    cores = set()
    for cpu in os.sched_getaffinity(0):
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return len(cores)


_LOCAL = "LOCAL_WORLD_SIZE"


def local_ranks() -> int:
    """How many processes of a distributed run share this machine, as torchrun tells (LOCAL_WORLD_SIZE); else 1.

    Raises:
        SetupError: the variable is no positive number.
    """
    stated = os.environ.get(_LOCAL) or "1"
    if not stated.isdecimal() or not int(stated):
        raise SetupError(f"{_LOCAL}={stated}: it is the number of ranks on this machine, at least 1.")
    return int(stated)


_chosen: int | None = None
"""What `use_threads` has made, where that is not what TVM_NUM_THREADS says."""

_here = threading.local()


def intended_threads() -> int:
    """What `use_threads` makes if it is not told: what it has chosen, TVM_NUM_THREADS, or a share of all cores.

    The processes of a distributed run share the cores of their machine. TVM is not loaded.
    """
    if _chosen is not None:
        return _chosen
    stated = os.environ.get(VARIABLE, "")
    return int(stated) if stated.isdecimal() and int(stated) else max(available_cores() // local_ranks(), 1)


def use_threads(wanted: int | None = None) -> int:
    """Make TVM's pool of so many threads; call it before anything is run.

    Threads are not bound to cores where there are more cores than threads, or several processes of a distributed run:
    each process would take the first ones, and its child processes with it.

    Args:
        wanted: None is TVM_NUM_THREADS or, without it, this process's share of all cores (or what TVM's pool has if it
            was made before).

    Returns:
        The number of threads.

    Raises:
        SetupError: TVM's pool was made before with another number than `wanted`, or there are fewer CPUs.
    """
    global _chosen
    if wanted is not None and wanted > len(CPUS):  # TVM would start them all, and its pool would not end
        raise SetupError(f"{wanted} threads: this process may use {len(CPUS)} CPUs; give no more.")
    ours, count = wanted is not None or not os.environ.get(VARIABLE), wanted or intended_threads()
    if local_ranks() > 1:
        os.environ.setdefault(_BIND, "0")
    import tvm  # commands set the number before they pay for loading TVM

    if ours:
        limit_thread(count)
    is_given = _BIND in os.environ
    if not is_given and count < available_cores():
        os.environ[_BIND] = "0"  # TVM reads it when it makes the pool
    made = int(tvm.get_global_func("runtime.NumThreads")())
    if not is_given:
        os.environ.pop(_BIND, None)
    if ours:
        limit_thread(made)  # TVM reads the limit in each call, too: with 1 it does not use the pool that it has
        _chosen = made
    if wanted not in (None, made):
        raise SetupError(
            f"{wanted} threads: TVM's pool has {made}. It has no more than there are cores ({available_cores()}), and "
            "keeps its number once it is made; use as many, or a new process."
        )
    return made


def limit_thread(count: int) -> None:
    """Let what the calling thread runs use so many threads. Each thread has a pool of its own, made at its first call.

    A build of TVM that does not export the function reads the environment instead, and child processes inherit that.
    """
    if getattr(_here, "count", None) == count:
        return
    function = getattr(ctypes.CDLL(None), _SET_MAXIMUM, None)  # TVM loads its runtime for all
    if function is None:
        os.environ[VARIABLE] = str(count)
        return
    function(count)
    _here.count = count
