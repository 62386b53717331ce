# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at the most, measured: multiply-adds in registers, and a triad over memory.

Both are small generated kernels on all threads of TVM's pool, like those that they are the measure of.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.loops import Loops, load, make_parameter
from tvm_convgrad.kernels.target import Machine, machine_of

DTYPE = "float32"

STEPS = 40_000
"""Rounds of the peak's loop a work item: a tenth of a millisecond, so that some run is not disturbed."""

TRIAD_ELEMENTS = 1 << 25
"""Of each array of the triad: 128 MiB, more than caches hold."""


@dataclass(frozen=True)
class Roof:
    """The two limits.

    Attributes:
        gflops: multiply-adds, two FLOP each, on all threads.
        bandwidth: GB/s read and written, by a triad (allocation of written lines not counted) or a GPU's copy.
        threads: how many there were, of the CPU.
        machine: the instruction set, or the GPU's architecture.
        of: what was measured for `gflops`.
    """

    gflops: float
    bandwidth: float
    threads: int
    machine: str
    of: str = "FMA peak"

    def attainable(self, intensity: float) -> float:
        """GFLOP/s under the roof at so many FLOP a byte."""
        return min(self.gflops, intensity * self.bandwidth)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_roof(target: Any, threads: int, seconds: float = 1.0) -> Roof:
    """The limits of this machine; each is the best of as many runs as `seconds` allow.

    Raises:
        UnsupportedError: kernels are not made for the target.
    """
    import numpy as np
    import tvm

    machine = machine_of(target)
    if machine is None:
        raise UnsupportedError(f"bench: kernels are not made for {target}; use --target native on an x86 or ARM CPU")
    items = threads
    lanes = machine.lanes(DTYPE)
    sums = registers_of_sums(machine)
    factors = tvm.runtime.tensor(np.full(2 * lanes, 0.5, DTYPE))
    result = tvm.runtime.tensor(np.empty(items * sums * lanes, DTYPE))
    peak = tvm.compile(tvm.IRModule({"main": peak_kernel(machine, items)}), target)["main"]
    flop = 2 * lanes * sums * STEPS * items
    gflops = flop / best(lambda: peak(factors, result), seconds / 2) * 1e-9
    arrays = [tvm.runtime.tensor(np.ones(TRIAD_ELEMENTS, DTYPE)) for _ in range(3)]
    triad = tvm.compile(tvm.IRModule({"main": triad_kernel(machine, TRIAD_ELEMENTS, items)}), target)["main"]
    bandwidth = 3 * 4 * TRIAD_ELEMENTS / best(lambda: triad(*arrays), seconds / 2) * 1e-9
    return Roof(gflops, bandwidth, threads, machine.name)


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


def triad_kernel(machine: Machine, elements: int, items: int) -> Any:
    """c = a + first * b, with the first vector of a; (a, b, c).

    `elements` are whole vectors for each of `items` parallel items, or the last ones stay out.
    """
    lanes = machine.lanes(DTYPE)
    loops = Loops()
    parameters = [make_parameter(name, (elements,), DTYPE) for name in "abc"]
    a, b, c = parameters
    vectors = elements // lanes // items
    with loops.loop(items, "item", "parallel") as item, loops.loop(vectors, "v") as v:
        at = loops.let((item * vectors + v) * lanes, "at")
        loops.store(c, at, load(a, at, lanes) + load(a, 0, lanes) * load(b, at, lanes))
    return loops.finish(parameters, "main")


def best(call: Any, seconds: float) -> float:
    """Seconds of the fastest of some calls."""
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or least == float("inf"):
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least
