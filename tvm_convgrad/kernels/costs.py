# SPDX-License-Identifier: Apache-2.0
"""The cycles of the steps that all GEMM-like kernels have, in one table with a row for each kernel.

They were fitted on an AVX-512 machine, each row on measurements of that kernel's own loops. That is why values of one
column differ: wgrad loads its panel from the first-level cache more often than forward loads its source. Cycles of a
step that only one kernel has are in the `plan.py` of that kernel, and what the hardware has, such as caches and rates,
is in `codegen.hardware.Machine`.
"""

from __future__ import annotations

from dataclasses import dataclass

OVERLAP = 0.2
"""The share of the shorter of two times, of arithmetic and of memory, that the longer one does not hide."""


@dataclass(frozen=True)
class Costs:
    """Cycles of one core.

    Attributes:
        load: cycles of a step of the reduction for each vector or broadcast that it loads.
        step: cycles of a step besides its multiply-adds and loads.
        tile: cycles to clear a register tile, and to enter and leave its loops.
        store: cycles to store an accumulator, or to add it to a sum in the core's own cache.
        copy: cycles to pack an element whose vectors are contiguous in memory.
        transpose: cycles to pack an element by squares that are transposed in registers.
        scalar: cycles to pack an element by itself.
    """

    load: float
    step: float
    tile: float
    store: float
    copy: float
    transpose: float
    scalar: float


GEMM = Costs(load=0.62, step=0.3, tile=30.0, store=1.5, copy=0.3, transpose=1.15, scalar=1.5)
WGRAD = Costs(load=0.55, step=0.0, tile=40.0, store=2.5, copy=0.15, transpose=0.3, scalar=2.0)
WINOGRAD = Costs(load=0.6, step=0.6, tile=40.0, store=1.0, copy=0.3, transpose=1.2, scalar=1.5)


def overlapped(arithmetic: float, memory: float) -> float:
    """The time of arithmetic and memory together: the longer hides most of the shorter. Both have one unit."""
    return max(arithmetic, memory) + OVERLAP * min(arithmetic, memory)


__all__ = ["GEMM", "WGRAD", "WINOGRAD", "Costs", "overlapped"]
