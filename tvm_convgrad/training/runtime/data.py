# SPDX-License-Identifier: Apache-2.0
"""Training and test arrays from .npz files, checked against what a compiled step takes."""

from __future__ import annotations

import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.schema import Array, TensorSpec
from tvm_convgrad.training.runtime.source import Batch, Order


@dataclass(frozen=True)
class Samples:
    """Inputs and targets in memory, with one sample a row; a `Source`."""

    inputs: tuple[Array, ...]
    target: Array

    def __len__(self) -> int:
        return len(self.target)

    @property
    def digest(self) -> str:
        """SHA-256 of all arrays, in hex."""
        digest = hashlib.sha256()
        for array in (*self.inputs, self.target):
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(array.tobytes())
        return digest.hexdigest()

    def rows(self, index: Array) -> tuple[tuple[Array, ...], Array]:
        """The inputs and targets of the samples `index`."""
        return tuple(array[index] for array in self.inputs), self.target[index]

    def steps(self, size: int, total: int = 1) -> int:
        """The updates of an epoch."""
        return len(self) // (size * total)

    def batches(self, order: Order, start: int = 0) -> Iterator[Batch]:
        """What the rank has in each update of an epoch, from number `start` on."""
        for numbers in order.numbers(len(self))[start:]:
            yield Batch(*self.rows(numbers), numbers)

    def in_order(self, size: int, rank: int = 0, ranks: int = 1) -> Iterator[Batch]:
        """All samples, `size` at a time, shared out among ranks."""
        for start in range(rank * size, len(self), ranks * size):
            numbers = np.arange(start, min(start + size, len(self)))
            yield Batch(*self.rows(numbers), numbers)

    def name(self, number: int) -> str:
        """The name of a sample: its number."""
        return str(number)

    def close(self) -> None:
        """Nothing needs to be closed."""


def load_samples(
    path: Path,
    inputs: Iterable[TensorSpec],
    target: TensorSpec,
    part: str,
    *,
    plain: bool | None = None,
) -> Samples | None:
    """Read the samples of `part` ("train", "val" or "test") from the .npz file at `path`.

    The input named `image` is the array `image_train`, or else `image` (training only); the only
    input may also be called `x_train` or `x`. The target is called `y_train`, `y`, or its own name.

    Args:
        plain: whether names without a part, such as `x`, are of this one; default: for "train" only.

    Returns:
        The samples; None if `part` is not "train" and the file has no arrays of it at all.

    Raises:
        ArtifactError: the file is missing, is not a .npz, is truncated, lacks an array, or an array has no rows, does
            not fit the model, or has a value out of range.
    """
    specs = list(inputs)
    aliases = ["x"] if len(specs) == 1 else []
    arrays = _read(path)
    found: list[Array] = []
    for spec, names in [*((s, [s.name, *aliases]) for s in specs), (target, ["y", target.name])]:
        keys = [f"{name}_{part}" for name in names] + (names if (part == "train" if plain is None else plain) else [])
        key = next((key for key in keys if key in arrays), None)
        if key is None:
            if part != "train" and not found:
                return None
            raise ArtifactError(
                f"{path}: no array for {spec.name!r} of the model; it is called one of "
                f"{', '.join(dict.fromkeys(keys))}, and the file has {', '.join(arrays) or 'no array'}."
            )
        found.append(spec.accept(arrays[key], {}, f"{path}: array {key!r}", rows=True))
    lengths = {len(array) for array in found}
    if len(lengths) != 1:
        raise ArtifactError(
            f"{path}: the {part} arrays have different numbers of samples, {sorted(lengths)}; each row of the input "
            "needs its row of the target."
        )
    if not len(found[-1]):
        raise ArtifactError(f"{path}: the {part} arrays have no samples; give at least one, or leave the arrays out.")
    return Samples(tuple(found[:-1]), found[-1])


def random_samples(inputs: Iterable[TensorSpec], target: TensorSpec, classes: int | None, count: int) -> Samples:
    """Samples of normally distributed numbers, indices in range, and class numbers for such a target; always the same.

    Integers that are no indices are 0 and 1.

    Raises:
        ArtifactError: an extent besides the batch is free.
    """
    random = np.random.default_rng(0)

    def draw(spec: TensorSpec, most: int | None) -> Array:
        free = [str(extent) for extent in spec.shape[1:] if not isinstance(extent, int)]
        if free:
            raise ArtifactError(
                f"{spec.name!r} of the model has free extents besides the batch ({', '.join(free)}), which random data "
                "do not give; pass data of the extents that you train on (--data)."
            )
        shape = [count, *(int(extent) for extent in spec.shape[1:])]
        if spec.dtype.startswith(("int", "uint", "bool")):
            indices = 2 if spec.range is None else max(spec.range.high + 1, 1)
            return random.integers(0, most or indices, shape).astype(numpy_dtype(spec.dtype))
        return random.standard_normal(shape).astype(numpy_dtype(spec.dtype))

    return Samples(tuple(draw(spec, None) for spec in inputs), draw(target, classes))


def _read(path: Path) -> dict[str, Array]:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ArtifactError(f"{path}: a single array, not an .npz archive; write it with numpy.savez.")
        with archive:
            return {key: archive[key] for key in archive.files}
    except FileNotFoundError:
        raise ArtifactError(
            f"{path}: no such data file; give an .npz archive with x_train and y_train, a folder of images by "
            "class, or tar shards."
        ) from None
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, zlib.error) as error:
        if isinstance(error, ArtifactError):
            raise
        # of a file that is not an archive numpy says how to load it unsafely
        reason = error if isinstance(error, OSError) or zipfile.is_zipfile(path) else "no zip archive"
        raise ArtifactError(
            f"{path}: not an .npz archive of plain arrays, or a damaged one ({reason}); write it with numpy.savez."
        ) from error
