# SPDX-License-Identifier: Apache-2.0
"""Small PNGs of the usual kind, decoded by Pillow's decoder without the objects that Pillow makes for each file.

For images of a few hundred pixels `PIL.Image.open` takes four times as long as decoding them.
"""

from __future__ import annotations

import struct
import zlib
from typing import TYPE_CHECKING

from tvm_convgrad.training.runtime.images.pillow import pillow

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_PIXELS = 1 << 16
"""Of an image that is decoded here; for larger ones, what Pillow does beside decoding takes little time."""

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOURS = {"L": 0, "RGB": 2, "LA": 4, "RGBA": 6}
"""The colour types of PNG by Pillow's modes."""

_HEADER = struct.Struct(">4sII5B")
_HEADER_BYTES = 13


def small_png(content: bytes, mode: str) -> Image | None:
    """Decode a PNG of 8 bits a channel, not interlaced, of at most MOST_PIXELS and of one of _COLOURS.

    Args:
        content: of the file.
        mode: the only one that is decoded.

    Returns:
        The image, with the pixels that `PIL.Image.open` gives. None for all other contents, damaged ones and such with
        other chunks than IHDR, IDAT and IEND among them: Pillow is to say what they are.
    """
    if content[:8] != _SIGNATURE:
        return None
    place, size = 8, None
    packed: list[bytes] = []
    while True:
        length = int.from_bytes(content[place : place + 4], "big")
        end = place + 8 + length
        chunk = content[place + 4 : end]
        if content[end : end + 4] != zlib.crc32(chunk).to_bytes(4, "big"):
            return None
        kind = chunk[:4]
        if kind == b"IDAT" and size is not None:
            packed.append(chunk[4:])
        elif kind == b"IHDR" and size is None and length == _HEADER_BYTES:
            _, width, height, *kinds = _HEADER.unpack(chunk)
            if kinds != [8, _COLOURS[mode], 0, 0, 0] or not 0 < width * height <= MOST_PIXELS:
                return None
            size = width, height
        elif kind == b"IEND" and packed and size is not None:
            break
        else:
            return None
        place = end + 4
    try:
        image: Image = pillow().image.frombytes(mode, size, b"".join(packed), "zip", mode, 0)
    except (ValueError, OSError):  # too few pixels, or damaged ones: Pillow's words for a file are others
        return None
    return image


__all__ = ["MOST_PIXELS", "small_png"]
