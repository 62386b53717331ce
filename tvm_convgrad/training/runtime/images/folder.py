# SPDX-License-Identifier: Apache-2.0
"""A folder with a folder for each class, whose images are in it at any depth: `folder/class/a.png`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.images.index import ImageIndex, listed
from tvm_convgrad.training.runtime.images.pillow import SUFFIXES

PARTS = ("train", "val", "test")


def find_part(folder: Path, part: str, *, plain: bool) -> Path | None:
    """The folder of classes of a part.

    It is `folder/train`, `folder/val` or `folder/test` where the folder has such folders of classes; where it has none,
    it is the folder itself.

    Args:
        folder: that was given.
        part: "train", "val" or "test".
        plain: whether a folder without parts is of this one.

    Returns:
        None if the folder has no such part.
    """
    parts = {name for name in PARTS if (folder / name).is_dir() and _folders(folder / name)}
    if "train" not in parts and part not in parts:
        return folder if plain else None
    return folder / part if part in parts else None


def index_folder(folder: Path, classes: Sequence[str] | None = None) -> ImageIndex:
    """The images of a folder of classes.

    Classes are numbered in the order of their names; images are in the order of theirs. Files of other kinds than
    images, and hidden ones, are passed over.

    Args:
        folder: of the classes.
        classes: their names in the order of their numbers, where others have been read before; None: those of `folder`.

    Raises:
        ArtifactError: there is no folder, or no class; a class without an image, or one that is not in `classes`.
    """
    found = _folders(folder)
    if not found:
        loose = any(path.suffix.lower() in SUFFIXES for path in folder.iterdir())
        raise ArtifactError(
            f"{folder}: a folder without classes; "
            + ("its images have to be in folders, one for each class." if loose else "give one of folder/class/*.png.")
        )
    if classes is None:
        classes = found
    unknown = [name for name in found if name not in classes]
    if unknown:
        raise ArtifactError(
            f"{folder}: the classes {listed(unknown)} are not among the {len(classes)} of the training data "
            f"({listed(list(classes))}); name the folders as there."
        )
    files: list[str] = []
    sizes: list[int] = []
    labels: list[int] = []
    empty: list[str] = []
    for name in found:
        before = len(files)
        for path, size in _images(folder / name):
            files.append(path)
            sizes.append(size)
        labels += [classes.index(name)] * (len(files) - before)
        if len(files) == before:
            empty.append(name)
    if empty:
        raise ArtifactError(
            f"{folder}: {len(empty)} of {len(found)} classes have no image ({listed(empty)}); remove their folders, or "
            f"give images ({', '.join(SUFFIXES)})."
        )
    place = np.zeros((len(files), 3), "int64")
    place[:, 0], place[:, 2] = np.arange(len(files)), sizes
    names = [os.path.relpath(path, folder) for path in files]
    return ImageIndex(str(folder), tuple(files), place, names, np.array(labels, "int64"), tuple(classes))


def _folders(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))
    except OSError as error:
        raise ArtifactError(f"{folder}: the folder cannot be read ({error.strerror}).") from error


def _images(folder: Path) -> Iterator[tuple[str, int]]:
    """The images at any depth, with their bytes; -1 where a link leads nowhere, which decoding will name."""
    for place, folders, files in os.walk(folder, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                path = os.path.join(place, name)  # noqa: PTH118  # a Path for each of a million files takes seconds
                try:
                    size = os.stat(path).st_size  # noqa: PTH116
                except OSError:
                    size = -1
                yield path, size


__all__ = ["PARTS", "find_part", "index_folder"]
