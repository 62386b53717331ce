# SPDX-License-Identifier: Apache-2.0
"""TVM's importer of ONNX, with our converters where TVM's lower to loops, lack modes or are wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from tvm_convgrad.core.errors import UnsupportedError, first_line
from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.frontends.onnx.operators import (
    elementwise,
    indexing,
    norms,
    recurrent,
    reductions,
    resize,
    sampling,
    spectra,
    windows,
)
from tvm_convgrad.training.frontends.onnx.places import place_of
from tvm_convgrad.training.ir.graph import Extent, bindings_of, operator_name

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

ONNX_DOMAINS = ("", "ai.onnx")
"""Domains of ONNX's own operators."""

_PAD_MODES = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}
_OURS = "tvm_custom"


def imported_module(
    frontend: ModuleType, proto: onnx.ModelProto, shapes: dict[str, list[Extent]]
) -> tuple[tvm.IRModule, dict[str, str]]:
    """The Relax module of a graph, and by operator of Relax the node that made the first call of it.

    Args:
        frontend: tvm.relax.frontend.onnx.onnx_frontend, which imports the optional package onnx.
        proto: the model.
        shapes: extents of the inputs by name.
    """

    current = [""]
    places = {node.name: place_of(node) for node in reversed(proto.graph.node)}
    ends: dict[relax.Var, str] = {}

    class Importer(frontend.ONNXGraphImporter):  # type: ignore[name-defined]
        """TVM's importer with converters of ours."""

        def _check_for_unsupported_ops(self, graph: onnx.GraphProto) -> None:
            """Does nothing: the caller has used `supported`."""

        def _convert_operator(
            self, op_name: str, inputs: Sequence[relax.Expr | None], attrs: dict[str, Any], opset: int
        ) -> relax.Expr:
            current[0] = f"{op_name} {places.get(attrs[_OURS]['name'], '')}".strip()
            converter = CONVERTERS.get(op_name)
            found = None
            if converter is not None:
                own = attrs[_OURS]
                stated = {name: value for name, value in attrs.items() if name != _OURS}
                found = converter(
                    Node(
                        op_name, places.get(own["name"], ""), self.bb, tuple(inputs), stated, opset, own["num_outputs"]
                    )
                )
            if found is None:
                found = super()._convert_operator(op_name, inputs, attrs, opset)
            if isinstance(found, (relax.Call, relax.TupleGetItem)):
                found = self.bb.emit(found)
            elif isinstance(found, relax.Tuple):
                found = relax.Tuple([self.bb.emit(each) if isinstance(each, relax.Call) else each for each in found])
            for each in found if isinstance(found, relax.Tuple) else [found]:
                if isinstance(each, relax.Var):
                    ends.setdefault(each, current[0])
            return found

    versions = [entry.version for entry in proto.opset_import if entry.domain in ONNX_DOMAINS]
    importer = Importer(shapes, None, keep_params_in_input=True, sanitize=False)
    try:
        module: tvm.IRModule = importer.from_onnx(proto.graph, max(versions, default=1))
    except UnsupportedError:
        raise
    except Exception as error:  # TVM's importer raises every kind
        where = f" ({current[0]})" if current[0] else ""
        raise UnsupportedError(f"TVM's ONNX importer fails: {first_line(error)}{where}") from error
    return module, _origins(module, ends)


def _origins(module: tvm.IRModule, ends: Mapping[relax.Var, str]) -> dict[str, str]:
    """By operator of Relax the node of its first call: `ends` has nodes by the variables that are their results."""
    found: dict[str, str] = {}
    pending: list[str] = []
    known = {extent for param in module["main"].params for extent in _symbols(param)}
    for binding in bindings_of(module["main"]):
        if isinstance(binding.value, tvm.ir.Call):
            pending.append(operator_name(binding.value))
        if binding.var in ends:
            if not known.issuperset(_symbols(binding.var)):
                raise UnsupportedError(f"{ends[binding.var]}: {_why_unknown(binding.value, known)}")
            for name in pending:
                found.setdefault(name, ends[binding.var])
            pending = []
    return found


def _why_unknown(value: relax.Expr, known: set[tvm.tirx.Var | None]) -> str:
    """Why the extents of a node's result are not `known`, and what to do."""
    arguments = value.args if isinstance(value, tvm.ir.Call) else []
    fields = [each for one in arguments for each in (one.fields if isinstance(one, relax.Tuple) else [one])]
    operands = [each for each in fields if isinstance(each.ty, relax.TensorType)]
    if len(operands) > 1 and all(known.issuperset(_symbols(operand)) for operand in operands):
        shapes = " and ".join(f"[{', '.join(map(str, known_extents(operand)))}]" for operand in operands)
        return (
            f"its operands have the extents {shapes}, which are not the same for all values of the free ones; free "
            "fewer of them, or make them equal in the model"
        )
    return (
        "the extents of its result depend on values, and a step is built for extents that are known before; keep all "
        "elements and mask those that do not count"
    )


def _symbols(tensor: relax.Var) -> list[tvm.tirx.Var | None]:
    """The extents of a tensor that are variables by themselves; one None if its extents are not known at all."""
    if not isinstance(tensor.ty, relax.TensorType):
        return []
    if not hasattr(tensor.ty.shape, "values"):
        return [None]
    return [extent for extent in tensor.ty.shape.values if isinstance(extent, tvm.tirx.Var)]


def supported(frontend: ModuleType) -> set[str]:
    """The operators that can be imported."""
    return {*frontend._get_convert_map(), *CONVERTERS, "Constant"}


def pad(node: Node) -> relax.Expr | None:
    """Pad with constant widths, in all modes; up to opset 10 the widths are an attribute."""
    data = node.tensor()
    stated = node.attributes.get("pads")
    widths = node.value(1) if stated is None else np.array(stated)
    fill, axes = node.value(2), node.value(3)
    rank, mode = data.ty.ndim, _PAD_MODES.get(node.text("mode", "constant"))
    if not node.is_constant(1, 2, 3) or widths is None or rank < 0 or mode is None or not node.is_float():
        return None
    before, after = np.split(widths.astype("int64"), 2)
    places = range(rank) if axes is None else [int(axis) % rank for axis in axes]
    flat = [0] * (2 * rank)
    for place, low, high in zip(places, before, after, strict=True):
        flat[2 * place : 2 * place + 2] = int(low), int(high)
    value = node.number("value", 0.0) if fill is None else float(fill.item())
    return op.nn.pad(data, flat, pad_mode=mode, pad_value=value)


def tile(node: Node) -> relax.Expr | None:
    """Tile by constant counts."""
    counts = node.value(1)
    return None if counts is None else op.tile(node.tensor(), [int(count) for count in counts])


CONVERTERS: dict[str, Converter] = {
    "Pad": pad,
    "Tile": tile,
    **elementwise.CONVERTERS,
    **indexing.CONVERTERS,
    **norms.CONVERTERS,
    **recurrent.CONVERTERS,
    **reductions.CONVERTERS,
    **resize.CONVERTERS,
    **sampling.CONVERTERS,
    **spectra.CONVERTERS,
    **windows.CONVERTERS,
}
"""By operator of ONNX."""


__all__ = ["ONNX_DOMAINS", "imported_module", "supported"]
