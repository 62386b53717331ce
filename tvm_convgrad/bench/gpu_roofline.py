# SPDX-License-Identifier: Apache-2.0
"""The roofline of this machine's GPU, measured: a large matrix product by the vendor library, and a copy."""

from __future__ import annotations

import tvm

from tvm_convgrad.bench.configuration import Configuration
from tvm_convgrad.bench.peak import best
from tvm_convgrad.bench.roofline import Roofline
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.measure.program import random_operands, tvm_call

GEMM = "mb4ic4096ih32oc4096kh1_lay=NHWC:OHWI:NHWC"
"""A pointwise convolution: the product of two matrices of 4096 x 4096."""

COPIED = 1 << 28
"""Bytes of the copy: more than the caches of any GPU hold."""

_IN_A_ROW = 10


def measure_gpu_roofline(config: Configuration, seconds: float = 1.0) -> Roofline:
    """The limits of the GPU for the configuration's type; each is the best of as many runs as `seconds` allow.

    The matrix product is the library's own: `gflops` is what the library reaches in the best case, not what the data
    sheet states.

    Raises:
        UnsupportedError, SetupError: the library refuses the product, or is not installed.
    """
    problem = ConvProblem.from_descriptor(GEMM).with_dtypes(config.dtype, config.dtype, config.dtype)
    call = tvm_call("forward", problem, random_operands("forward", problem), config.target, config.impl)
    device = config.device

    def product() -> None:
        for _ in range(_IN_A_ROW):
            call.run()
        device.sync()

    source, copy = (tvm.runtime.empty((COPIED,), "uint8", device) for _ in range(2))

    def copied() -> None:
        for _ in range(_IN_A_ROW):
            source.copyto(copy)
        device.sync()

    return Roofline(
        gflops=2e-9 * problem.macs * _IN_A_ROW / best(product, seconds / 2),
        bandwidth=2e-9 * COPIED * _IN_A_ROW / best(copied, seconds / 2),
        threads=1,
        machine=str(config.target.attrs["arch"]),
        of=f"matrix product ({config.numbers})",
    )


__all__ = ["measure_gpu_roofline"]
