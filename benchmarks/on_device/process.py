# SPDX-License-Identifier: Apache-2.0
"""A contender in a process of its own: times, losses and memory of its steps, as a line of JSON.

It runs in the environments of all contenders, and needs nothing but numpy.
"""

from __future__ import annotations

import ctypes
import gc
import json
import re
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

LR = 0.01
LEAST = 1
"""Steps that are timed at the least; the first one is not."""
COMPARED = 3
"""Steps whose losses are compared, if there are so many."""


def batch(folder: Path) -> dict[str, np.ndarray]:
    """The arrays of a model's folder, by name."""
    with np.load(folder / "batch.npz") as arrays:
        return dict(arrays)


def norm(array: np.ndarray) -> float:
    """The sum of squares, to compare results by."""
    return float(np.square(array.astype("float64")).sum())


def resident(name: str) -> int:
    """A number of /proc/self/status in bytes: VmRSS now, VmHWM the peak since it was reset."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


def measure(
    load: Callable[[], Callable[[], Any]],
    read: Callable[[Any], float],
    seconds: float,
    runtime: Iterable[Path],
    model: Iterable[Path],
) -> None:
    """Print what the steps take.

    Args:
        load: opens the model; it returns a step.
        read: the loss, or another number to compare, of what a step returns; it is not timed.
        seconds: of steps after the first, at the least.
        runtime, model: the files that a program needs of the library, and those of the model.
    """
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what imports have freed would be given to the model
    before = resident("VmRSS")
    begin = time.perf_counter()
    step = load()
    found = step()
    first = time.perf_counter() - begin
    losses = [read(found)]
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM: loading happens once
    times: list[float] = []
    while len(times) < LEAST or sum(times) < seconds:
        begin = time.perf_counter()
        found = step()
        times.append(time.perf_counter() - begin)
        losses.append(read(found))
    print(
        json.dumps(
            {
                "times": times,
                "first": first,
                "losses": losses[:COMPARED],
                "memory": resident("VmHWM") - before,
                "runtime": sum(path.stat().st_size for path in runtime),
                "model": sum(path.stat().st_size for path in model),
            }
        )
    )
