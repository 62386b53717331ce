# SPDX-License-Identifier: Apache-2.0
"""Images in files and in memory by Pillow, an optional package: reading, and the fit to a model's size."""

from __future__ import annotations

import io
import struct
import zlib
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, SetupError, first_line
from tvm_convgrad.training.runtime.schema import Array

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageFile import ImageFile

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
"""Of the files that are taken for images, in small letters."""

MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
"""Pillow's modes by the number of channels."""

_CODED = {"1": "L", "P": "RGB", "CMYK": "RGB", "YCbCr": "RGB", "PA": "RGBA"}
"""Codings of colours, and the mode that has the same."""


class Pillow(NamedTuple):
    """The modules of Pillow."""

    image: ModuleType
    ops: ModuleType
    enhance: ModuleType


@cache
def pillow() -> Pillow:
    """Pillow.

    Raises:
        SetupError: it is not installed.
    """
    try:
        from PIL import Image, ImageEnhance, ImageOps  # optional
    except ModuleNotFoundError as error:
        raise SetupError("training on images needs Pillow: pip install 'tvm-convgrad[images]'.") from error
    return Pillow(Image, ImageOps, ImageEnhance)


def _is_wide(image: ImageFile) -> bool:
    """Whether an image that is not loaded yet has more than 8 bits a channel, although its mode in memory has not."""
    for codec, _extents, _offset, arguments in image.tile:
        if ";16" in str(arguments) and image.mode in _CODED.keys() | MODES.values():  # PNG, TIFF
            return True
        if codec.startswith("ppm") and isinstance(arguments, tuple) and max(arguments[1:], default=0) > 255:
            return True
    return False


def read_image(content: bytes, channels: int, convert: bool) -> Image:
    """Decode an image of 8 bits a channel.

    Args:
        content: of the file.
        channels: that it must have; palettes, black and white, CMYK and YCbCr count as the colours that they mean.
        convert: make it have so many, if it has others: grey of colours, colours of grey, without transparency.

    Raises:
        ArtifactError: damaged, of no known format, of other channels, or of more than 8 bits.
    """
    module = pillow().image
    try:
        opened: ImageFile = module.open(io.BytesIO(content))
        if _is_wide(opened):
            raise ArtifactError(f"it has more than 8 bits a channel, which Pillow would drop (mode {opened.mode})")
        opened.load()
        image: Image = opened
        mode = "RGBA" if image.mode == "P" and "transparency" in image.info else _CODED.get(image.mode, image.mode)
        if mode not in MODES.values():
            raise ArtifactError(f"its mode {image.mode} is not of 8 bits a channel")
        wanted = MODES[channels]
        if mode != wanted and mode == "RGBA" and image.mode == "P" and wanted == "RGB":
            mode = wanted  # a palette with a transparent entry
        if mode != wanted and not convert:
            found = next(count for count, name in MODES.items() if name == mode)
            raise ArtifactError(f"it has {found} channels (mode {image.mode}), the model's input {channels}")
        return image if image.mode == wanted else image.convert(wanted)
    except ArtifactError:
        raise
    except (
        OSError,
        SyntaxError,
        ValueError,
        EOFError,
        struct.error,
        zlib.error,
        module.DecompressionBombError,
    ) as error:
        text = first_line(error)
        raise ArtifactError("its format is unknown" if "cannot identify" in text else text) from error


def image_of(pixels: Array) -> Image:
    """The image as uint8 [height, width, channels]."""
    found: Image = pillow().image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    return found


def pixels_of(image: Image) -> Array:
    """The pixels of an image, uint8 [height, width, channels]."""
    width, height = image.size
    return np.frombuffer(image.tobytes(), "uint8").reshape(height, width, -1)  # less than asarray(image) takes


def fit(image: Image, size: tuple[int, int], how: str) -> Image:
    """The image in (width, height) `size`, by bilinear interpolation over all pixels that fall together."""
    if image.size == size:
        return image
    modules = pillow()
    bilinear = modules.image.Resampling.BILINEAR
    if how == "crop":
        return modules.ops.fit(image, size, bilinear)
    return modules.ops.pad(image, size, bilinear) if how == "pad" else image.resize(size, bilinear)


__all__ = ["MODES", "SUFFIXES", "fit", "image_of", "pillow", "pixels_of", "read_image"]
