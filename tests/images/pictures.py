# SPDX-License-Identifier: Apache-2.0
"""Small images in folders and shards, and sources of them without a compiled step."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import numpy as np
from PIL import Image

from tvm_convgrad.training.runtime.images.folder import index_folder
from tvm_convgrad.training.runtime.images.index import ImageIndex
from tvm_convgrad.training.runtime.images.options import ImageOptions
from tvm_convgrad.training.runtime.images.recipe import Recipe
from tvm_convgrad.training.runtime.images.source import ImageSource
from tvm_convgrad.training.runtime.schema import TensorSpec

CLASSES = ("ant", "bee", "cat")


def pixels(samples: int, height: int, width: int, channels: int, seed: int = 0) -> np.ndarray:
    """Noise, uint8 [samples, height, width, channels]."""
    return np.random.default_rng(seed).integers(0, 256, (samples, height, width, channels), dtype="uint8")


def encode(image: np.ndarray, kind: str = "png") -> bytes:
    """The bytes of an image's file."""
    stream = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(stream, kind)
    return stream.getvalue()


def write_folder(folder: Path, images: np.ndarray, classes: tuple[str, ...] = CLASSES) -> np.ndarray:
    """Write images in turns to the classes; their numbers in the order in which they are read."""
    for number, image in enumerate(images):
        path = folder / classes[number % len(classes)] / f"{number:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(image))
    return np.array([number for first in range(len(classes)) for number in range(first, len(images), len(classes))])


def write_shard(path: Path, files: dict[str, bytes]) -> None:
    """Write a tar file."""
    with tarfile.open(path, "w") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))


def label(kind: str, value: int) -> bytes:
    """The bytes of a label's file."""
    if kind == "npy":
        stream = io.BytesIO()
        np.save(stream, np.int64(value))
        return stream.getvalue()
    return (json.dumps({"label": value, "caption": "a b"}) if kind == "json" else f"{value}\n").encode()


def write_shards(folder: Path, images: np.ndarray, labels: np.ndarray, shards: int, kind: str = "cls") -> Path:
    """Write images in pieces to shards; their pattern."""
    for shard, numbers in enumerate(np.array_split(np.arange(len(images)), shards)):
        files: dict[str, bytes] = {"README.txt": b"passed over"}
        for number in numbers:
            files[f"./part/{number:05d}.png"] = encode(images[number])
            files[f"./part/{number:05d}.{kind}"] = label(kind, int(labels[number]))
        write_shard(folder / f"s-{shard:02d}.tar", files)
    return folder / f"s-{{00..{shards - 1:02d}}}.tar"


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    """An input of images with a free batch."""
    return TensorSpec("image", ("n", *shape), dtype)


TARGET = TensorSpec("target", ("n",), "int64")


def recipe_of(shape: tuple[int, ...], options: ImageOptions, dtype: str = "float32") -> Recipe:
    """The recipe for a classifier."""
    return Recipe.of([spec(*shape, dtype=dtype)], TARGET, options, {})


def source_of(data: Path | ImageIndex, shape: tuple[int, ...], options: ImageOptions) -> ImageSource:
    """A source of the images of a folder, or of an index."""
    index = index_folder(data) if isinstance(data, Path) else data
    return ImageSource(index, recipe_of(shape, options), options)
