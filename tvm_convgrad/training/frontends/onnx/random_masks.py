# SPDX-License-Identifier: Apache-2.0
"""Random masks of ONNX graphs as Dropout nodes, which a step makes seeded masks and `predict` the identity.

torch.onnx.export writes what PyTorch decomposes to `bernoulli` in train mode (dropout of every flavour, DropPath,
StochasticDepth) as a comparison of uniform numbers,

    Cast(Less(RandomUniformLike(t), p))                  ones with probability p, then Div by p and Mul
    Floor(Add(RandomUniformLike(t), p))                  the same, as the first EfficientNets write it

or as a Bernoulli node. With optimize=False its casts are CastLike, and the first of them reads the uniform numbers for
their type. Each becomes Dropout(ones, ratio = 1 - p) p: ones and zeros in a step, and p in `predict`, so
that the quotient is 1 there.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import tvm
from tvm import relax

from relax_ops.compat import Constant
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import Environment, bindings_of

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_RANDOM = ("RandomUniform", "RandomUniformLike", "RandomNormal", "RandomNormalLike", "Bernoulli", "Multinomial")
_FLOATS = (1, 10, 11)  # TensorProto's float, float16, double
_COMPARISONS = {"Less": 1, "LessOrEqual": 1, "Greater": 0, "GreaterOrEqual": 0}
"""Comparisons of uniform numbers u with p that are true with probability p (u < p, p > u), and the place of p."""


@dataclass(frozen=True)
class _Mask:
    """A random mask: the node that draws it, the one whose result it is, and the name of its probability."""

    drawn: onnx.NodeProto
    result: onnx.NodeProto
    compared: onnx.NodeProto | None
    probability: str


def with_dropout(proto: onnx.ModelProto, source: str) -> onnx.ModelProto:
    """The model with Dropout nodes in the place of random masks; others are left as they are.

    Raises:
        ModelError: random numbers that are no such mask.
    """
    if not any(node.op_type in _RANDOM for node in proto.graph.node):
        return proto
    proto = _with_casts(proto)
    graph = _Graph(proto)
    masks = [graph.mask(node, source) for node in proto.graph.node if node.op_type in _RANDOM]
    copy = type(proto)()
    copy.CopyFrom(proto)
    results = {mask.result.output[0]: mask for mask in masks}
    gone = {node.output[0] for mask in masks for node in (mask.drawn, mask.compared) if node is not None}
    del copy.graph.node[:]
    for node in proto.graph.node:
        if node.output and node.output[0] in results:
            copy.graph.node.extend(graph.written(results[node.output[0]]))
        elif not node.output or node.output[0] not in gone:
            copy.graph.node.append(node)
    return copy


def _with_casts(proto: onnx.ModelProto) -> onnx.ModelProto:
    """The model with a Cast for each CastLike whose type is known."""
    import onnx

    if not any(node.op_type == "CastLike" for node in proto.graph.node):
        return proto
    inferred = onnx.shape_inference.infer_shapes(proto).graph
    types = {
        value.name: value.type.tensor_type.elem_type
        for value in (*inferred.value_info, *inferred.input, *inferred.output)
    }
    types |= {tensor.name: tensor.data_type for tensor in proto.graph.initializer}
    copy = type(proto)()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        if node.op_type == "CastLike" and types.get(node.input[1]):
            node.attribute.append(onnx.helper.make_attribute("to", types[node.input.pop()]))
            node.op_type = "Cast"
    return copy


class HeldMasks:
    """Keeps TVM from evaluating dropout of constants: the mask of ones of a graph with a fixed batch.

    relax.transform.FoldConstant takes dropout for the identity. Until `released` such dropouts are of a product with a
    parameter, `one`.
    """

    def __init__(self, function: relax.Function) -> None:
        self.one = relax.Var("convgrad_one", relax.TensorType((), "float32"))
        self._known: set[relax.Var] = set()
        for binding in bindings_of(function):
            if self._known.issuperset(relax.analysis.free_vars(binding.value)):
                self._known.add(binding.var)

    def rewrite(self, builder: relax.BlockBuilder, call: relax.Call, environment: Environment) -> relax.Expr:
        """The dropout, held if its data follow from constants."""
        data = call.args[0]
        if not isinstance(data, Constant) and data not in {environment[var] for var in self._known}:
            return call
        one = self.one if data.ty.dtype == "float32" else builder.emit(relax.op.astype(self.one, data.ty.dtype))
        held = builder.emit(relax.op.multiply(data, one))
        return relax.Call(call.op, [held], call.attrs)

    def released(self, module: tvm.IRModule) -> tvm.IRModule:
        """The module with a one for the parameter."""
        return relax.transform.BindParams("main", {self.one: tvm.runtime.tensor(np.float32(1))})(module)


class _Graph:
    """A graph that is searched for random masks."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._made = {output: node for node in proto.graph.node for output in node.output}
        self._initializers = {tensor.name: tensor for tensor in proto.graph.initializer}
        self._reads = Counter(name for node in proto.graph.node for name in node.input)
        self._readers = {name: node for node in proto.graph.node for name in node.input}

    def mask(self, node: onnx.NodeProto, source: str) -> _Mask:
        """The mask that a node draws.

        Raises:
            ModelError: it draws something else.
        """
        found = self._mask(node)
        if isinstance(found, _Mask):
            return found
        raise ModelError(
            f"{source}: {node.op_type} (node {node.name or node.output[0]!r}) is not the mask of a dropout, {found}; a "
            "step draws no other random numbers. Make them an input of the model, or export it in eval mode."
        )

    def _mask(self, node: onnx.NodeProto) -> _Mask | str:
        """The mask that a node draws, or why it draws none."""
        if node.op_type == "Bernoulli":
            filled = self._filled(node.input[0])
            return _Mask(node, node, None, filled) if filled else "its probabilities are not a single constant"
        if not node.op_type.startswith("RandomUniform"):
            return "its numbers are not uniform"
        attributes = {attribute.name: attribute.f for attribute in node.attribute}
        if attributes.get("low", 0.0) != 0 or attributes.get("high", 1.0) != 1:
            return "its numbers are not between 0 and 1"
        compared = self._only_reader(node.output[0])
        floor = self._only_reader(compared.output[0]) if compared is not None and compared.op_type == "Add" else None
        if compared is not None and floor is not None and floor.op_type == "Floor":
            added = compared.input[1 if compared.input[0] == node.output[0] else 0]
            constant = self._constant(added) is not None
            return _Mask(node, floor, compared, added) if constant else "the probability is not a constant"
        if compared is None or compared.op_type not in _COMPARISONS:
            return "its numbers are not compared with a probability"
        place = _COMPARISONS[compared.op_type]
        if compared.input[1 - place] != node.output[0]:
            return "the comparison is true where its numbers are above the constant"
        cast = self._only_reader(compared.output[0])
        if cast is None or cast.op_type != "Cast" or _type_of(cast) not in _FLOATS:
            return "the comparison does not become a number"
        if self._constant(compared.input[place]) is None:
            return "the probability is not a constant"
        return _Mask(node, cast, compared, compared.input[place])

    def _only_reader(self, name: str) -> onnx.NodeProto | None:
        return self._readers[name] if self._reads[name] == 1 else None

    def _filled(self, name: str) -> str:
        """The name of the constant that a tensor is filled with, "" if it is not."""
        node = self._made.get(name)
        return node.input[0] if node is not None and node.op_type == "Expand" and self._constant(node.input[0]) else ""

    def _constant(self, name: str) -> float | None:
        """The value of a tensor of one element that is known, None if it is not."""
        from onnx import numpy_helper

        tensor, node = self._initializers.get(name), self._made.get(name)
        if node is not None and node.op_type in ("Cast", "CastLike", "Identity"):
            return self._constant(node.input[0])
        if node is not None and node.op_type == "Constant":
            (stated,) = node.attribute
            if stated.name == "value_float":
                return stated.f
            tensor = stated.t if stated.name == "value" else None
        value = None if tensor is None else numpy_helper.to_array(tensor)
        return float(value.reshape(-1)[0]) if value is not None and value.size == 1 else None

    def written(self, mask: _Mask) -> list[onnx.NodeProto]:
        """The nodes whose last result is the mask."""
        from onnx import helper, numpy_helper

        name, notes = mask.result.output[0], mask.drawn.metadata_props
        rate = self._constant(mask.probability)
        assert rate is not None
        kind = _type_of(mask.result) or _type_of(mask.drawn) or 1
        ones, ratio = (np.array([1.0]), np.array(1.0 - rate, "float32"))
        of_kind = helper.tensor_dtype_to_np_dtype(kind)
        shape = next((list(attribute.ints) for attribute in mask.drawn.attribute if attribute.name == "shape"), None)
        extents = None if shape is None else numpy_helper.from_array(np.array(shape, "int64"))
        nodes = [
            helper.make_node("Shape", [mask.drawn.input[0]], [f"{name}.extents"], f"{name}.extents")
            if extents is None
            else helper.make_node("Constant", [], [f"{name}.extents"], f"{name}.extents", value=extents),
            helper.make_node(
                "ConstantOfShape",
                [f"{name}.extents"],
                [f"{name}.ones"],
                f"{name}.ones",
                value=numpy_helper.from_array(ones.astype(of_kind)),
            ),
            helper.make_node("Constant", [], [f"{name}.rate"], f"{name}.rate", value=numpy_helper.from_array(ratio)),
            helper.make_node("Constant", [], [f"{name}.train"], f"{name}.train", value=_true()),
            helper.make_node(
                "Dropout", [f"{name}.ones", f"{name}.rate", f"{name}.train"], [f"{name}.mask"], f"{name}.mask"
            ),
            helper.make_node(
                "Constant",
                [],
                [f"{name}.kept"],
                f"{name}.kept",
                value=numpy_helper.from_array(np.array(rate).astype(of_kind)),
            ),
            helper.make_node("Mul", [f"{name}.mask", f"{name}.kept"], [name], mask.result.name),
        ]
        for node in nodes:
            node.metadata_props.extend(notes)
        return nodes


def _type_of(node: onnx.NodeProto) -> int:
    """The element type that a node names, 0 if it names none."""
    return next((int(attribute.i) for attribute in node.attribute if attribute.name in ("to", "dtype")), 0)


def _true() -> onnx.TensorProto:
    from onnx import numpy_helper

    return numpy_helper.from_array(np.array(True))
