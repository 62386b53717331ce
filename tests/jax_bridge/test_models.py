# SPDX-License-Identifier: Apache-2.0
"""Models of Flax and Equinox train with kernels as without them, and the example reaches its accuracy."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

jax = pytest.importorskip("jax")
bridge = pytest.importorskip("tvm_convgrad.jax")

import jax.numpy as jnp  # noqa: E402

ROOT = Path(__file__).parents[2]
STEPS, RATE = 4, 0.05


def images() -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).standard_normal((4, 8, 8, 3)), "float32")


def losses(parameters: object, loss: Callable[[object], jax.Array]) -> list[float]:
    """Of some steps of gradient descent."""
    step = jax.jit(jax.value_and_grad(loss))
    found = []
    for _ in range(STEPS):
        value, gradients = step(parameters)
        parameters = jax.tree.map(lambda p, g: p - RATE * g, parameters, gradients)
        found.append(float(value))
    return found


def of_linen() -> list[float]:
    nn = pytest.importorskip("flax.linen")

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3), strides=(2, 2))(x))
            return nn.ConvTranspose(3, (2, 2), strides=(2, 2))(x)

    x = images()
    model = Model()
    return losses(model.init(jax.random.key(0), x), lambda each: (model.apply(each, x) ** 2).mean())


def of_nnx() -> list[float]:
    """Its layers hold JAX's function as a default argument, since before the patch."""
    nnx = pytest.importorskip("flax.nnx")
    rngs, x = nnx.Rngs(0), images()
    layers = nnx.List(
        [nnx.Conv(3, 8, (3, 3), rngs=rngs), nnx.BatchNorm(8, rngs=rngs), nnx.Conv(8, 4, (1, 1), rngs=rngs)]
    )
    graph, parameters, rest = nnx.split(layers, nnx.Param, ...)

    def loss(each):
        first, norm, last = nnx.merge(graph, each, rest, copy=True)
        return (last(nnx.relu(norm(first(x)))) ** 2).mean()

    return losses(parameters, loss)


def of_equinox() -> list[float]:
    nn = pytest.importorskip("equinox").nn
    keys = jax.random.split(jax.random.key(0), 3)
    model = [
        nn.Conv2d(3, 8, 3, padding="SAME", key=keys[0]),
        nn.Conv2d(8, 8, 3, stride=2, padding=1, groups=4, key=keys[1]),
        nn.ConvTranspose2d(8, 3, 4, stride=2, padding=1, key=keys[2]),
    ]
    x = images().transpose(0, 3, 1, 2)
    arrays, rest = pytest.importorskip("equinox").partition(model, pytest.importorskip("equinox").is_array)

    def loss(each):
        layers = pytest.importorskip("equinox").combine(each, rest)

        def forward(image):
            for layer in layers:
                image = jax.nn.tanh(layer(image))
            return image

        return (jax.vmap(forward)(x) ** 2).mean()

    return losses(arrays, loss)


@pytest.mark.parametrize("train", [of_linen, of_nnx, of_equinox])
def test_losses_are_those_without_kernels(train: Callable[[], list[float]], store: Path) -> None:
    """Sums in another order differ by rounding: some steps of it stay within a thousand units in the last place."""
    wanted = train()
    before = bridge.stats()
    with bridge.patch(always=True, folder=store):
        found = train()
    after = bridge.stats()
    assert after.kernel_calls > before.kernel_calls
    assert after.xla == before.xla, bridge.explain()[-4:]
    assert wanted[-1] < wanted[0]
    np.testing.assert_allclose(found, wanted, rtol=1000 * 2.0**-23)


def ensemble_losses() -> list[float]:
    """Three deep models at once: their layers scanned and recomputed, gradients summed over parts of a batch."""
    generator = np.random.default_rng(0)
    weights = jnp.asarray(0.1 * generator.standard_normal((3, 4, 3, 3, 8, 8)), "float32")
    parts = jnp.asarray(generator.standard_normal((2, 2, 6, 7, 8)), "float32")

    def loss(weights, x):
        def layer(x, weight):
            y = jax.lax.conv_general_dilated(
                x, weight, (1, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            return x + jnp.tanh(y), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    def one(weights):
        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss)(weights, x)), None

        value, gradient = jax.lax.scan(add, (jnp.zeros(()), jnp.zeros_like(weights)), parts)[0]
        return value, weights - RATE * gradient

    step = jax.jit(jax.vmap(one), donate_argnums=0)
    found = []
    for _ in range(STEPS):
        values, weights = step(weights)
        found += values.tolist()
    return found


def test_an_ensemble_trains_with_scan_and_checkpoint(store: Path) -> None:
    wanted = ensemble_losses()
    before = bridge.stats()
    with bridge.patch(always=True, folder=store):
        found = ensemble_losses()
    after = bridge.stats()
    # of each step: two parts, four layers; forward, again for the gradient, dgrad and wgrad
    assert after.kernel_calls - before.kernel_calls == STEPS * 2 * 4 * 4
    assert after.xla == before.xla
    assert wanted[-1] < wanted[2]
    np.testing.assert_allclose(found, wanted, rtol=1000 * 2.0**-23)


def test_the_example_learns(store: Path) -> None:
    pytest.importorskip("equinox")
    command = [sys.executable, str(ROOT / "examples" / "jax_cnn.py"), "--require-accuracy", "0.97"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "CONVGRAD_CACHE": str(store)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Stats(kernel_calls=" in done.stdout
