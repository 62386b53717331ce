# SPDX-License-Identifier: Apache-2.0
"""Arrays in memory that this process shares with others that it starts."""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.rounding import round_up
from tvm_convgrad.training.runtime.arrays import ALIGNMENT
from tvm_convgrad.training.runtime.schema import Array

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Extents and element type of arrays by name."""


@dataclass(frozen=True)
class SharedArrays:
    """Arrays by name in one anonymous file of the kernel, which ends with the last process that has it open.

    It is a memfd and not a file of /dev/shm, which containers keep small, and which a killed process leaves behind.
    Memory is taken when it is first written to. Each array begins at a multiple of 64 bytes, as kernels want it.

    Attributes:
        descriptor: of the file; a child that is given it, and `shapes`, has the same arrays.
        shapes: of the arrays.
        arrays: by name.
    """

    descriptor: int
    shapes: dict[str, tuple[tuple[int, ...], str]]
    arrays: dict[str, Array]

    @classmethod
    def make(cls, shapes: Shapes) -> SharedArrays:
        """New arrays, filled with zeros.

        Raises:
            SetupError: the kernel has no memory for them.
        """
        size = sum(_bytes(*each) for each in shapes.values())
        descriptor = os.memfd_create("convgrad-images")
        try:
            os.truncate(descriptor, max(size, 1))
            return cls.attach(descriptor, shapes)
        except OSError as error:
            os.close(descriptor)
            raise SetupError(
                f"{size:,} bytes of shared memory for images cannot be allocated ({error.strerror})."
            ) from error

    @classmethod
    def attach(cls, descriptor: int, shapes: Shapes) -> SharedArrays:
        """The arrays of another process in its file."""
        memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size)
        arrays: dict[str, Array] = {}
        offset = 0
        for name, (shape, dtype) in shapes.items():
            kind = numpy_dtype(dtype)
            count = int(np.prod(shape, dtype="int64"))
            arrays[name] = np.frombuffer(memory, kind, count, offset).reshape(shape)
            offset += _bytes(shape, dtype)
        return cls(descriptor, {name: (tuple(shape), dtype) for name, (shape, dtype) in shapes.items()}, arrays)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` of a child takes that was given the descriptor."""
        return {"descriptor": self.descriptor, "shapes": self.shapes}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> SharedArrays:
        """The arrays of the parent."""
        return cls.attach(
            found["descriptor"], {name: (tuple(s), dtype) for name, (s, dtype) in found["shapes"].items()}
        )

    def close(self) -> None:
        """Close the file; the memory goes when the last array of it does."""
        os.close(self.descriptor)


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    """The place of an array, up to where the next may begin."""
    size = int(np.prod(shape, dtype="int64")) * numpy_dtype(dtype).itemsize
    return round_up(size, ALIGNMENT)


__all__ = ["SharedArrays"]
