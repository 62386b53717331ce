# SPDX-License-Identifier: Apache-2.0
"""Extents of an ONNX graph's inputs: numbers, the batch, and a variable for each other name of the file."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import tvm

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import Extent

if TYPE_CHECKING:  # an optional package
    from collections.abc import Collection

    import onnx

_TOOL = "python -m onnxruntime.tools.make_dynamic_shape_fixed"


@dataclass
class InputShapes:
    """The extents of the inputs, and how the file names those that are free besides the batch.

    Attributes:
        extents: of each input, by name.
        free: by the file's name of such an extent, or the input and the axis of one without, its variable.
    """

    extents: dict[str, list[Extent]] = field(default_factory=dict)
    free: dict[str | tuple[str, int], Extent] = field(default_factory=dict)

    @property
    def remedy(self) -> str:
        """What to do if the graph cannot be imported with its free axes; "" if none but the batch is free."""
        if not self.free:
            return ""
        shown = [key if isinstance(key, str) else f"axis {key[1]} of {key[0]}" for key in self.free]
        first = next(iter(self.free))
        if isinstance(first, str):
            options = f"--dim_param {shlex.quote(first)} --dim_value 64"
        else:
            options = f"--input_name {shlex.quote(first[0])} --input_shape ..."
        return (
            f" The inputs have free extents besides the batch ({', '.join(shown)}); where that is not supported, give "
            f"them numbers, such as by {_TOOL} {options}."
        )


def input_shapes(
    proto: onnx.ModelProto, initializers: Collection[str], batch: int | str | None, source: str
) -> InputShapes:
    """The shapes of all graph inputs that are no initializers.

    Args:
        batch: of axis 0 of every input: a number, "dynamic", or None for that of the file.

    Raises:
        ModelError: an input has no shape; or an axis is named as the batch of one of several inputs whose batches have
            different names, so that nobody knows whether it is the batch.
    """
    inputs = [value for value in proto.graph.input if value.name not in initializers]
    for value in inputs:
        if not value.type.tensor_type.HasField("shape") or not value.type.tensor_type.shape.dim:
            raise ModelError(
                f"{source}: input {value.name!r} has no shape; export the model with shapes of its inputs."
            )
    dims = {value.name: value.type.tensor_type.shape.dim for value in inputs}
    batches = {first.dim_param for first, *_ in dims.values() if first.dim_param}
    later = {extent.dim_param for _, *others in dims.values() for extent in others if extent.dim_param}
    if len(batches) > 1 and batches & later:
        raise ModelError(
            f"{source}: the inputs have the batches {', '.join(sorted(batches))}, one of which names another axis, "
            "too; axis 0 of every input is the batch, so export the model with one name for it."
        )
    names = _Names()
    symbolic = tvm.tirx.Var(names.unique("n", besides=later), "int64")
    found = InputShapes()
    for name, shape in dims.items():
        extents: list[Extent] = []
        for axis, extent in enumerate(shape):
            fixed = int(extent.dim_value) if extent.HasField("dim_value") and extent.dim_value > 0 else None
            if axis == 0 and batch is None:
                extents.append(fixed or symbolic)
            elif axis == 0 or extent.dim_param in batches:
                extents.append(batch if isinstance(batch, int) else symbolic)
            elif fixed is not None:
                extents.append(fixed)
            else:
                key = extent.dim_param or (name, axis)
                if key not in found.free:
                    found.free[key] = tvm.tirx.Var(names.unique(extent.dim_param or f"{name}_{axis}"), "int64")
                extents.append(found.free[key])
        found.extents[name] = extents
    return found


class _Names:
    """Names of variables as TVM prints them, each once: a manifest tells extents apart by these."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def unique(self, wanted: str, besides: Collection[str] = ()) -> str:
        """A name like `wanted` that no other variable has, and that is none of `besides`."""
        name, others = _printed(wanted), self._given.union(map(_printed, besides))
        numbered = (f"{name}_{number}" for number in itertools.count(1))
        chosen = next(each for each in itertools.chain([name], numbered) if each not in others)
        self._given.add(chosen)
        return chosen


def _printed(name: str) -> str:
    """A name as an identifier that is none of TVMScript's own, such as T and R."""
    text = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{text}" if not text or text[0].isdigit() or (len(text) == 1 and text.isupper()) else text


__all__ = ["InputShapes", "input_shapes"]
