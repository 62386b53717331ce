# SPDX-License-Identifier: Apache-2.0
"""Trains a small CNN of Equinox on scikit-learn's handwritten digits, with this package's kernels under JAX.

    python examples/jax_cnn.py [--epochs N] [--without] [--require-accuracy 0.97]

Model and training loop are Equinox's and Optax's own; `tvm_convgrad.jax.patch()` is the only line of ours. `--without`
leaves it out. Needs the extra jax-models: pip install 'tvm-convgrad[jax-models]'.
"""

from __future__ import annotations

import argparse
import sys
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import tvm_convgrad.jax


class Block(eqx.Module):
    convolution: eqx.nn.Conv2d
    norm: eqx.nn.GroupNorm

    def __init__(self, into: int, out: int, stride: int, key: jax.Array) -> None:
        self.convolution = eqx.nn.Conv2d(into, out, 3, stride, 1, use_bias=False, key=key)
        self.norm = eqx.nn.GroupNorm(8, out)

    def __call__(self, image: jax.Array) -> jax.Array:
        return jax.nn.relu(self.norm(self.convolution(image)))


class Network(eqx.Module):
    blocks: list[Block]
    classifier: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        sizes = ((1, 32, 1), (32, 32, 1), (32, 64, 2), (64, 128, 2))
        *keys, last = jax.random.split(key, len(sizes) + 1)
        self.blocks = [Block(*size, key=each) for size, each in zip(sizes, keys, strict=True)]
        self.classifier = eqx.nn.Linear(128 * 2 * 2, 10, key=last)

    def __call__(self, image: jax.Array) -> jax.Array:
        for block in self.blocks:
            image = block(image)
        return self.classifier(image.ravel())


def loss_of(model: Network, images: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(images), labels).mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--without", action="store_true", help="let XLA compute all by itself")
    parser.add_argument("--require-accuracy", type=float, default=0.0, metavar="SHARE")
    options = parser.parse_args()

    digits = load_digits()
    images = (digits.images / 16.0).astype(np.float32)[:, None]
    split = train_test_split(images, digits.target, test_size=0.2, random_state=0, stratify=digits.target)
    x_train, x_test, y_train, y_test = split
    model = Network(jax.random.key(0))
    steps = len(x_train) // options.batch
    optimizer = optax.adamw(optax.cosine_decay_schedule(2e-3, options.epochs * steps))
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    if not options.without:
        tvm_convgrad.jax.patch()

    @eqx.filter_jit
    def step(
        model: Network, state: optax.OptState, images: jax.Array, labels: jax.Array
    ) -> tuple[Network, optax.OptState, jax.Array]:
        loss, gradients = eqx.filter_value_and_grad(loss_of)(model, images, labels)
        updates, state = optimizer.update(gradients, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    generator = np.random.default_rng(0)
    for epoch in range(options.epochs):
        begin, total = time.perf_counter(), 0.0
        for batch in generator.permutation(len(x_train))[: steps * options.batch].reshape(steps, -1):
            model, state, loss = step(model, state, jnp.asarray(x_train[batch]), jnp.asarray(y_train[batch]))
            total += float(loss)
        print(f"epoch {epoch}: loss {total / steps:.4f}, {time.perf_counter() - begin:.2f} s")

    accuracy = float((jax.vmap(model)(jnp.asarray(x_test)).argmax(1) == y_test).mean())
    print(f"test accuracy {accuracy:.4f}")
    print(tvm_convgrad.jax.stats())
    for told in tvm_convgrad.jax.explain():
        print(told)
    if accuracy < options.require_accuracy:
        sys.exit(f"the test accuracy is below {options.require_accuracy}")


if __name__ == "__main__":
    main()
