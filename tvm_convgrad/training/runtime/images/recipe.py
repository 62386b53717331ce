# SPDX-License-Identifier: Apache-2.0
"""How an image becomes an input: size, channels, layout, element type and normalisation of a model's input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.training.runtime.images.options import FITS, RESIZED, ImageOptions, parse_augmentations
from tvm_convgrad.training.runtime.schema import Array, TensorSpec

_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Recipe:
    """How an image becomes a row of an input; all fields go through JSON, to other processes.

    Attributes:
        height, width, channels: of the input.
        channels_last: whether it is NHWC.
        dtype: its element type.
        mean, std: for each channel; integers have none, as they are the pixels.
        fit, convert: as in `ImageOptions`.
        augment: the texts of the augmentations.
    """

    height: int
    width: int
    channels: int
    channels_last: bool
    dtype: str
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fit: str = "crop"
    convert: bool = False
    augment: tuple[str, ...] = ()

    @classmethod
    def of(cls, inputs: Sequence[TensorSpec], target: TensorSpec, options: ImageOptions, manifest: Any) -> Recipe:
        """The recipe for a step.

        Args:
            inputs, target: of the step.
            options: the user's options.
            manifest: the options of the build, of which `mean` and `std` are used.

        Raises:
            UnsupportedError: the input is not one of images, or an option cannot be.
        """
        if len(inputs) != 1:
            names = ", ".join(spec.name for spec in inputs)
            raise UnsupportedError(
                f"a folder or shards of images fill one input, but the model has {len(inputs)} ({names}); give an "
                ".npz, or batches from Python."
            )
        (spec,) = inputs
        height, width, channels, last = _extents(spec)
        mean, std = _normalisation(spec, channels, options, manifest)
        if options.fit not in FITS:
            raise UnsupportedError(f"--fit {options.fit}: images are fitted by one of {', '.join(FITS)}.")
        augmentations = parse_augmentations(options.augment)
        moving = [each.text for each in augmentations if each.moves]
        if moving and len(target.shape) > 1:
            raise UnsupportedError(
                f"--augment {moving[0]} moves pixels, and the target {target.name!r}, {target}, has more than one "
                "value a sample, which does not move with them; leave it out."
            )
        return cls(height, width, channels, last, spec.dtype, mean, std, options.fit, options.convert, options.augment)

    @property
    def row(self) -> tuple[int, ...]:
        """The extents of a sample of the input."""
        pixels = (self.height, self.width)
        return (*pixels, self.channels) if self.channels_last else (self.channels, *pixels)

    @property
    def pixels(self) -> tuple[int, int, int]:
        """The extents of a decoded image: height, width, channels."""
        return self.height, self.width, self.channels

    @property
    def takes_pixels(self) -> bool:
        """Whether the input is of integers, which are the pixels themselves."""
        return self.dtype.startswith(("int", "uint"))

    @property
    def is_fitted_first(self) -> bool:
        """Whether augmentations begin with an image of the input's size, which is the same in all epochs."""
        return not self.augment or not self.augment[0].startswith(RESIZED)

    @cached_property
    def table(self) -> Array:
        """The value of each pixel, shape [channels, 256]: computed in float64, and rounded once."""
        pixels = np.arange(256)
        if self.takes_pixels:
            return np.tile(pixels, (self.channels, 1)).astype(numpy_dtype(self.dtype))
        rows = [(pixels / 255.0 - mean) / std for mean, std in zip(self.mean, self.std, strict=True)]
        return np.stack(rows).astype(numpy_dtype(self.dtype))

    def normalise(self, pixels: Array, out: Array) -> None:
        """Write images, uint8 [N, H, W, C], as rows of the input."""
        for channel in range(self.channels):
            place = out[..., channel] if self.channels_last else out[:, channel]
            np.take(self.table[channel], pixels[..., channel], out=place, mode="clip")  # "raise" would copy


def _extents(spec: TensorSpec) -> tuple[int, int, int, bool]:
    """Height, width, channels, and whether channels are last."""
    shape = spec.shape[1:]
    if len(shape) != 3 or not all(isinstance(extent, int) for extent in shape):
        raise UnsupportedError(
            f"images are [batch, channels, height, width] or [batch, height, width, channels], but the input "
            f"{spec.name!r} of the model is {spec}; give an .npz, or batches from Python."
        )
    first, middle, last = (int(extent) for extent in shape)
    if (first in _CHANNELS) == (last in _CHANNELS):
        raise UnsupportedError(
            f"which axis of the input {spec.name!r}, {spec}, has the channels is ambiguous: one of axes 1 and 3 has "
            "to have 1, 3 or 4; give an .npz, or batches from Python."
        )
    return (middle, last, first, False) if first in _CHANNELS else (first, middle, last, True)


def _normalisation(
    spec: TensorSpec, channels: int, options: ImageOptions, manifest: Any
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and deviation of each channel."""
    integer = spec.dtype.startswith(("int", "uint"))
    if integer and (options.mean, options.std) != (None, None):
        raise UnsupportedError(
            f"--mean and --std: the input {spec.name!r} of the model is {spec}, which takes pixels from 0 to 255; "
            "leave them out."
        )
    if spec.dtype in ("bool", "int8"):
        raise UnsupportedError(
            f"the input {spec.name!r} of the model is {spec}, which cannot hold pixels from 0 to 255."
        )
    if integer:
        return (), ()
    found = []
    for name, given, default in (("mean", options.mean, 0.0), ("std", options.std, 1.0)):
        numbers = given if given is not None else manifest.get(name) or (default,)
        if len(numbers) not in (1, channels):
            raise UnsupportedError(
                f"--{name} has {len(numbers)} numbers, but the input {spec.name!r} of the model has {channels} "
                "channels; give one for each, or one for all."
            )
        if not all(map(math.isfinite, numbers)) or (name == "std" and min(numbers) <= 0):
            raise UnsupportedError(
                f"--{name} {','.join(map(str, numbers))}: give finite numbers, and positive ones for std."
            )
        found.append(tuple(numbers) if len(numbers) == channels else (float(numbers[0]),) * channels)
    return found[0], found[1]


def check_table(recipe: Recipe) -> None:
    """Refuse a normalisation whose results overflow in the input's type.

    Raises:
        ArtifactError: they do.
    """
    with np.errstate(over="ignore"):
        table = recipe.table.astype("float64")
    if not np.isfinite(table).all():
        raise ArtifactError(f"--mean and --std lead beyond {recipe.dtype}, the type of the model's input; use others.")


__all__ = ["Recipe", "check_table"]
