# SPDX-License-Identifier: Apache-2.0
"""Random changes of training images; `options` has what they do and their settings.

What only moves whole pixels is done for a batch of arrays at once, the rest by Pillow, image by image. What is drawn
for a sample follows from the seed, the epoch, the place among the changes and the sample's number alone: Philox, a
random generator with a counter, begins at its own place for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.training.runtime.images.options import Augmentation
from tvm_convgrad.training.runtime.images.pillow import image_of, pillow, pixels_of
from tvm_convgrad.training.runtime.schema import Array

if TYPE_CHECKING:
    from PIL.Image import Image

Settings = Mapping[str, float]

_DRAWN = 2
"""Numbers from 0 to 1 that a change of arrays has for each sample."""


class Draws:
    """The random numbers of the samples in one epoch.

    >>> draws = Draws(seed=1, epoch=2, samples=9)
    >>> draws.of(0, 3).random() == Draws(seed=1, epoch=2, samples=9).of(0, 3).random() != draws.of(0, 4).random()
    True
    """

    def __init__(self, seed: int, epoch: int, samples: int) -> None:
        self._key = [seed % 2**64, epoch]
        self._samples = samples
        self._bits = np.random.Philox(key=self._key)
        self._begin = self._bits.state  # with nothing drawn ahead
        self._random = np.random.Generator(self._bits)
        self._tables: dict[int, Array] = {}

    def of(self, stage: int, number: int) -> np.random.Generator:
        """Those of one sample for the change at place `stage`, from their beginning; good until the next call."""
        self._begin["state"]["counter"][:] = (0, number, stage, 0)
        self._bits.state = self._begin  # a sixth of the time of a generator for each
        return self._random

    def rows(self, stage: int, numbers: Array) -> Array:
        """Two numbers from 0 to 1 for each of some samples, [samples, 2]."""
        if stage not in self._tables:
            bits = np.random.Philox(key=self._key, counter=[0, 0, stage, 1])
            self._tables[stage] = np.random.Generator(bits).random((self._samples, _DRAWN))
        return np.asarray(self._tables[stage][numbers])


def _flip(pixels: Array, values: Settings, drawn: Array) -> Array:
    chosen = drawn[:, 0] < values["p"]
    pixels[chosen] = pixels[chosen, :, ::-1]
    return pixels


def _vflip(pixels: Array, values: Settings, drawn: Array) -> Array:
    chosen = drawn[:, 0] < values["p"]
    pixels[chosen] = pixels[chosen, ::-1]
    return pixels


def _crop(pixels: Array, values: Settings, drawn: Array) -> Array:
    border = int(values["padding"])
    height, width = pixels.shape[1:3]
    padded = np.zeros((len(pixels), height + 2 * border, width + 2 * border, pixels.shape[3]), "uint8")
    padded[:, border : border + height, border : border + width] = pixels
    places = (drawn * (2 * border + 1)).astype(int)
    for row, (top, left) in enumerate(places.tolist()):
        pixels[row] = padded[row, top : top + height, left : left + width]
    return pixels


def _rotate(image: Image, values: Settings, random: np.random.Generator) -> Image:
    degrees = random.uniform(-values["degrees"], values["degrees"])
    return image.rotate(degrees, pillow().image.Resampling.BILINEAR)


def _jitter(image: Image, values: Settings, random: np.random.Generator) -> Image:
    enhance = pillow().enhance
    kinds = {"brightness": enhance.Brightness, "contrast": enhance.Contrast, "saturation": enhance.Color}
    for name, kind in kinds.items():
        factor = random.uniform(1.0 - values[name], 1.0 + values[name])
        if values[name]:
            image = kind(image).enhance(factor)
    return image


def _erase(image: Image, values: Settings, random: np.random.Generator) -> Image:
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


_OF_BATCHES: Mapping[str, Callable[[Array, Settings, Array], Array]] = {"flip": _flip, "vflip": _vflip, "crop": _crop}
_OF_IMAGES: Mapping[str, Callable[[Image, Settings, np.random.Generator], Image]] = {
    "rotate": _rotate,
    "jitter": _jitter,
    "erase": _erase,
}


def is_quick(change: Augmentation) -> bool:
    """Whether a change takes about as long as to copy the images, so that no process does it in advance."""
    return change.kind in _OF_BATCHES


def augment(pixels: Array, change: Augmentation, stage: int, numbers: Array, draws: Draws) -> Array:
    """A batch with one random change, in the same memory.

    Args:
        pixels: uint8 [samples, height, width, channels].
        change: any but `resized`.
        stage: its place among the changes, from 0.
        numbers: of the samples.
        draws: of the epoch.
    """
    if change.kind in _OF_BATCHES:
        return _OF_BATCHES[change.kind](pixels, change.values, draws.rows(stage, numbers))
    changed = _OF_IMAGES[change.kind]
    for row, number in enumerate(numbers.tolist()):
        pixels[row] = pixels_of(changed(image_of(pixels[row]), change.values, draws.of(stage, number)))
    return pixels


def resize_part(image: Image, change: Augmentation, size: tuple[int, int], random: np.random.Generator) -> Image:
    """The change `resized`: a part of an image of any size, in (width, height) `size`."""
    area = random.uniform(change.values["scale"], 1.0) * image.width * image.height
    reach = abs(math.log(change.values["ratio"]))
    ratio = math.exp(random.uniform(-reach, reach))
    width, height = min(math.sqrt(area * ratio), image.width), min(math.sqrt(area / ratio), image.height)
    left, top = random.uniform(0.0, image.width - width), random.uniform(0.0, image.height - height)
    return image.resize(size, pillow().image.Resampling.BILINEAR, box=(left, top, left + width, top + height))


__all__ = ["Draws", "augment", "is_quick", "resize_part"]
