# SPDX-License-Identifier: Apache-2.0
"""The index of images: where the bytes of each are, and its target."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.schema import Array, TensorSpec

NAMED = 5
"""Samples that a message names."""


@dataclass(frozen=True)
class ImageIndex:
    """The images of a folder, or of shards, and their targets.

    Attributes:
        origin: what messages call them all.
        files: the files that have them.
        place: of each image the number of its file, where it begins there, and its bytes; int64 [samples, 3].
        names: of the images.
        targets: one row an image.
        classes: the names of the classes, by number; none where shards have numbers.
    """

    origin: str
    files: tuple[str, ...]
    place: Array
    names: Sequence[str]
    targets: Array
    classes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.place)

    @property
    def digest(self) -> str:
        """SHA-256 of names, sizes, targets and classes, in hex: all but the pixels."""
        digest = hashlib.sha256()
        for text in ("\0".join(self.names), "\0".join(self.classes), f"{self.targets.dtype}{self.targets.shape}"):
            digest.update(text.encode("utf-8", "surrogateescape") + b"\1")
        digest.update(np.ascontiguousarray(self.place[:, 2]).tobytes())
        digest.update(self.targets.tobytes())
        return digest.hexdigest()


def listed(texts: Sequence[str]) -> str:
    """The first of some texts, and the number of the others.

    >>> listed(["a", "b", "c", "d", "e", "f", "g"])
    'a, b, c, d, e and 2 more'
    """
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more


def accept_targets(index: ImageIndex, target: TensorSpec, what: str) -> ImageIndex:
    """The same with targets as the step takes them.

    Args:
        index: of images whose targets are checked.
        target: of the step, with its range.
        what: how messages call the targets.

    Raises:
        ArtifactError: of another type or shape, or out of range: the images are named and counted.
    """
    accepted = replace(target, range=None).accept(index.targets, {}, f"{index.origin}: {what}", rows=True)
    if target.range is not None:
        wrong = target.range.outside(accepted)
        rows: list[int] = np.flatnonzero(wrong.reshape(len(accepted), -1).any(axis=1)).tolist()
        if rows:
            first = accepted[rows[0]][wrong[rows[0]]].flat[0]
            raise ArtifactError(
                f"{index.origin}: {len(rows)} of {len(index)} samples have {what} that the model does not have, such "
                f"as {first} ({listed([index.names[row] for row in rows])}); it takes each as {target.range}."
            )
    return ImageIndex(index.origin, index.files, index.place, index.names, accepted, index.classes)


__all__ = ["NAMED", "ImageIndex", "accept_targets", "listed"]
