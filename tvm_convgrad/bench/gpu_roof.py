# SPDX-License-Identifier: Apache-2.0
"""What the GPU of this machine does at the most, measured: a large matrix product by the library, and a copy."""

from __future__ import annotations

from tvm_convgrad.bench.ours import random_operands, tvm_call
from tvm_convgrad.bench.peak import best
from tvm_convgrad.bench.place import Place
from tvm_convgrad.bench.roof import Roof
from tvm_convgrad.problem import ConvProblem

GEMM = "mb4ic4096ih32oc4096kh1_lay=NHWC:OHWI:NHWC"
"""A pointwise convolution: the product of two matrices of 4096 x 4096."""

COPIED = 1 << 28
"""Bytes of the copy: more than the caches of any GPU hold."""

_IN_A_ROW = 10


def measure_gpu_roof(place: Place, seconds: float = 1.0) -> Roof:
    """The limits of the place's GPU for its type; each is the best of as many runs as `seconds` allow.

    The matrix product is the library's own, so that it is what the library reaches where all goes well, not what the
    data sheet says.

    Raises:
        UnsupportedError, SetupError: the library refuses the product, or is not installed.
    """
    import tvm

    problem = ConvProblem.from_descriptor(GEMM).with_dtypes(place.dtype, place.dtype, place.dtype)
    call = tvm_call("forward", problem, random_operands("forward", problem), place, place.impl)
    device = place.device

    def product() -> None:
        for _ in range(_IN_A_ROW):
            call.run()
        device.sync()

    source, copy = (tvm.runtime.empty((COPIED,), "uint8", device) for _ in range(2))

    def copied() -> None:
        for _ in range(_IN_A_ROW):
            source.copyto(copy)
        device.sync()

    return Roof(
        gflops=2e-9 * problem.macs * _IN_A_ROW / best(product, seconds / 2),
        bandwidth=2e-9 * COPIED * _IN_A_ROW / best(copied, seconds / 2),
        threads=1,
        machine=str(place.target.attrs["arch"]),
        of=f"matrix product ({place.numbers})",
    )


__all__ = ["measure_gpu_roof"]
