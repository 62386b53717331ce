# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at the most, measured: multiply-adds in registers, and a triad over memory.

Both are small generated kernels on all threads of TVM's pool, like those that they are the measure of.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from tvm_convgrad.bench.peak import DTYPE, Peak, best
from tvm_convgrad.kernels.loops import Loops, load, make_parameter
from tvm_convgrad.kernels.target import Machine

TRIAD_ELEMENTS = 1 << 25
"""Of each array of the triad: 128 MiB, more than caches hold."""


@dataclass(frozen=True)
class Roof:
    """The two limits.

    Attributes:
        gflops: multiply-adds, two FLOP each, on all threads; the best of the runs at the start of a bench.
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

    def at(self, gflops: float | None) -> Roof:
        """The roof while a layer was measured, in whose turns the peak was `gflops`; itself where that is None."""
        return self if gflops is None else replace(self, gflops=gflops)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure_roof(peak: Peak, seconds: float = 1.0) -> Roof:
    """The limits of the machine that `peak` is compiled for; each is the best of as many runs as `seconds` allow."""
    import numpy as np
    import tvm

    gflops = peak.burst(seconds / 2)
    arrays = [tvm.runtime.tensor(np.ones(TRIAD_ELEMENTS, DTYPE)) for _ in range(3)]
    kernel = triad_kernel(peak.machine, TRIAD_ELEMENTS, peak.threads)
    triad = tvm.compile(tvm.IRModule({"main": kernel}), peak.target)["main"]
    bandwidth = 3 * 4 * TRIAD_ELEMENTS / best(lambda: triad(*arrays), seconds / 2) * 1e-9
    return Roof(gflops, bandwidth, peak.threads, peak.machine.name)


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
