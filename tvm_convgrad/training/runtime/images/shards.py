# SPDX-License-Identifier: Apache-2.0
"""Tar shards in the layout of WebDataset: `key.png` and its target `key.cls`, `key.json` or `key.npy` beside it."""

from __future__ import annotations

import io
import itertools
import json
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from tvm_convgrad.core.errors import ArtifactError, first_line
from tvm_convgrad.training.runtime.images.index import ImageIndex, listed
from tvm_convgrad.training.runtime.images.pillow import SUFFIXES
from tvm_convgrad.training.runtime.schema import Array

LABELS = ("cls", "json", "npy")
"""What the target's file ends with: a number; a number, or an object that has one as `cls` or `label`; an array."""

_ENDINGS = tuple(f".{label}" for label in LABELS)
_KEYS = ("cls", "label")
_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand(pattern: str) -> list[str]:
    """The names that braces stand for: numbers with their leading zeros, or words with commas.

    >>> expand("train-{008..010}.tar")
    ['train-008.tar', 'train-009.tar', 'train-010.tar']
    >>> expand("{a,b}-{0..1}.tar")
    ['a-0.tar', 'a-1.tar', 'b-0.tar', 'b-1.tar']
    """
    parts = _BRACES.split(pattern)
    choices = [_choices(part) if odd % 2 else [part] for odd, part in enumerate(parts)]
    return ["".join(words) for words in itertools.product(*choices)]


def _choices(text: str) -> list[str]:
    numbers = _RANGE.fullmatch(text)
    if numbers is None:
        return text.split(",")
    first, last = numbers.groups()
    width = len(first) if first.startswith("0") or len(first) == len(last) else 0
    return [f"{number:0{width}d}" for number in range(int(first), int(last) + 1)]


def is_shards(path: Path) -> bool:
    """Whether a path is of shards."""
    return path.name.endswith(".tar")


def index_shards(pattern: Path) -> ImageIndex:
    """The images of shards.

    The shards are read once, from header to header; targets are read, images are not.

    Args:
        pattern: the path of one, or of several with braces.

    Raises:
        ArtifactError: shards that are missing or damaged, images without a target or with two, targets without an image
            or that cannot be read, or targets of several shapes.
    """
    shards = expand(str(pattern))
    if not shards:
        raise ArtifactError(f"{pattern}: the braces expand to no shard; give them as {{first..last}}.")
    missing = [shard for shard in shards if not Path(shard).is_file()]
    if missing:
        raise ArtifactError(f"{pattern}: {len(missing)} of {len(shards)} shards are not there: {listed(missing)}.")
    rows: list[tuple[int, int, int]] = []
    names: list[str] = []
    targets: list[Array] = []
    faults: list[str] = []
    for number, shard in enumerate(shards):
        for key, sample in _samples(shard).items():
            name = f"{Path(shard).name}:{key}"
            fault = sample.fault
            if fault:
                faults.append(f"{name} {fault}")
                continue
            rows.append((number, *sample.images[0]))
            names.append(name)
            targets += sample.targets
    if faults:
        raise ArtifactError(
            f"{pattern}: {len(faults)} of {len(faults) + len(rows)} samples cannot be used: {listed(faults)}; a sample "
            f"is key.png (or {', '.join(SUFFIXES[1:3])}, ...) and key.{', key.'.join(LABELS[:2])} or key.{LABELS[2]}."
        )
    if not rows:
        raise ArtifactError(f"{pattern}: the shards have no samples; one is key.png and key.cls.")
    shapes = sorted({(target.shape, str(target.dtype)) for target in targets})
    if len(shapes) > 1:
        found = " and ".join(f"{dtype}{list(shape)}" for shape, dtype in shapes[:2])
        raise ArtifactError(f"{pattern}: targets are of several shapes or types, such as {found}; make them of one.")
    return ImageIndex(str(pattern), tuple(shards), np.array(rows, "int64"), names, np.stack(targets))


@dataclass
class _Sample:
    """The files of a key that have been found."""

    images: list[tuple[int, int]] = field(default_factory=list)
    targets: list[Array] = field(default_factory=list)
    wrong: str = ""

    @property
    def fault(self) -> str:
        """Why it is not a sample, or ""."""
        if self.wrong:
            return self.wrong
        if not self.images:
            return "has no image"
        if not self.targets:
            return "has no label"
        return "" if len(self.images) == len(self.targets) == 1 else "has several images or labels"


def _samples(shard: str) -> dict[str, _Sample]:
    """The samples of a shard by key, the path up to the first dot of the file's name; other members are ignored."""
    found: dict[str, _Sample] = {}
    for member, content in _members(shard):
        folder, _, file = member.name.rpartition("/")
        stem, _, ending = file.partition(".")
        ending = ending.lower()
        is_image = f".{ending}" in SUFFIXES
        if not is_image and ending not in LABELS:
            continue
        sample = found.setdefault(f"{folder}/{stem}" if folder else stem, _Sample())
        if is_image:
            sample.images.append((member.offset_data, member.size))
            continue
        try:
            sample.targets.append(_target(ending, content))
        except (ValueError, KeyError, TypeError, EOFError, OSError) as error:
            sample.wrong = f"has a label .{ending} that cannot be read ({first_line(error)})"
    return found


def _members(shard: str) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """The files of a shard, and the bytes of those that are labels."""
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                if member.isfile() and not member.name.rpartition("/")[2].startswith("."):
                    content = b""
                    if member.name.lower().endswith(_ENDINGS) and (stream := tar.extractfile(member)) is not None:
                        content = stream.read()
                    yield member, content
                tar.members = []  # type: ignore[attr-defined]  # or each member of the shard would stay in memory
        with Path(shard).open("rb") as file:
            file.seek(tar.offset)
            if not file.read(1):  # where a writer was killed between two members
                raise tarfile.ReadError("it is cut off: the mark of its end is missing")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ArtifactError(
            f"{shard}: the shard cannot be opened as a tar file that is not compressed ({first_line(error)}); write it "
            "again, or remove it from the range."
        ) from error


def _target(ending: str, content: bytes) -> Array:
    """The target in the content of a file."""
    if ending == "npy":
        return np.asarray(np.load(io.BytesIO(content), allow_pickle=False))
    if ending == "cls":
        return np.array(int(content.decode("ascii")), "int64")
    value = json.loads(content)
    if isinstance(value, dict):
        value = next((value[key] for key in _KEYS if key in value), None)
    if isinstance(value, bool) or not isinstance(value, int | float | list):
        raise ValueError("it is neither a number nor a list of them")
    return np.array(value, "int64" if isinstance(value, int) else None)


__all__ = ["LABELS", "expand", "index_shards", "is_shards"]
