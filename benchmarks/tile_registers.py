# SPDX-License-Identifier: Apache-2.0
"""How fast products of tiles (AMX) are by the number of tile registers that hold values, with operands in the L1.

Each row is a grid of tiles of sums: the registers that it takes, and GFLOP/s of one thread over slices of 2 ms (least,
quartiles, most). "apart" has a register for each operand, as kernels had before 2026-11-27. On an Emerald Rapids fewer
registers were faster at times, presumably while the other thread of the core ran: run it alone, and beside other work.

    python -m benchmarks.tile_registers
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import quantiles

import numpy as np
import tvm

from tvm_convgrad.codegen import tile_product
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.codegen.loops import Loops, make_parameter
from tvm_convgrad.codegen.tile_product import REGISTERS, ROWS, WORDS, TileGrid
from tvm_convgrad.core.cpu_features import tile_refusal
from tvm_convgrad.report.tables import print_table
from tvm_convgrad.threads import use_threads

GRIDS = ((1, 1), (1, 2), (2, 1), (1, 3), (3, 1), (2, 2), (4, 1), (1, 4))
STEPS, SLICE = 2000, 0.002
TILE = ROWS * WORDS


class Apart(TileGrid):
    """A grid with a register for each operand of a step."""

    @property
    def count(self) -> int:
        """The registers that it takes."""
        return self.pieces * self.columns + self.pieces + self.columns

    def shapes(self, rows: int, words: int) -> list[tuple[int, int]]:
        """All are whole tiles."""
        return [(rows, words)] * self.count

    def add_products(
        self, loops: Loops, load_a: Callable[[int, int], None], load_b: Callable[[int, int], None], dtype: str
    ) -> None:
        """Load all operands, then multiply."""
        first = self.pieces * self.columns
        a, b = range(first, first + self.pieces), range(first + self.pieces, self.count)
        for number, register in enumerate(a):
            load_a(register, number)
        for number, register in enumerate(b):
            load_b(register, number)
        for i, piece in enumerate(a):
            for j, column in enumerate(b):
                tile_product.add_product(loops, self.sums[i][j], piece, column, dtype)


def kernel(grid: TileGrid) -> tvm.tirx.PrimFunc:
    """STEPS steps of a grid; parameters (operands of A, operands of B, sums)."""
    loops = Loops()
    a = make_parameter("a", (grid.pieces * TILE,), "float32")
    b = make_parameter("b", (grid.columns * TILE,), "float32")
    sums = make_parameter("sums", (TILE,), "float32")
    tile_product.configure(loops, grid.shapes(ROWS, WORDS))
    for row in grid.sums:
        for register in row:
            tile_product.clear(loops, register)
    with loops.loop(STEPS, "step"):
        grid.add_products(
            loops,
            lambda register, piece: tile_product.load_tile(loops, register, a, piece * TILE, WORDS),
            lambda register, column: tile_product.load_tile(loops, register, b, column * TILE, WORDS),
            "bfloat16",
        )
    tile_product.store_tile(loops, 0, sums, 0, WORDS)
    tile_product.release(loops)
    return loops.finish([a, b, sums], "main")


def rates(grid: TileGrid, seconds: float) -> list[float]:
    """GFLOP/s of slices."""
    run = tvm.compile(tvm.IRModule({"main": kernel(grid)}), native_target())["main"]
    sizes = (grid.pieces * TILE, grid.columns * TILE, TILE)
    tensors = [tvm.runtime.tensor(np.zeros(size, "float32")) for size in sizes]
    flop, found, end = grid.pieces * grid.columns * STEPS * 4 * TILE * WORDS, [], time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin, runs = time.perf_counter(), 0
        while time.perf_counter() - begin < SLICE:
            run(*tensors)
            runs += 1
        found.append(runs * flop / (time.perf_counter() - begin) * 1e-9)
    return sorted(found)


def main() -> None:
    """Measure all grids and print the table."""
    parser = argparse.ArgumentParser(description="products of tiles by the registers that hold values")
    parser.add_argument("--seconds", type=float, default=0.5, help="of each grid")
    options = parser.parse_args()
    if reason := tile_refusal():
        raise SystemExit(f"tile_registers: {reason}; run it on a CPU with AMX.")
    use_threads(1)
    rows = []
    for pieces, columns in GRIDS:
        for kind, made in (("", TileGrid), ("apart", Apart)):
            grid = made(pieces, columns)
            if grid.count > REGISTERS or (kind and grid.count == TileGrid(pieces, columns).count):
                continue
            found = rates(grid, options.seconds)
            shown = (found[0], *quantiles(found, n=4), found[-1])
            rows.append((f"{pieces} x {columns} {kind}", grid.count, *(f"{rate:.0f}" for rate in shown)))
    columns = ("sums", "registers", "least", "25 %", "median", "75 %", "most")
    print_table("GFLOP/s of products of tiles, one thread", columns, rows, right=columns[1:])


if __name__ == "__main__":
    main()
