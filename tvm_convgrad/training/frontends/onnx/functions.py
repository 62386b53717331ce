# SPDX-License-Identifier: Apache-2.0
"""Functions in ONNX graphs written out: those of the file, and operators that the standard defines as functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ModelError, first_line

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_OWN = ("", "ai.onnx")
DEFINED = frozenset(
    {
        "Attention",
        "CenterCropPad",
        "MeanVarianceNormalization",
        "NegativeLogLikelihoodLoss",
        "RotaryEmbedding",
        "SoftmaxCrossEntropyLoss",
        "SwiGLU",
    }
)
"""Operators that are written out by the standard's definition."""


def with_written_functions(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """The model without calls of functions.

    Raises:
        ModelError: a function of the file cannot be written out.
    """
    from onnx import inliner

    if proto.functions:
        try:
            proto = inliner.inline_local_functions(proto)
        except Exception as error:  # onnx raises every kind
            raise ModelError(f"{source}: its functions cannot be inlined ({first_line(error)}).") from error
    while any(_is_written(node) for node in proto.graph.node):  # a definition may call another one
        proto = _written(proto)
    return proto


def _is_written(node: onnx.NodeProto) -> bool:
    return node.op_type in DEFINED and node.domain in _OWN


def _written(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with each node of these operators replaced by the nodes of its definition.

    Raises:
        ModelError: onnx has no definition for the opset of the file.
    """
    import onnx

    inferred = onnx.shape_inference.infer_shapes(proto, data_prop=True).graph
    types = {value.name: value.type for value in (*inferred.value_info, *inferred.input, *inferred.output)}
    for tensor in proto.graph.initializer:
        types[tensor.name] = onnx.helper.make_tensor_type_proto(tensor.data_type, tensor.dims)
    opset = max((entry.version for entry in proto.opset_import if entry.domain in _OWN), default=1)
    copy = type(proto)()
    copy.CopyFrom(proto)
    del copy.graph.node[:]
    for place, node in enumerate(proto.graph.node):
        if _is_written(node):
            copy.graph.node.extend(_called(node, _definition(node, opset, types), opset, f"_{node.op_type}_{place}_"))
        else:
            copy.graph.node.append(node)
    return copy


def _definition(node: onnx.NodeProto, opset: int, types: dict[str, onnx.TypeProto]) -> onnx.FunctionProto:
    """The standard's definition of a node's operator for its attributes and operands."""
    import onnx

    schema = onnx.defs.get_schema(node.op_type, opset, "")
    body = onnx.FunctionProto()
    by_context = schema.has_context_dependent_function
    known = schema.context_dependent_function_opset_versions if by_context else schema.function_opset_versions
    version = max((each for each in known if each <= opset), default=None)
    if version is None:  # the definition in operators of a newer one, whose attributes may be inputs
        raise ModelError(f"{node.op_type} {node.name!r}: onnx does not define it for opset {opset}; use a newer one.")
    if by_context:
        inputs = [types.get(name, onnx.TypeProto()).SerializeToString() for name in node.input]
        body.ParseFromString(
            schema.get_context_dependent_function_with_opset_version(version, node.SerializeToString(), inputs)
        )
    else:
        body.ParseFromString(schema.get_function_with_opset_version(version))
    if not body.node:
        raise ModelError(
            f"{node.op_type} {node.name!r}: the types of its operands are unknown, and its definition depends on "
            "them; export the model with shapes of its inputs."
        )
    return body


def _called(node: onnx.NodeProto, body: onnx.FunctionProto, opset: int, prefix: str) -> list[onnx.NodeProto]:
    """The nodes of a definition, with the node's operands, results, attributes (or their defaults) and notes."""
    import onnx

    names = dict(zip(body.input, node.input, strict=False))
    names |= dict.fromkeys(body.input[len(node.input) :], "")
    names |= {name: given for name, given in zip(body.output, node.output, strict=False) if given}
    schema = onnx.defs.get_schema(node.op_type, opset, "")
    defaults = [each.default_value for each in schema.attributes.values() if each.default_value.type]
    stated = {attribute.name: attribute for attribute in (*defaults, *body.attribute_proto, *node.attribute)}
    written = []
    for inner in body.node:
        fresh = onnx.NodeProto()
        fresh.CopyFrom(inner)
        fresh.name = node.name
        fresh.input[:] = [names.get(name, prefix + name) if name else "" for name in inner.input]
        fresh.output[:] = [names.get(name, prefix + name) if name else "" for name in inner.output]
        del fresh.attribute[:]
        for attribute in inner.attribute:
            if not attribute.ref_attr_name:
                fresh.attribute.append(attribute)
            elif attribute.ref_attr_name in stated:
                value = fresh.attribute.add()
                value.CopyFrom(stated[attribute.ref_attr_name])
                value.name = attribute.name
        fresh.metadata_props.extend(node.metadata_props)
        written.append(fresh)
    return written
