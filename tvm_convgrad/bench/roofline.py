# SPDX-License-Identifier: Apache-2.0
"""The roofline of this machine's CPU, measured: the FMA peak, and the bandwidth of memory by a triad.

Both are small generated kernels on all threads of TVM's pool, as the kernels that are compared with them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import tvm

from tvm_convgrad.bench.peak import DTYPE, Peak, best
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.codegen.loops import Loops, load, make_parameter

TRIAD_ELEMENTS = 1 << 25
"""Elements of each array of the triad: 128 MiB, more than caches hold."""


@dataclass(frozen=True)
class Roofline:
    """The two limits of the roofline model.

    Attributes:
        gflops: the arithmetic peak in GFLOP/s, a multiply-add being two FLOP, on all threads: the best run at the start
            of a bench.
        bandwidth: GB/s read and written, by a triad (allocation of written lines not counted) or a GPU's copy.
        threads: threads of the CPU that were used.
        machine: the instruction set, or the GPU's architecture.
        of: what was measured for `gflops`.
    """

    gflops: float
    bandwidth: float
    threads: int
    machine: str
    of: str = "FMA peak"

    def attainable(self, intensity: float) -> float:
        """The greatest GFLOP/s at an arithmetic intensity, in FLOP a byte."""
        return min(self.gflops, intensity * self.bandwidth)

    def with_peak(self, gflops: float | None) -> Roofline:
        """The roofline with another arithmetic peak: that measured beside a layer; itself if that is None."""
        return self if gflops is None else replace(self, gflops=gflops)


def measure_roofline(peak: Peak, seconds: float = 1.0) -> Roofline:
    """The limits of the machine that `peak` is compiled for; each is the best of as many runs as `seconds` allow."""
    gflops = peak.burst(seconds / 2)
    arrays = [tvm.runtime.tensor(np.ones(TRIAD_ELEMENTS, DTYPE)) for _ in range(3)]
    kernel = triad_kernel(peak.machine, TRIAD_ELEMENTS, peak.threads)
    triad = tvm.compile(tvm.IRModule({"main": kernel}), peak.target)["main"]
    bandwidth = 3 * 4 * TRIAD_ELEMENTS / best(lambda: triad(*arrays), seconds / 2) * 1e-9
    return Roofline(gflops, bandwidth, peak.threads, peak.machine.name, peak.of)


def triad_kernel(machine: Machine, elements: int, items: int) -> tvm.tirx.PrimFunc:
    """The PrimFunc of c = a + first * b, where `first` is the first vector of a; parameters (a, b, c).

    Args:
        machine: whose vectors are used.
        elements: of each array; what does not fill whole vectors for each item is left out.
        items: iterations of the parallel loop.
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
