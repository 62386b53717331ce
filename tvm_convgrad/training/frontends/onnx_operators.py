# SPDX-License-Identifier: Apache-2.0
"""Operators of ONNX as operators of Relax that have gradients, where TVM's importer lowers them to loops at once.

A converter gets the builder, the operands (constants among them) and the attributes of a node, and
returns an expression, or None for what is left to TVM's own converter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from tvm_convgrad.training.ir.graph import Extent

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

ONNX_DOMAINS = ("", "ai.onnx")
"""Domains of ONNX's own operators."""

Attribute: TypeAlias = "int | float | bytes | tuple[int, ...] | tuple[float, ...]"
Converter: TypeAlias = Callable[
    [relax.BlockBuilder, Sequence["relax.Expr | None"], dict[str, Attribute]], "relax.Expr | None"
]

_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def imported_module(frontend: ModuleType, proto: onnx.ModelProto, shapes: dict[str, list[Extent]]) -> tvm.IRModule:
    """The Relax module of a graph: TVM's importer, with the converters of this file before its own.

    Args:
        frontend: tvm.relax.frontend.onnx.onnx_frontend, which imports the optional package onnx.
        proto: the model.
        shapes: extents of the inputs by name.
    """

    class Importer(frontend.ONNXGraphImporter):  # type: ignore[name-defined]
        """TVM's importer with converters of ours."""

        def _convert_operator(
            self, op_name: str, inputs: Sequence[relax.Expr | None], attrs: dict[str, Attribute], opset: int
        ) -> relax.Expr:
            converter = CONVERTERS.get(op_name)
            found = converter(self.bb, [*inputs], attrs) if converter else None
            return super()._convert_operator(op_name, inputs, attrs, opset) if found is None else self.bb.emit(found)

    versions = [entry.version for entry in proto.opset_import if entry.domain in ONNX_DOMAINS]
    importer = Importer(shapes, None, keep_params_in_input=True, sanitize=False)
    module: tvm.IRModule = importer.from_onnx(proto.graph, max(versions, default=1))
    return module


def _value(operands: Sequence[relax.Expr | None], position: int) -> npt.NDArray[np.generic] | None:
    """The value of a constant operand; None if there is no such operand or it is no constant."""
    operand = operands[position] if len(operands) > position else None
    return array_of(operand) if isinstance(operand, Constant) else None


def _is_given(operands: Sequence[relax.Expr | None], position: int) -> bool:
    return len(operands) > position and operands[position] is not None


def _is_float(operand: relax.Expr) -> bool:
    return str(operand.ty.dtype).startswith(("float", "bfloat"))


def clip(
    _builder: relax.BlockBuilder, operands: Sequence[relax.Expr | None], attributes: dict[str, Attribute]
) -> relax.Expr | None:
    """Clip, whose bounds were attributes up to opset 10."""
    data = operands[0]
    assert data is not None
    bounds = []
    for position, name, none in ((1, "min", -np.inf), (2, "max", np.inf)):
        value = _value(operands, position)
        if _is_given(operands, position) and (value is None or np.isnan(value).any()):
            return None
        stated = attributes.get(name, none)
        assert isinstance(stated, int | float)
        bounds.append(float(stated) if value is None else float(value.item()))
    return op.clip(data, bounds[0], bounds[1]) if _is_float(data) else None


def pad(
    _builder: relax.BlockBuilder, operands: Sequence[relax.Expr | None], attributes: dict[str, Attribute]
) -> relax.Expr | None:
    """Pad with constant widths, in all modes."""
    data, widths, fill, axes = operands[0], _value(operands, 1), _value(operands, 2), _value(operands, 3)
    assert data is not None
    rank = data.ty.ndim
    unknown = any(_is_given(operands, at) and value is None for at, value in ((1, widths), (2, fill), (3, axes)))
    mode = _PAD_MODES.get(_text(attributes, "mode", "constant"))
    if unknown or widths is None or rank < 0 or mode is None or not _is_float(data):
        return None
    before, after = np.split(widths.astype("int64"), 2)
    places = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    flat = [0] * (2 * rank)
    for place, low, high in zip(places, before, after, strict=True):
        flat[2 * place : 2 * place + 2] = int(low), int(high)
    return op.nn.pad(data, flat, pad_mode=mode, pad_value=0.0 if fill is None else float(fill.item()))


def tile(
    _builder: relax.BlockBuilder, operands: Sequence[relax.Expr | None], _attributes: dict[str, Attribute]
) -> relax.Expr | None:
    """Tile by constant counts."""
    counts = _value(operands, 1)
    return None if counts is None else op.tile(operands[0], [int(count) for count in counts])


def _text(attributes: dict[str, Attribute], name: str, default: str) -> str:
    value = attributes.get(name)
    return value.decode() if isinstance(value, bytes) else default


CONVERTERS: dict[str, Converter] = {"Clip": clip, "Pad": pad, "Tile": tile}
"""By operator of ONNX."""


__all__ = ["ONNX_DOMAINS", "imported_module"]
