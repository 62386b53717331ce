# SPDX-License-Identifier: Apache-2.0
"""Small PNGs are decoded without Pillow's files: to the same pixels, and whatever is unusual is left to Pillow."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest

pytest.importorskip("PIL")

from PIL import Image, PngImagePlugin

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.images.pillow import MODES, image_of, pixels_of, read_image
from tvm_convgrad.training.runtime.images.png import small_png


def pixels(height: int, width: int, channels: int) -> np.ndarray:
    """Ramps with noise in their low bits: the encoder uses all of PNG's filters."""
    random = np.random.default_rng(height * width + channels)
    ramp = np.add.outer(np.arange(height) * 3, np.arange(width) * 5)[..., None] * np.arange(1, channels + 1)
    return (ramp + random.integers(0, 9, (height, width, channels))).astype("uint8")


def png(picture: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", **options)
    return file.getvalue()


@pytest.mark.parametrize("channels", MODES)
@pytest.mark.parametrize("size", [(1, 1), (8, 8), (5, 33), (32, 32), (96, 70)])
def test_pixels_are_those_of_pillow(channels: int, size: tuple[int, int]) -> None:
    expected = pixels(*size, channels)
    content = png(image_of(expected))
    found = small_png(content, MODES[channels])
    assert found is not None
    assert found.mode == MODES[channels]
    np.testing.assert_array_equal(pixels_of(found), expected)
    np.testing.assert_array_equal(pixels_of(read_image(content, channels, convert=False)), expected)


def test_data_in_many_chunks() -> None:
    """As encoders with small buffers write it."""
    expected = pixels(16, 16, 3)
    content = png(image_of(expected))
    begin = content.index(b"IDAT") - 4
    length = int.from_bytes(content[begin : begin + 4], "big")
    packed, tail = content[begin + 8 : begin + 8 + length], content[begin + 12 + length :]
    pieces = [b"IDAT" + packed[first : first + 50] for first in range(0, length, 50)]
    chunks = [struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in pieces]
    found = small_png(content[:begin] + b"".join(chunks) + tail, "RGB")
    assert found is not None
    np.testing.assert_array_equal(pixels_of(found), expected)


def unusual() -> dict[str, tuple[bytes, int]]:
    """Contents by what is unusual in them, and the channels that are wanted."""
    plain, colours = image_of(pixels(8, 8, 1)), image_of(pixels(8, 8, 3))
    text = PngImagePlugin.PngInfo()
    text.add_text("author", "me")
    good, jpeg = png(colours), io.BytesIO()
    colours.save(jpeg, "JPEG")
    flipped, crc = bytearray(good), bytearray(good)
    flipped[good.index(b"IDAT") + 9] ^= 255
    crc[good.index(b"IHDR") + 8] ^= 1
    return {
        "palette": (png(colours.quantize(16)), 3),
        "16 bits": (png(Image.fromarray(np.arange(64, dtype="uint16").reshape(8, 8))), 1),
        "black and white": (png(plain.convert("1")), 1),
        "other channels": (good, 1),
        "text": (png(colours, pnginfo=text), 3),
        "transparent colour": (png(colours, transparency=(1, 2, 3)), 3),
        "jpeg": (jpeg.getvalue(), 3),
        "damaged data": (bytes(flipped), 3),
        "damaged header": (bytes(crc), 3),
        "cut off": (good[:-30], 3),
        "without its end": (good[:-12], 3),
        "large": (png(image_of(pixels(300, 300, 1))), 1),
        "empty": (b"", 1),
    }


@pytest.mark.parametrize("what", unusual())
def test_the_rest_is_left_to_pillow(what: str) -> None:
    content, channels = unusual()[what]
    assert small_png(content, MODES[channels]) is None


def test_pixels_that_are_missing_are_left_to_pillow() -> None:
    """Sums are right, and the compressed data end early: Pillow says so, in its words for files."""
    good = png(image_of(pixels(8, 8, 1)))
    begin = good.index(b"IDAT")
    chunk = b"IDAT" + zlib.compress(b"\0" * 20)
    cut = good[: begin - 4] + struct.pack(">I", len(chunk) - 4) + chunk + struct.pack(">I", zlib.crc32(chunk))
    content = cut + good[-12:]
    assert small_png(content, "L") is None
    with pytest.raises(ArtifactError):
        read_image(content, 1, convert=False)
