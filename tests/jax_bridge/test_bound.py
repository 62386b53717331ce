# SPDX-License-Identifier: Apache-2.0
"""The bound of benchmarks/bridge_bound under JAX: only convolutions, or their gradients, become custom calls."""

from __future__ import annotations

import pytest

jax = pytest.importorskip("jax")
jax_steps = pytest.importorskip("benchmarks.bridge_bound.jax_steps")

from jax.interpreters import mlir  # noqa: E402

from tvm_convgrad.bench.bridge import Request  # noqa: E402
from tvm_convgrad.jax import lowering  # noqa: E402


def test_zeros_take_the_place_of_convolutions() -> None:
    """Of two layers there are two convolutions, the gradients of both weights, and that of one layer's data."""
    jax_steps._register()
    step, parameters = jax_steps.training_step(Request("small", 2, "NCHW", 0.0, 1, ""))
    try:
        texts = [jax_steps._program(step, parameters, forward).as_text() for forward in (False, True)]
    finally:
        mlir.register_lowering(lowering.convolution_p, lowering._lower_cpu, platform="cpu")
        jax.clear_caches()
    calls = [text.count('custom_call_target="convgrad_zeros"') for text in texts]
    assert calls == [3, 5]
    assert [" convolution(" in text for text in texts] == [True, False]
