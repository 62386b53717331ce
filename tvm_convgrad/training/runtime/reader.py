# SPDX-License-Identifier: Apache-2.0
"""The data that a run is given by path: .npz archives, folders of images by class, and tar shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.data import Samples, load_samples
from tvm_convgrad.training.runtime.images.folder import find_part, index_folder
from tvm_convgrad.training.runtime.images.index import accept_targets
from tvm_convgrad.training.runtime.images.options import ImageOptions
from tvm_convgrad.training.runtime.images.recipe import Recipe
from tvm_convgrad.training.runtime.images.shards import index_shards, is_shards
from tvm_convgrad.training.runtime.images.source import ImageSource, Note, open_images
from tvm_convgrad.training.runtime.session import Session


@dataclass
class Reader:
    """Reads the parts of a run's data: "train" first, as it gives the classes their numbers.

    Attributes:
        session: of the step that takes the data.
        images: how images are prepared.
        note: called with the progress of decoding the images, before the run.
        opened: what has been read, for `close`.
    """

    session: Session
    images: ImageOptions
    note: Note | None = None

    def __post_init__(self) -> None:
        self.opened: list[Samples | ImageSource] = []
        self._classes: Sequence[str] | None = None

    def read(self, path: Path, part: str, *, given: bool) -> Samples | ImageSource | None:
        """The samples of a part.

        Args:
            path: an .npz archive, a folder, or tar shards.
            part: "train", "val" or "test".
            given: whether the path was given for this part; else it is that of the training data, which may have it.

        Returns:
            None if the path has no such part, and was not given for it.

        Raises:
            ArtifactError: the data are missing or damaged, or do not fit the step.
            UnsupportedError: the step takes no images, or not as they are to be prepared.
            SetupError: Pillow is not installed.
        """
        found = self._read(path, part, given=given)
        if found is not None:
            self.opened.append(found)
        return found

    def check_options_are_used(self) -> None:
        """Refuse what is to be done to images where all that was read are arrays, which are taken as they are.

        Raises:
            ArtifactError: it names the options.
        """
        unused, given = ImageOptions(), self.images
        changed = [
            option
            for option, name in (
                ("--mean", "mean"),
                ("--std", "std"),
                ("--fit", "fit"),
                ("--convert-channels", "convert"),
                ("--augment", "augment"),
            )
            if getattr(given, name) != getattr(unused, name)
        ]
        if changed and not any(isinstance(each, ImageSource) for each in self.opened):
            raise ArtifactError(
                f"{', '.join(changed)}: for images in folders and tar shards, but the data are arrays, which are taken "
                "as they are; leave it out, and prepare the arrays."
            )

    def close(self) -> None:
        """End the processes that sources have started."""
        for source in self.opened:
            source.close()

    def _read(self, path: Path, part: str, *, given: bool) -> Samples | ImageSource | None:
        session = self.session
        if is_shards(path):
            if not given:
                return None
            index = index_shards(path)
        elif path.is_dir():
            folder = find_part(path, part, plain=given)
            if folder is None and given and part == "train":
                raise ArtifactError(f"{path}: it has folders of validation or test images, but none called train.")
            if folder is None:
                return None
            index = index_folder(folder, self._classes)
        else:
            return load_samples(path, session.inputs, session.target, part, plain=given)
        recipe = Recipe.of(session.inputs, session.target, self.images, session.artifact.options)
        what = "class numbers" if session.classes is not None else "targets"
        if session.classes is not None and len(index.classes) > session.classes:
            raise ArtifactError(
                f"{index.origin}: there are {len(index.classes)} classes, but the model predicts {session.classes}; "
                "give so many folders at most, or a model with more classes."
            )
        if part == "train":
            self._classes = index.classes or None
        index = accept_targets(index, session.target, what)
        return open_images(index, recipe, self.images, part, self.note)


__all__ = ["Reader"]
