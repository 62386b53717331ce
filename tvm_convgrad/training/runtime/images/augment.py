# SPDX-License-Identifier: Apache-2.0
"""Random changes of training images by Pillow; `options` has what they do and their settings.

What is drawn for a sample follows from the seed, the epoch and the sample's number alone: Philox, a random generator
with a counter, begins at its own place for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.training.runtime.images.options import Augmentation
from tvm_convgrad.training.runtime.images.pillow import pillow

if TYPE_CHECKING:
    from PIL.Image import Image

Change = Callable[["Image", Mapping[str, float], tuple[int, int], np.random.Generator], "Image"]
"""(image, settings, (width, height) to come to, random numbers) -> image."""


def _flip(image: Image, values: Mapping[str, float], _size: tuple[int, int], random: np.random.Generator) -> Image:
    return pillow().ops.mirror(image) if random.random() < values["p"] else image


def _vflip(image: Image, values: Mapping[str, float], _size: tuple[int, int], random: np.random.Generator) -> Image:
    return pillow().ops.flip(image) if random.random() < values["p"] else image


def _crop(image: Image, values: Mapping[str, float], _size: tuple[int, int], random: np.random.Generator) -> Image:
    border = int(values["padding"])
    left, top = (int(random.integers(2 * border + 1)) for _ in range(2))
    left, top = left - border, top - border
    return image.crop((left, top, left + image.width, top + image.height))  # beyond the image it is black


def _resized(image: Image, values: Mapping[str, float], size: tuple[int, int], random: np.random.Generator) -> Image:
    area = random.uniform(values["scale"], 1.0) * image.width * image.height
    reach = -math.log(values["ratio"])
    ratio = math.exp(random.uniform(-reach, reach))
    width, height = min(math.sqrt(area * ratio), image.width), min(math.sqrt(area / ratio), image.height)
    left, top = random.uniform(0.0, image.width - width), random.uniform(0.0, image.height - height)
    return image.resize(size, pillow().image.Resampling.BILINEAR, box=(left, top, left + width, top + height))


def _rotate(image: Image, values: Mapping[str, float], _size: tuple[int, int], random: np.random.Generator) -> Image:
    degrees = random.uniform(-values["degrees"], values["degrees"])
    return image.rotate(degrees, pillow().image.Resampling.BILINEAR)


def _jitter(image: Image, values: Mapping[str, float], _size: tuple[int, int], random: np.random.Generator) -> Image:
    enhance = pillow().enhance
    kinds = {"brightness": enhance.Brightness, "contrast": enhance.Contrast, "saturation": enhance.Color}
    for name, kind in kinds.items():
        factor = random.uniform(1.0 - values[name], 1.0 + values[name])
        if values[name]:
            image = kind(image).enhance(factor)
    return image


def _erase(image: Image, values: Mapping[str, float], _size: tuple[int, int], random: np.random.Generator) -> Image:
    if random.random() >= values["p"]:
        return image
    area = random.uniform(0.0, values["scale"])
    ratio = math.exp(random.uniform(-1.0, 1.0))
    width = min(round(image.width * math.sqrt(area * ratio)), image.width)
    height = min(round(image.height * math.sqrt(area / ratio)), image.height)
    left, top = int(random.integers(image.width - width + 1)), int(random.integers(image.height - height + 1))
    changed = image.copy()
    changed.paste((128,) * len(image.getbands()), (left, top, left + width, top + height))
    return changed


_CHANGES: Mapping[str, Change] = {
    "flip": _flip,
    "vflip": _vflip,
    "crop": _crop,
    "resized": _resized,
    "rotate": _rotate,
    "jitter": _jitter,
    "erase": _erase,
}


def augment(image: Image, change: Augmentation, size: tuple[int, int], random: np.random.Generator) -> Image:
    """The image with one random change.

    Args:
        image: of 8 bits a channel; of `size`, but for the change `resized`.
        change: which one.
        size: (width, height) of what the model takes.
        random: of the sample.
    """
    return _CHANGES[change.kind](image, change.values, size, random)


class Draws:
    """The random numbers of the samples in one epoch.

    >>> draws = Draws(seed=1, epoch=2)
    >>> draws.of(3).random() == Draws(seed=1, epoch=2).of(3).random() != draws.of(4).random()
    True
    """

    def __init__(self, seed: int, epoch: int) -> None:
        self._bits = np.random.Philox(key=[seed % 2**64, epoch])
        self._begin = self._bits.state  # with nothing drawn ahead
        self._random = np.random.Generator(self._bits)

    def of(self, number: int) -> np.random.Generator:
        """Those of one sample, from their beginning; good until the next call."""
        self._begin["state"]["counter"][:] = (0, number, 0, 0)
        self._bits.state = self._begin  # a sixth of the time of a generator for each
        return self._random


__all__ = ["Draws", "augment"]
