# SPDX-License-Identifier: Apache-2.0
"""A small layer, and limits of a machine that need not be measured, for tests of the bench of layers."""

from __future__ import annotations

from tvm_convgrad.bench.roofline import Roofline

SMALL = "mb1ic4ih6oc8oh6kh3ph1"
ROOFLINE = Roofline(gflops=100.0, bandwidth=10.0, threads=2, machine="AVX2")
