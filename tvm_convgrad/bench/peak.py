# SPDX-License-Identifier: Apache-2.0
"""The arithmetic peak of this machine's cores, by a generated kernel that works in registers on all threads.

It does multiply-adds of float32, or what the CPU has for layers of 16 bits: dot products, or products of tiles (AMX).

The rate depends on the clock of the cores, which changes by a tenth and more within seconds: the best run of a second
is that of a burst. So the kernel also has a turn in each pair of a measurement (`Peak.turn`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import tvm

from tvm_convgrad.codegen import tile_product
from tvm_convgrad.codegen.dot_product import dot_product
from tvm_convgrad.codegen.hardware import Machine, machine_of
from tvm_convgrad.codegen.loops import Loops, load, make_parameter
from tvm_convgrad.codegen.tile_product import INSTRUCTIONS, ROWS, WORDS
from tvm_convgrad.core.cpu_features import tile_refusal
from tvm_convgrad.core.errors import UnsupportedError

DTYPE = "float32"

HALVES = float(np.array([0.5, 0.5], ml_dtypes.bfloat16).view(DTYPE)[0])
"""The word of two bfloat16 that are 0.5, as the float32 of the same bits."""

FMA_PEAK, DOT_PEAK, TILE_PEAK = "FMA peak", "bfloat16 dot product peak", "tile product peak"
"""What is measured."""

STEPS = 400_000
"""Iterations of the loop of a work item: about a millisecond, of which starting the threads is a small part."""

TILE_STEPS, TILE_SUMS = 40_000, 4
"""The same where a step is TILE_SUMS products of tiles, each of which takes 16 cycles."""

TURN = 0.005
"""Seconds of a turn beside layers, at the least: a few runs."""


class Peak:
    """The compiled kernel of multiply-adds, of dot products, or of products of tiles.

    Attributes:
        of: FMA_PEAK, DOT_PEAK or TILE_PEAK.
        target: the TVM target that it is compiled for.
        machine: the instruction set of the target.
        threads: threads of TVM's pool.
        flop: FLOP of a run; a multiply-add is two, a dot product of pairs four a lane, a product of tiles as many as
            ROWS x WORDS dot products.
    """

    def __init__(self, target: tvm.target.Target, threads: int, dtype: str = DTYPE) -> None:
        """Compile the kernel for a target and a number of threads.

        Args:
            target: an x86 or ARM CPU.
            threads: the number of work items.
            dtype: of the layers. It decides what is measured: products of tiles if the process may use them, dot
                products if they do more than multiply-adds, else those, for which operands are converted to float32.

        Raises:
            UnsupportedError: kernels are not made for the target.
        """
        machine = machine_of(target)
        if machine is None:
            raise UnsupportedError(
                f"bench: kernels are not made for {target}; use --target native on an x86 or ARM CPU"
            )
        self.target, self.machine, self.threads = target, machine, threads
        lanes = machine.lanes(DTYPE)
        sums = threads * registers_of_sums(machine) * lanes
        dots = dtype in machine.dots and machine.gains_by_dots
        if dtype in machine.tiles and not tile_refusal(INSTRUCTIONS[dtype]):
            self.of, sums = TILE_PEAK, threads * ROWS * WORDS
            self.flop = 4 * TILE_SUMS * WORDS * sums * TILE_STEPS
            self._factors = tvm.runtime.tensor(np.full(ROWS * WORDS, HALVES, DTYPE))
            self._sums = tvm.runtime.tensor(np.empty(sums, DTYPE))
            self._kernel = _loaded(tile_peak_kernel(threads, dtype), target)
            return
        self.of = DOT_PEAK if dots else FMA_PEAK
        self.flop = (4 if dots else 2) * sums * STEPS
        self._factors = tvm.runtime.tensor(np.full(2 * lanes, HALVES if dots else 0.5, DTYPE))
        self._sums = tvm.runtime.tensor(np.empty(sums, DTYPE))
        self._kernel = _loaded(peak_kernel(machine, threads, dots=dots), target)

    def run(self) -> None:
        """One run, of `flop`."""
        self._kernel(self._factors, self._sums)

    def burst(self, seconds: float) -> float:
        """GFLOP/s of the best of as many runs as `seconds` allow."""
        return self.flop / best(self.run, seconds) * 1e-9

    def turn(self) -> float:
        """GFLOP/s of a few runs in a row, all of which are counted.

        Call it behind a kernel that ran on TVM's pool, whose threads are still awake.
        """
        runs, begin, elapsed = 0, time.perf_counter(), 0.0
        while elapsed < TURN:
            self.run()
            runs += 1
            elapsed = time.perf_counter() - begin
        return self.flop * runs / elapsed * 1e-9


def registers_of_sums(machine: Machine) -> int:
    """How many vectors are summed independently: more than latency (4 cycles) times units (2); all fit in registers."""
    return min(24, machine.registers - 4)


def peak_kernel(machine: Machine, items: int, *, dots: bool = False) -> tvm.tirx.PrimFunc:
    """The PrimFunc of sum = sum * a + b, STEPS times in each of `items` parallel items; parameters (factors, sums).

    The factor multiplies the sum: LLVM would move a product of two constants out of the loop and leave an addition.
    With `dots` it is sum = sum + the dot products of the words of a and b, an intrinsic that LLVM does not take apart.
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
                total = load(register, 0, lanes)
                loops.store(register, 0, dot_product(loops, total, a, b) if dots else total * a + b)
        for i, register in enumerate(registers):
            loops.store(result, (item * count + i) * lanes, load(register, 0, lanes))
    return loops.finish([factors, result], "main")


def tile_peak_kernel(items: int, dtype: str, steps: int = TILE_STEPS) -> tvm.tirx.PrimFunc:
    """The PrimFunc of products of tiles of `dtype` in registers; parameters (factors, sums).

    Each of `items` parallel items adds `steps` times the product of a tile of the factors with itself to each of
    TILE_SUMS tiles of zeros, and stores the last of them.
    """
    loops = Loops()
    tile = ROWS * WORDS
    factors = make_parameter("factors", (tile,), DTYPE)
    result = make_parameter("sums", (items * tile,), DTYPE)
    with loops.loop(items, "item", "parallel") as item:
        tile_product.configure(loops, [(ROWS, WORDS)] * (TILE_SUMS + 2))
        for register in range(TILE_SUMS):
            tile_product.clear(loops, register)
        for register in (TILE_SUMS, TILE_SUMS + 1):
            tile_product.load_tile(loops, register, factors, 0, WORDS)
        with loops.loop(steps, "step"):
            for register in range(TILE_SUMS):
                tile_product.add_product(loops, register, TILE_SUMS, TILE_SUMS + 1, dtype)
        tile_product.store_tile(loops, TILE_SUMS - 1, result, item * tile, WORDS)
        tile_product.release(loops)
    return loops.finish([factors, result], "main")


def _loaded(function: tvm.tirx.PrimFunc, target: tvm.target.Target) -> Callable[..., object]:
    return tvm.compile(tvm.IRModule({"main": function}), target)["main"]


def best(call: Callable[[], object], seconds: float) -> float:
    """Seconds of the fastest of as many calls as `seconds` allow; a first call is not counted."""
    call()
    least, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end or least == float("inf"):
        start = time.perf_counter()
        call()
        least = min(least, time.perf_counter() - start)
    return least


__all__ = [
    "DOT_PEAK",
    "DTYPE",
    "FMA_PEAK",
    "TILE_PEAK",
    "Peak",
    "best",
    "peak_kernel",
    "registers_of_sums",
    "tile_peak_kernel",
]
