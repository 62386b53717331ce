# SPDX-License-Identifier: Apache-2.0
"""The tensors of a compiled step as its manifest names them, and the check of the arrays that are passed to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.core.extent_limits import Limits, shown_limits
from tvm_convgrad.core.index_range import IndexRange

Array = np.ndarray[Any, Any]
SAVED = ("parameter", "frozen", "running_stat")
"""The roles of the tensors of a state that predictions depend on."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, extents (int, or the name of a symbolic extent), element type, and role in the state ("" if not of it).

    Attributes:
        range: the values that the model takes, if it uses all of them as indices; None for any.
        least: the least extent of the first axis that a training step takes.
        limits: the least and the largest value of symbolic extents, by name, where the model relies on them.
    """

    name: str
    shape: tuple[int | str, ...]
    dtype: str
    role: str = ""
    range: IndexRange | None = None
    least: int = 1
    limits: Mapping[str, Limits] = field(default_factory=dict)

    @classmethod
    def from_json(cls, entry: dict[str, Any]) -> TensorSpec:
        """Read a manifest entry."""
        found = IndexRange.from_json(entry["range"]) if "range" in entry else None
        shape, least = tuple(entry["shape"]), entry.get("least", 1)
        limits = {name: (int(low), int(high)) for name, (low, high) in entry.get("limits", {}).items()}
        return cls(entry["name"], shape, entry["dtype"], entry.get("role", ""), found, least, limits)

    def to_json(self) -> dict[str, Any]:
        """The manifest entry."""
        entry = {"name": self.name, "shape": list(self.shape), "dtype": self.dtype}
        ranged = {"range": self.range.to_json()} if self.range is not None else {}
        least = {"least": self.least} if self.least > 1 else {}
        limits = {"limits": {name: list(limits) for name, limits in self.limits.items()}} if self.limits else {}
        return entry | ({"role": self.role} if self.role else {}) | ranged | least | limits

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def check_limits(self, axis: int, extent: int, what: str) -> None:
        """Refuse an extent that is out of the limits that the model relies on.

        Args:
            axis: of this tensor.
            extent: what an array has there.
            what: how messages call the array.

        Raises:
            ArtifactError: it is out of them.
        """
        limits = self.limits.get(str(self.shape[axis]), (extent, extent)) if self.shape else (extent, extent)
        if not limits[0] <= extent <= limits[1]:
            raise ArtifactError(
                f"{what} has extent {extent} on axis {axis}, but the model was exported for {shown_limits(limits)} "
                "there, and relies on it."
            )

    def accept(self, array: Any, extents: dict[str, int], what: str, *, rows: bool = False) -> Array:
        """Return `array` as this tensor takes it: contiguous and of its element type.

        Floats may come in any float type and integers in any integer type; a float for an integer, or the other
        way round, is refused, since it is nearly always a forgotten conversion or a swapped argument. So are
        values that overflow in the conversion, and those out of `range`.

        Args:
            array: anything numpy reads.
            extents: values of the symbolic extents so far, by name; those of this array are added.
            what: how messages call the array.
            rows: the first axis is a number of samples, and free.

        Raises:
            ArtifactError: wrong rank, extent or element type, an extent out of its limits, no elements along a free
                axis other than the first, or a value that overflows or is out of range.
        """
        found = np.asarray(array)
        wanted = numpy_dtype(self.dtype)
        if _family(found.dtype) != _family(wanted):
            raise ArtifactError(
                f"{what} has element type {found.dtype}, but {self.name!r} of the model is {self}; convert it first, "
                f"such as with .astype({self.dtype!r})."
            )
        shown = f"[samples, {', '.join(map(str, self.shape[1:]))}]" if rows else str(list(self.shape))
        if found.ndim != len(self.shape):
            raise ArtifactError(
                f"{what} has {found.ndim} axes, shape {list(found.shape)}, but {self.name!r} of the model takes "
                f"{len(self.shape)}: {shown.replace(chr(39), '')}."
            )
        for axis, (actual, extent) in enumerate(zip(found.shape, self.shape, strict=True)):
            if rows and axis == 0:
                continue
            expected = extents.setdefault(extent, actual) if isinstance(extent, str) else extent
            if actual != expected:
                raise ArtifactError(
                    f"{what} has extent {actual} on axis {axis}, shape {list(found.shape)}, but {self.name!r} of the "
                    f"model takes {expected} there: {shown.replace(chr(39), '')}."
                )
            self.check_limits(axis, actual, what)
            if axis and actual == 0 and isinstance(extent, str):  # TVM's sums over no elements are not written
                raise ArtifactError(
                    f"{what} has extent 0 on axis {axis}, shape {list(found.shape)}; a free extent {extent!r} of the "
                    "model is at least 1: leave such a batch out."
                )
        with np.errstate(over="ignore"):  # reported below, with the value
            converted = np.asarray(found, wanted, order="C")
        overflows = _overflows(found, converted)
        if overflows is not None:
            place = [int(axis) for axis in np.unravel_index(np.argmax(overflows), found.shape)]
            raise ArtifactError(
                f"{what} has the value {found[tuple(place)]} at {place}, which overflows in {self.dtype}, the element "
                f"type of {self.name!r} of the model; bring the values into the range of {self.dtype} first."
            )
        refusal = "" if self.range is None else self.range.refusal(converted, what)
        if refusal:
            raise ArtifactError(refusal)
        return converted


def finite(array: Array) -> Array:
    """Where an array of floats has neither NaN nor infinity."""
    return np.asarray(np.isfinite(array if array.dtype.kind == "f" else array.astype("float32")))  # of bfloat16


def _overflows(found: Array, converted: Array) -> Array | None:
    """The index where `converted` differs from `found` because its type overflows; None if there is none."""
    if found.dtype == converted.dtype or np.can_cast(found.dtype, converted.dtype):
        return None
    if _family(found.dtype) == "integer":
        limits = np.iinfo(converted.dtype)
        wrong = np.zeros(found.shape, bool)
        # Python compares integers of any size; numpy would convert one side.
        if found.size and int(found.min()) < int(limits.min):
            wrong |= found < limits.min
        if found.size and int(found.max()) > int(limits.max):
            wrong |= found > limits.max
        return wrong if wrong.any() else None
    wrong = ~finite(converted)
    if not wrong.any():
        return None
    wrong &= finite(found)
    return wrong if wrong.any() else None


def _family(dtype: np.dtype[Any]) -> str:
    """Groups of element types that are converted to each other implicitly; bfloat16 has kind "V" in numpy."""
    if dtype.name == "bfloat16":
        return "float"
    return {"f": "float", "i": "integer", "u": "integer", "b": "boolean"}.get(dtype.kind, dtype.name)
