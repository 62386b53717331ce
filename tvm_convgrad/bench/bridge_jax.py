# SPDX-License-Identifier: Apache-2.0
"""Jitted training steps of JAX with the patch and without, in turns in one process that loads no TVM.

As a program (`python -m tvm_convgrad.bench.bridge_jax JSON`) this module measures one network and prints the
measurement. It imports JAX.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import tvm_convgrad.jax as bridge
from tvm_convgrad.bench.bridge import BridgeMeasurement, Request
from tvm_convgrad.bench.bridge_calls import CallMeasurement
from tvm_convgrad.bench.bridge_pairs import CALL_PAIRS, Pairs, in_turns
from tvm_convgrad.bench.jax_networks import JAX_NETWORKS, Tape
from tvm_convgrad.jax.choice import CHOICES, contenders
from tvm_convgrad.jax.lowering import own as own_call

RATE = 1e-3
WARM_STEPS = 2

Step = Callable[[list[jax.Array]], list[jax.Array]]


def training_step(request: Request) -> tuple[Step, list[jax.Array]]:
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


def _measure(request: Request) -> BridgeMeasurement:
    """In a process of its own: pairs of steps, with the patch and without."""
    step, parameters = training_step(request)
    patched = partial(bridge.patch, folder=Path(request.folder))
    own = compiled_step(step, parameters)
    begin = time.perf_counter()
    with patched():
        kernels = compiled_step(step, parameters)
    warm = time.perf_counter() - begin
    told, chosen = bridge.explain(), dict(CHOICES.made)
    pairs = in_turns(
        lambda: jax.block_until_ready(kernels(parameters)),
        lambda: jax.block_until_ready(own(parameters)),
        request.seconds,
    )
    calls = []
    if request.calls:
        with patched(always=True):
            uses = Counter(_KERNEL.findall(_program(step, parameters).as_text()))
        for (call, _), choice in chosen.items():
            if choice.found is None:
                continue
            times = in_turns(*contenders(call, choice.found, partial(own_call, call=call)), 0.0, least=CALL_PAIRS)
            if choice.kernel is None:  # the same program in both
                times = Pairs(times.without, times.without)
            count, flop = uses[choice.found.job.key], 2 * call.problem.macs
            calls.append(CallMeasurement.of(choice.call, count, choice.where, flop, times))
    return BridgeMeasurement.of(
        request,
        pairs,
        compile_seconds=warm,
        compiled=bridge.stats().compiled,
        where=[each.where for each in told],
        calls=calls,
    )


_KERNEL = re.compile(r'kernel = "(\w+)"')
"""The key of a kernel in the text of a compiled program."""


def _program(step: Step, parameters: list[jax.Array]) -> jax.stages.Compiled:
    """The program of a step as it is patched now."""
    return jax.jit(step).lower(parameters).compile()


def compiled_step(step: Step, parameters: list[jax.Array]) -> Step:
    """The program of a step as it is patched now, warm."""
    program = _program(step, parameters)
    for _ in range(WARM_STEPS):
        jax.block_until_ready(program(parameters))
    return program


if __name__ == "__main__":
    print(json.dumps(asdict(_measure(Request(**json.loads(sys.argv[1]))))))
