# SPDX-License-Identifier: Apache-2.0
"""Jitted training steps of JAX with the patch and without, in turns in one process that loads no TVM.

As a program (`python -m tvm_convgrad.bench.bridge_jax JSON`) this module measures one network and prints the
measurement. It imports JAX.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np

import tvm_convgrad.jax as bridge
from tvm_convgrad.bench.bridge import MIN_PAIRS, BridgeMeasurement, Request
from tvm_convgrad.bench.jax_networks import JAX_NETWORKS, Tape

RATE = 1e-3
WARM_STEPS = 2

Step = Callable[[list[jax.Array]], list[jax.Array]]


def _step(request: Request) -> tuple[Step, list[jax.Array]]:
    """A step of stochastic gradient descent as a function of the parameters, and these."""
    network, extent = JAX_NETWORKS[request.model]
    generator = np.random.default_rng(0)
    shape = (request.batch, extent, extent, 3) if request.layout == "NHWC" else (request.batch, 3, extent, extent)
    x = jnp.asarray(generator.standard_normal(shape), "float32")
    labels = jnp.asarray(generator.integers(0, 10, request.batch))
    tape = Tape(request.layout)
    jax.eval_shape(lambda images: network(tape, images), x)  # makes the parameters

    def loss(parameters: list[jax.Array], x: jax.Array) -> jax.Array:
        logits = network(Tape(request.layout, iter(parameters)), x)
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], 1).mean()

    @jax.jit
    def step(parameters: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        gradients = jax.grad(loss)(parameters, x)
        return [each - RATE * change for each, change in zip(parameters, gradients, strict=True)]

    return lambda parameters: step(parameters, x), [jnp.asarray(each) for each in tape.made]


def _seconds(step: Step, parameters: list[jax.Array]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(step(parameters))
    return time.perf_counter() - begin


def _measure(request: Request) -> BridgeMeasurement:
    """In a process of its own: pairs of steps, with the patch and without."""
    step, parameters = _step(request)
    own = _compiled(step, parameters)
    begin = time.perf_counter()
    with bridge.patch(folder=Path(request.folder)):
        kernels = _compiled(step, parameters)
    warm = time.perf_counter() - begin
    pairs: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(pairs) < MIN_PAIRS or time.perf_counter() - begin < request.seconds:
        pairs.append((_seconds(kernels, parameters), _seconds(own, parameters)))
    where = [told.where for told in bridge.explain()]
    return BridgeMeasurement(
        model=request.model,
        batch=request.batch,
        layout=request.layout,
        with_bridge=median(ours for ours, _ in pairs),
        without=median(theirs for _, theirs in pairs),
        ratio=median(theirs / ours for ours, theirs in pairs),
        pairs=len(pairs),
        compile_seconds=warm,
        compiled=bridge.stats().compiled,
        kernels=where.count("kernel"),
        mixed=0,
        own=where.count("XLA"),
    )


def _compiled(step: Step, parameters: list[jax.Array]) -> Step:
    """The program of a step as it is patched now, warm."""
    program = jax.jit(step).lower(parameters).compile()
    for _ in range(WARM_STEPS):
        jax.block_until_ready(program(parameters))
    return program


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Request(**json.loads(sys.argv[1]))))))
