# SPDX-License-Identifier: Apache-2.0
"""ResNet-18 and MobileNetV2 in plain JAX, in the layout NCHW or NHWC, with batch norms in training mode.

Sources: He et al. 2015, Sandler et al. 2018. Parameters are a flat list, which a network takes in its order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np

CLASSES = 1000
_EPSILON = 1e-5


@dataclass
class Tape:
    """The parameters of a network: made by the first run through it, taken by all later ones.

    Attributes:
        layout: "NCHW" or "NHWC", whose weights are OIHW or HWIO.
        given: the parameters; None makes them.
        made: parameters in the order of use.
    """

    layout: str
    given: Iterator[jax.Array] | None = None
    made: list[np.ndarray] = field(default_factory=list)
    generator: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def parameter(self, shape: Sequence[int], scale: float, mean: float = 0.0) -> jax.Array:
        """The next parameter, normally distributed when it is made."""
        if self.given is not None:
            return next(self.given)
        self.made.append((mean + scale * self.generator.standard_normal(shape)).astype(np.float32))
        return jnp.asarray(self.made[-1])

    def convolution(self, x: jax.Array, out: int, kernel: int, stride: int = 1, groups: int = 1) -> jax.Array:
        """A convolution, padded by half of its kernel, and a batch norm."""
        last = self.layout == "NHWC"
        into = x.shape[3 if last else 1] // groups
        shape = (kernel, kernel, into, out) if last else (out, into, kernel, kernel)
        weight = self.parameter(shape, (2.0 / (into * kernel * kernel)) ** 0.5)
        y = jax.lax.conv_general_dilated(
            x,
            weight,
            (stride, stride),
            [(kernel // 2, kernel // 2)] * 2,
            dimension_numbers=(self.layout, "HWIO" if last else "OIHW", self.layout),
            feature_group_count=groups,
        )
        axes, form = ((0, 1, 2), (out,)) if last else ((0, 2, 3), (out, 1, 1))
        mean, variance = y.mean(axes, keepdims=True), y.var(axes, keepdims=True)
        scale, shift = self.parameter(form, 0.0, 1.0), self.parameter(form, 0.0)
        return (y - mean) * jax.lax.rsqrt(variance + _EPSILON) * scale + shift

    def logits(self, x: jax.Array) -> jax.Array:
        """The mean over pixels, and a linear layer."""
        x = x.mean((1, 2) if self.layout == "NHWC" else (2, 3))
        return x @ self.parameter((x.shape[1], CLASSES), 0.01) + self.parameter((CLASSES,), 0.0)


def resnet18(tape: Tape, x: jax.Array) -> jax.Array:
    """ResNet-18: logits of images."""
    spatial = (1, 2) if tape.layout == "NHWC" else (2, 3)
    x = jax.nn.relu(tape.convolution(x, 64, 7, 2))
    window, steps, pads = [1] * 4, [1] * 4, [(0, 0)] * 4
    for axis in spatial:
        window[axis], steps[axis], pads[axis] = 3, 2, (1, 1)
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, steps, pads)
    for stage in range(4):
        for block in range(2):
            width, stride = 64 << stage, 2 if stage and not block else 1
            y = jax.nn.relu(tape.convolution(x, width, 3, stride))
            y = tape.convolution(y, width, 3)
            x = jax.nn.relu(y + (tape.convolution(x, width, 1, stride) if stage and not block else x))
    return tape.logits(x)


_STAGES = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
"""MobileNetV2's: expansion, channels, blocks, stride of the first."""


def mobilenet_v2(tape: Tape, x: jax.Array) -> jax.Array:
    """MobileNetV2: logits of images."""
    axis = 3 if tape.layout == "NHWC" else 1
    x = jax.nn.relu6(tape.convolution(x, 32, 3, 2))
    for expansion, out, blocks, first in _STAGES:
        for block in range(blocks):
            into, stride = x.shape[axis], first if not block else 1
            hidden = into * expansion
            y = jax.nn.relu6(tape.convolution(x, hidden, 1)) if expansion > 1 else x
            y = jax.nn.relu6(tape.convolution(y, hidden, 3, stride, groups=hidden))
            y = tape.convolution(y, out, 1)
            x = x + y if stride == 1 and into == out else y
    return tape.logits(jax.nn.relu6(tape.convolution(x, 1280, 1)))


def small(tape: Tape, x: jax.Array) -> jax.Array:
    """Two layers, for tests."""
    return tape.logits(jax.nn.relu(tape.convolution(jax.nn.relu(tape.convolution(x, 8, 3, 2)), 8, 3, groups=8)))


Network = Callable[[Tape, jax.Array], jax.Array]

JAX_NETWORKS: dict[str, tuple[Network, int]] = {
    "resnet18": (resnet18, 224),
    "mobilenet_v2": (mobilenet_v2, 224),
    "small": (small, 8),
}
"""Each network, and the extent of its images."""

__all__ = ["JAX_NETWORKS", "Network", "Tape"]
