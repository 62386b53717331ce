# SPDX-License-Identifier: Apache-2.0
"""Images as rows of arrays: reading, decoding, fitting, augmenting and normalising, in whichever process."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.images.augment import Draws, augment, resize_part
from tvm_convgrad.training.runtime.images.index import ImageIndex
from tvm_convgrad.training.runtime.images.options import RESIZED, Augmentation, parse_augmentations
from tvm_convgrad.training.runtime.images.pillow import MODES, fit, pixels_of, read_image
from tvm_convgrad.training.runtime.images.png import small_png
from tvm_convgrad.training.runtime.images.recipe import Recipe
from tvm_convgrad.training.runtime.images.shared import Shapes, SharedArrays
from tvm_convgrad.training.runtime.schema import Array

Faults = list[tuple[int, str]]
"""Numbers of images that cannot be used, and why."""

Seeds = tuple[int, int]
"""The seed of a run and the number of an epoch."""

_OPEN = 64
"""Shards that a process has open at once."""


def shapes_of(index: ImageIndex, recipe: Recipe, kept: bool) -> Shapes:
    """The shared arrays of a decoder: paths of files, places of images, and decoded images if they are kept."""
    paths = sum(len(os.fsencode(path)) for path in index.files)
    found = {
        "paths": ((paths,), "uint8"),
        "ends": ((len(index.files),), "int64"),
        "place": (index.place.shape, "int64"),
    }
    return found | ({"kept": ((len(index), *recipe.pixels), "uint8")} if kept else {})


def fill(shared: SharedArrays, index: ImageIndex) -> None:
    """Write paths and places into the arrays."""
    paths = [os.fsencode(path) for path in index.files]
    shared.arrays["paths"][:] = np.frombuffer(b"".join(paths), "uint8")
    shared.arrays["ends"][:] = np.cumsum([len(path) for path in paths])
    shared.arrays["place"][:] = index.place


@dataclass
class Decoder:
    """Makes batches of images.

    Attributes:
        recipe: what is made of an image.
        arrays: those of `shapes_of`, filled.
    """

    recipe: Recipe
    arrays: Mapping[str, Array]
    _streams: dict[int, Any] = field(default_factory=dict)
    _epoch: tuple[Seeds, Draws] | None = None

    def keep(self, numbers: Sequence[int]) -> Faults:
        """Decode and fit images, and keep them; those that cannot be used are reported."""
        faults: Faults = []
        for number in numbers:
            try:
                self.arrays["kept"][number] = pixels_of(self._fitted(number))
            except ArtifactError as error:
                faults.append((number, str(error)))
        return faults

    def batch(self, numbers: Array, seeds: Seeds | None, out: Array) -> Faults:
        """Write images as rows of an input; what cannot be used is reported, and its row has no meaning.

        Args:
            numbers: of the images.
            seeds: of the augmentations; None: there are none.
            out: one row an image.
        """
        changes = self._changes if seeds is not None else ()
        draws = self._draws_of(seeds) if seeds is not None and changes else None
        faults: Faults = []
        if "kept" in self.arrays:
            pixels = self.arrays["kept"][numbers]
        else:
            resized = changes[0] if changes and changes[0].kind == RESIZED else None
            pixels = np.zeros((len(numbers), *self.recipe.pixels), "uint8")
            for row, number in enumerate(numbers.tolist()):
                try:
                    if resized is not None and draws is not None:
                        image = resize_part(self._decoded(number), resized, self._size, draws.of(0, number))
                    else:
                        image = self._fitted(number)
                    pixels[row] = pixels_of(image)
                except ArtifactError as error:
                    faults.append((number, str(error)))
        if draws is not None and not faults:
            for stage, change in enumerate(changes):
                if change.kind != RESIZED:
                    pixels = augment(pixels, change, stage, numbers, draws)
        self.recipe.normalise(pixels, out)
        return faults

    @cached_property
    def _changes(self) -> tuple[Augmentation, ...]:
        return parse_augmentations(self.recipe.augment)

    @property
    def _size(self) -> tuple[int, int]:
        return self.recipe.width, self.recipe.height

    def _draws_of(self, seeds: Seeds) -> Draws:
        """The random numbers of an epoch; those of one are kept."""
        if self._epoch is None or self._epoch[0] != seeds:
            self._epoch = seeds, Draws(*seeds, len(self.arrays["place"]))
        return self._epoch[1]

    def _fitted(self, number: int) -> Any:
        return fit(self._decoded(number), self._size, self.recipe.fit)

    def _decoded(self, number: int) -> Any:
        content = self._content(number)
        found = small_png(content, MODES[self.recipe.channels])
        return read_image(content, self.recipe.channels, self.recipe.convert) if found is None else found

    def _content(self, number: int) -> bytes:
        """The bytes of an image's file.

        Raises:
            ArtifactError: it is missing or cannot be read, or the shard ends before.
        """
        file, begin, size = self.arrays["place"][number].tolist()
        try:
            if begin == 0:
                return _whole(self._path(file))
            stream = self._stream(file)
            stream.seek(begin)
            content: bytes = stream.read(size)
        except OSError as error:
            raise ArtifactError(
                "it is missing" if isinstance(error, FileNotFoundError) else f"{error.strerror}"
            ) from error
        if len(content) < size:
            raise ArtifactError("its shard has become shorter")
        return content

    def _path(self, file: int) -> bytes:
        paths, ends = self._names
        return paths[ends[file - 1] if file else 0 : ends[file]].tobytes()

    @cached_property
    def _names(self) -> tuple[memoryview, memoryview]:
        """The arrays of paths and their ends, which numpy takes ten times as long to index."""
        return self.arrays["paths"].data, self.arrays["ends"].data

    def _stream(self, file: int) -> Any:
        """A shard, opened; the one that was opened first is closed for it if there are many."""
        if file not in self._streams:
            if len(self._streams) >= _OPEN:
                self._streams.pop(next(iter(self._streams))).close()
            self._streams[file] = Path(os.fsdecode(self._path(file))).open("rb")  # noqa: SIM115  # for other images of the shard
        return self._streams[file]

    def close(self) -> None:
        """Close the shards."""
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


def _whole(path: bytes) -> bytes:
    """The bytes of a file; for small files three times as fast as `Path.read_bytes`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size + 1  # a read that gives fewer bytes has come to the end
        content = piece = os.read(descriptor, size)
        while len(piece) == size:
            piece = os.read(descriptor, size)
            content += piece
    finally:
        os.close(descriptor)
    return content


def setup_of(recipe: Recipe, *shared: SharedArrays) -> dict[str, Any]:
    """What `decoder_of` needs, for a message."""
    return {"recipe": asdict(recipe), "shared": [each.to_json() for each in shared]}


def decoder_of(setup: Mapping[str, Any]) -> Decoder:
    """The decoder of a child."""
    arrays: dict[str, Array] = {}
    for each in setup["shared"]:
        arrays |= SharedArrays.from_json(each).arrays
    recipe = setup["recipe"]
    lists = {name: tuple(recipe[name]) for name in ("mean", "std", "augment")}
    return Decoder(Recipe(**{**recipe, **lists}), arrays)


__all__ = ["Decoder", "Faults", "Seeds", "decoder_of", "fill", "setup_of", "shapes_of"]
