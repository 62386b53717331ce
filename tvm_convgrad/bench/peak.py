# SPDX-License-Identifier: Apache-2.0
"""The FMA peak of this machine's cores: a generated kernel that does multiply-adds in registers, on all threads.

What it reaches depends on the clock that the machine holds, which changes by a tenth and more within seconds: the best
run of a second is that of a burst. So it also takes turns with what it is the measure of.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.loops import Loops, load, make_parameter
from tvm_convgrad.kernels.target import Machine, machine_of

DTYPE = "float32"

STEPS = 400_000
"""Rounds of the loop a work item: about a millisecond, of which starting the threads is a small part."""

TURN = 0.005
"""Seconds of a turn beside layers, at the least: a few runs."""


class Peak:
    """The kernel, compiled.

    Attributes:
        target: TVM's, that it is compiled for; machine: what it is; threads: how many there are of TVM's pool.
        flop: of a run; a multiply-add is two.
    """

    def __init__(self, target: Any, threads: int) -> None:
        """Compile it.

        Raises:
            UnsupportedError: kernels are not made for the target.
        """
        import numpy as np
        import tvm

        machine = machine_of(target)
        if machine is None:
            raise UnsupportedError(
                f"bench: kernels are not made for {target}; use --target native on an x86 or ARM CPU"
            )
        self.target, self.machine, self.threads = target, machine, threads
        lanes = machine.lanes(DTYPE)
        sums = threads * registers_of_sums(machine) * lanes
        self.flop = 2 * sums * STEPS
        self._factors = tvm.runtime.tensor(np.full(2 * lanes, 0.5, DTYPE))
        self._sums = tvm.runtime.tensor(np.empty(sums, DTYPE))
        self._kernel = tvm.compile(tvm.IRModule({"main": peak_kernel(machine, threads)}), target)["main"]

    def run(self) -> None:
        """Once, of `flop`."""
        self._kernel(self._factors, self._sums)

    def burst(self, seconds: float) -> float:
        """GFLOP/s of the best of as many runs as `seconds` allow."""
        return self.flop / best(self.run, seconds) * 1e-9

    def turn(self) -> float:
        """GFLOP/s of a few runs in a row.

        Nothing is let go uncounted before: to be called behind a kernel of TVM's own pool, whose threads it has.
        """
        runs, begin, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < TURN:
            self.run()
            runs += 1
            elapsed = time.perf_counter() - begin
        return self.flop * runs / elapsed * 1e-9


def registers_of_sums(machine: Machine) -> int:
    """Independent sums: more than latency (4 cycles) times units (2), and few enough for registers."""
    return min(24, machine.registers - 4)


def peak_kernel(machine: Machine, items: int) -> Any:
    """sum = sum * a + b, STEPS times in each of `items` parallel items; (factors, sums).

    The factor stands with the sum, as LLVM would take a product of two constants out of the loop and leave an addition.
    """
    lanes, count = machine.lanes(DTYPE), registers_of_sums(machine)
    loops = Loops()
    factors = make_parameter("factors", (2 * lanes,), DTYPE)
    result = make_parameter("sums", (items * count * lanes,), DTYPE)
    with loops.loop(items, "item", "parallel") as item:
        a, b = (loops.let(load(factors, i * lanes, lanes), name) for i, name in enumerate("ab"))
        registers = [loops.buffer("sum", lanes, DTYPE) for _ in range(count)]
        for register in registers:
            loops.store(register, 0, b)
        with loops.loop(STEPS, "step"):
            for register in registers:
                loops.store(register, 0, load(register, 0, lanes) * a + b)
        for i, register in enumerate(registers):
            loops.store(result, (item * count + i) * lanes, load(register, 0, lanes))
    return loops.finish([factors, result], "main")


def best(call: Callable[[], Any], seconds: float) -> float:
    """Seconds of the fastest of some calls."""
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or least == float("inf"):
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least


__all__ = ["DTYPE", "Peak", "best", "peak_kernel", "registers_of_sums"]
