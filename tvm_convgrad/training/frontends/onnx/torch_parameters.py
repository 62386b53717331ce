# SPDX-License-Identifier: Apache-2.0
"""Parameters in graphs of torch.onnx.export (dynamo=True), told by the notes that it leaves in each node.

Its optimizer merges initializers with equal values (all scales of new norms become one tensor), writes results of
constants as initializers (a transposed weight as `val_42`), and keeps constants of operators (the scale of attention)
as initializers, too. A note in each node has the call of PyTorch that it stands for:

    %linear : ... = call_function[target=torch.ops.aten.linear.default](args = (%gelu, %p_mlp_weight, %p_mlp_bias), ...)

`%p_` begins the name of a parameter and `%b_` that of a buffer, dots written as `_`; another note has the modules that
the call is in, and the graph has the names of all parameters and buffers. So what the model trains can be told from
what it does not, under the model's own names.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.training.frontends.onnx.names import names_read
from tvm_convgrad.training.frontends.onnx.torch_notes import (
    CALL,
    INTERMEDIATE,
    RESHAPED,
    RULE,
    Call,
    Tensor,
    Use,
    as_stored,
    named,
    stored_argument,
)
from tvm_convgrad.training.frontends.onnx.torch_recurrent import RECURRENT, STATES, are_weights, restore

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_OF_PARAMETERS = re.compile(r"(linear|addmm|conv|layer_norm|batch_norm|embedding|lstm|gru|rnn)")
"""Names of values that layers with parameters give."""
_OF_NO_PARAMETERS = re.compile(r"(convert_element_type_default|scalar_tensor_default|arange|full|linspace)(_\d+)?")
"""Names of values that are made of numbers, or of integers and booleans: counts of adaptive pools, masks."""
_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_INPUT = re.compile(r"^(\w+): (PARAMETER|BUFFER|CONSTANT_TENSOR) target='([^']+)'", re.MULTILINE)
_SAVED = re.compile(r"^\w+: (?:PARAMETER|BUFFER) target='([^']+)'(?! persistent=False)", re.MULTILINE)
_FLOATS = (1, 10, 11, 16)  # TensorProto's float, float16, double, bfloat16
_BIAS_RULE = "RemoveOptionalBias"
_LOSSES = ("SoftmaxCrossEntropyLoss", "NegativeLogLikelihoodLoss")
"""Operators whose operands are scores, classes and, as a constant, the weights of classes."""
_OF_MODEL = re.compile(r"[A-Za-z_][\w.]*")
"""Names that the TorchScript exporter gives to parameters and buffers; those of its own have slashes or colons."""


@dataclass(frozen=True)
class Exported:
    """A graph whose initializers are those of the model.

    Attributes:
        proto: the graph.
        constants: initializers that are not parameters of the model.
        computed: initializers that the exporter has computed of the model's, which stay as parameters.
        kept: those that it has computed although the graph has all parameters of the model, or of what is none by its
            name; they are constants.
        scalars: initializers of rank 0 that the file says are parameters, in each of their uses.
        untold: those of which it does not say so, with a name of the model or computed by the exporter; they are
            constants.
    """

    proto: onnx.ModelProto
    constants: frozenset[str] = frozenset()
    computed: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    scalars: frozenset[str] = frozenset()
    untold: tuple[str, ...] = ()


def with_exported_parameters(proto: onnx.ModelProto, weights: Container[str] = ()) -> Exported:
    """The model with an initializer for each parameter, under its name in PyTorch, and what of the others is known.

    A transposed or reshaped parameter becomes that of the model, and a node that transposes or reshapes it. What the
    notes do not tell stays as it is; graphs without notes are returned as they are.

    Args:
        proto: the graph, whose losses may be written out.
        weights: what `class_weights` finds while they are not.
    """
    if proto.producer_name != "pytorch":
        return Exported(proto)
    if not any(Call.of(node) for node in proto.graph.node):
        floats = [tensor.name for tensor in proto.graph.initializer if tensor.dims and tensor.data_type in _FLOATS]
        untold = [name for name in _scalars(proto) if _OF_MODEL.fullmatch(name) and not INTERMEDIATE.fullmatch(name)]
        return Exported(proto, computed=tuple(filter(INTERMEDIATE.fullmatch, floats)), untold=tuple(untold))
    copy = type(proto)()
    copy.CopyFrom(proto)
    graph = _Graph(copy)
    graph.separate_unnoted()
    graph.restore_biases()
    graph.restore_recurrent()
    uses: list[Use] = []
    reshaped: list[tuple[onnx.NodeProto, int, Call]] = []
    constants, others = graph.separate_group_norms(), set()
    for node, position, call in graph.operands():
        name = node.input[position]
        stored = "" if call is None else stored_argument(node, position, call, name)
        if call is not None and stored:
            uses.append(Use(node, position, call, stored))
        elif call is not None and graph.is_constant(node, position, call):
            constants.add(name)
        elif call is not None and RESHAPED.fullmatch(name):
            reshaped.append((node, position, call))
        else:
            others.add(name)
    told = graph.reshaped_parameters(reshaped, uses)
    others |= {node.input[position] for node, position, _ in reshaped} - {use.given for use in told}
    uses += told
    buffers = graph.take_apart(uses)
    computed = graph.tie_samples({name for name in others if graph.is_computed(name)})
    graph.replace_initializers()
    used = {name for node in copy.graph.node for name in node.input}
    statistics = {name for node in copy.graph.node if node.op_type == "BatchNormalization" for name in node.input[3:]}
    fixed = (constants - others) | (buffers - statistics)
    computed = [name for name in computed if name in used]
    known = graph.parameters and graph.parameters <= used
    kept = [
        name
        for name in computed
        if (known and not _OF_PARAMETERS.match(name)) or _OF_NO_PARAMETERS.fullmatch(name) or name in weights
    ]
    computed = [name for name in computed if name not in kept]
    numbers = [name for name in _scalars(copy) if name in graph.parameters or name in computed]
    trained = frozenset(filter(graph.is_parameter_everywhere, numbers))
    return Exported(
        copy,
        (frozenset(fixed & used) - trained).union(kept),
        tuple(name for name in computed if name not in numbers),
        tuple(kept),
        trained,
        tuple(name for name in numbers if name not in trained),
    )


def class_weights(proto: onnx.ModelProto) -> set[str]:
    """The tensors of a graph that only weigh the classes of losses: constants, whatever the exporter notes of them."""
    weights: set[str] = set()
    others: set[str] = set()
    for node in proto.graph.node:
        operands = 2 if node.op_type in _LOSSES else len(node.input)
        others.update(node.input[:operands])
        weights.update(node.input[operands:])
    return weights - others


def _scalars(proto: onnx.ModelProto) -> list[str]:
    """The initializers that are one float without an axis."""
    return [each.name for each in proto.graph.initializer if not each.dims and each.data_type in _FLOATS]


def state_dict_names(proto: onnx.ModelProto) -> list[str]:
    """What the `state_dict` of the exported PyTorch model has, as far as the file says so: names, or none."""
    signature = "".join(each.value for each in proto.graph.metadata_props if each.key == _SIGNATURE)
    return _SAVED.findall(signature)


class _Graph:
    """The graph of a model while its initializers are taken apart."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        from onnx import numpy_helper

        self._proto = proto
        self._values = {
            tensor.name: np.asarray(numpy_helper.to_array(tensor))
            for tensor in proto.graph.initializer
            if tensor.data_type in _FLOATS
        }
        self._made: dict[str, Tensor] = {}
        self._nodes: dict[str, onnx.NodeProto] = {}
        self._known = {named(name): name for name in self._values if not INTERMEDIATE.fullmatch(name)}
        calls = [call for node in proto.graph.node if (call := Call.of(node)) is not None]
        modules = {scope for call in calls for scope in call.scopes if scope}
        modules |= {name.rpartition(".")[0] for name in self._known.values() if "." in name}
        self._modules = sorted(modules, key=len, reverse=True)
        signature = "".join(each.value for each in proto.graph.metadata_props if each.key == _SIGNATURE)
        self._targets = {name: target for name, _, target in _INPUT.findall(signature)}
        self.parameters = {target for _, kind, target in _INPUT.findall(signature) if kind == "PARAMETER"}
        self._arguments = {name for call in calls for name in call.arguments}

    def operands(self) -> Iterator[tuple[onnx.NodeProto, int, Call | None]]:
        """Every use of an initializer of floats."""
        for node in self._proto.graph.node:
            call = Call.of(node)
            for position, name in enumerate(node.input):
                if name in self._values:
                    yield node, position, call

    def is_computed(self, name: str) -> bool:
        """Whether an initializer is a value of PyTorch's graph or of an operator, and no tensor of the model."""
        return name in self._arguments or INTERMEDIATE.fullmatch(name) is not None

    def is_constant(self, node: onnx.NodeProto, position: int, call: Call) -> bool:
        """Whether an initializer is one of an operator, which is not in the model: a bound, a scale.

        Operators' own have any name (`val_3`, `min_val_cast`). Of a call with parameters an operand may come of them,
        but for group norms, whose nodes tell them apart.
        """
        name = node.input[position]
        if INTERMEDIATE.fullmatch(name):
            is_state = node.op_type in RECURRENT and position in STATES and are_weights(call.stored)
            return not call.stored or "group_norm" in call.target or is_state
        known = {f"{kind}_{named(name)}" for kind in "pbc"} | {name}
        return not call.stored and "." not in name and known.isdisjoint(self._arguments)

    def is_parameter_everywhere(self, name: str) -> bool:
        """Whether every node that reads an initializer notes the parameter, so that no equal constant is merged in."""
        calls = [Call.of(node) for node in self._proto.graph.node if name in node.input]
        return all(call is not None and f"p_{named(name)}" in call.arguments for call in calls)

    def name_of(self, use: Use) -> str:
        """The name of what a use stands for: of an initializer, or that of its module and its own behind it."""
        if use.stored in self._targets:
            return self._targets[use.stored]
        text = named(use.stored[2:])
        if text in self._known:
            return self._known[text]
        for module in self._modules:
            if text.startswith(f"{named(module)}_"):
                return f"{module}.{use.stored[2:][len(module) + 1 :]}"
        return use.stored[2:]

    def separate_unnoted(self) -> None:
        """Give each module its own copy of a node without notes whose initializer the optimizer merged with its like.

        Such are the splits of `in_proj_bias` of attention layers, all zeros in new models: nodes in `blocks.1.att`
        read the one of `blocks.0.att`.
        """
        readers: dict[str, list[onnx.NodeProto]] = {}
        for node in self._proto.graph.node:
            for name in node.input:
                readers.setdefault(name, []).append(node)
        for node in list(self._proto.graph.node):
            own = [name for name in node.input if name in self._values]
            if len(own) != 1 or Call.of(node) is not None or "." not in own[0]:
                continue
            home, leaf = own[0].rsplit(".", 1)
            strangers: dict[str, list[onnx.NodeProto]] = {}
            for reader in (reader for result in node.output for reader in readers.get(result, [])):
                call = Call.of(reader)
                module = re.sub(r"@\d+", "", call.module if call else "")
                if module and module != home and f"{module}.{leaf}" not in self._values:
                    strangers.setdefault(module, []).append(reader)
            for module, users in strangers.items():
                name = f"{module}.{leaf}"
                self._made[name] = self._values[own[0]]
                renamed = {result: f"{result}.{module}" for result in node.output}
                twin = type(node)()
                twin.CopyFrom(node)
                twin.name = f"{node.name}.{module}"
                twin.input[:] = [name if each == own[0] else each for each in node.input]
                twin.output[:] = list(renamed.values())
                self._nodes[twin.name] = twin
                for user in users:
                    user.input[:] = [renamed.get(each, each) for each in user.input]

    def separate_group_norms(self) -> set[str]:
        """Give group norms their own ones and zeros, an entry for each group, and return the names of these.

        The exporter writes a group norm as InstanceNormalization, which scales by them, and what scales by the
        parameters. Of one group they are one number each, and merged with parameters that are, such as StarReLU's.
        """
        found = set()
        for node in self._proto.graph.node:
            call = Call.of(node)
            if node.op_type != "InstanceNormalization" or call is None or "group_norm" not in call.target:
                continue
            for position, kind in ((1, "ones"), (2, "zeros")):
                value = self._values.get(node.input[position])
                if value is not None and not INTERMEDIATE.fullmatch(node.input[position]):
                    name = f"{node.output[0]}_{kind}"
                    self._made[name] = value
                    node.input[position] = name
                    found.add(name)
        return found

    def restore_biases(self) -> None:
        """Add the biases that the optimizer has removed as they were zero: in training they do not stay so."""
        for node in self._proto.graph.node:
            call = Call.of(node)
            rules = [entry for entry in node.metadata_props if entry.key == RULE]
            if call is None or not any(_BIAS_RULE in entry.value for entry in rules) or len(node.input) != 2:
                continue
            biases = [name for name in call.stored if name.endswith("_bias")]
            weight = self._values.get(node.input[1])
            if len(biases) != 1 or weight is None or any("FuseBatchNorm" in entry.value for entry in rules):
                continue
            attributes = {attribute.name: attribute.i for attribute in node.attribute}
            is_first = node.op_type == "Conv" or attributes.get("transB")
            channels = weight.shape[0 if is_first else 1] * (1 if is_first else attributes.get("group", 1))
            name = self.name_of(Use(node, 2, call, biases[0]))
            self._made[name] = np.zeros(channels, weight.dtype)
            node.input.append(name)
            for entry in rules:
                node.metadata_props.remove(entry)

    def restore_recurrent(self) -> None:
        """Let recurrent layers read the model's weights, of which the exporter has computed their operands."""
        layers: dict[str, list[onnx.NodeProto]] = {}
        for node in self._proto.graph.node:
            notes = {entry.key: entry.value for entry in node.metadata_props}
            if node.op_type in RECURRENT and Call.of(node) is not None:
                layers.setdefault(notes[CALL], []).append(node)
        for nodes in layers.values():
            call = Call.of(nodes[0])
            assert call is not None
            names = {stored: self.name_of(Use(nodes[0], 1, call, stored)) for stored in call.stored}
            restored = restore(nodes, call.stored, self._values, names.__getitem__)
            self._made |= restored.values
            self._nodes |= {node.output[0]: node for node in restored.nodes}

    def reshaped_parameters(self, operands: list[tuple[onnx.NodeProto, int, Call]], uses: list[Use]) -> list[Use]:
        """Those operands that are a parameter in another shape: the only one of the call's module that nothing reads.

        A scale of shape (C) that a layer reads as (1, C, 1, 1) is an initializer `view_3` of all layers whose scales
        are equal, as they are in new models; the notes name the view, which no node computes any more.
        """
        read = {use.stored for use in uses}
        missing: dict[str, list[str]] = {}
        for stored, target in self._targets.items():
            if target in self.parameters - self._made.keys() and stored not in read:
                missing.setdefault(target.rpartition(".")[0], []).append(stored)
        views: dict[str, set[str]] = {}
        for _, _, call in operands:
            views.setdefault(call.module, set()).update(filter(RESHAPED.fullmatch, call.arguments))
        return [
            Use(node, position, call, missing[call.module][0])
            for node, position, call in operands
            if len(missing.get(call.module, [])) == len(views[call.module]) == 1
            and self._values[node.input[position]].ndim > 1
            and self._values[node.input[position]].size == max(self._values[node.input[position]].shape)
        ]

    def take_apart(self, uses: list[Use]) -> set[str]:
        """Give each use the tensor that the model has there; returns the names of those that are not parameters."""
        buffers = set()
        for use in uses:
            given = use.node.input[use.position]
            name = self.name_of(use)
            value, operator = as_stored(use, self._values[given])
            before = self._made.get(name, self._values.get(name))
            if before is not None and not (before.shape == value.shape and before.tobytes() == value.tobytes()):
                continue  # two tensors of one name: the notes mean something else
            self._made[name] = value
            use.node.input[use.position] = self._derived(operator, name, given) if operator else name
            if not use.stored.startswith("p_"):
                buffers.add(name)
        return buffers

    def tie_samples(self, computed: set[str]) -> list[str]:
        """Replace what a parameter was expanded to along the batch by one sample of it; returns all names after that.

        A class token that is expanded to the batch is one tensor of all samples after the exporter's optimizer.
        """
        names = []
        for name in sorted(computed):
            value = self._values[name]
            batch = self._batch()
            if batch in (None, 1) or value.ndim < 2 or len(value) != batch or (value != value[:1]).any():
                names.append(name)
                continue
            sample = f"{name}.sample"
            self._made[sample] = value[:1]
            result = self._derived("Expand", sample, name)
            for node in self._proto.graph.node:
                node.input[:] = [result if each == name else each for each in node.input]
            names.append(sample)
        return names

    def _batch(self) -> int | None:
        inputs = [value for value in self._proto.graph.input if value.name not in self._values]
        extents = inputs[0].type.tensor_type.shape.dim if inputs else []
        return int(extents[0].dim_value) or None if extents else None

    def _derived(self, operator: str, name: str, given: str) -> str:
        """The name of the operand `given` as a node makes it of an initializer, once for all that read it."""
        from onnx import helper, numpy_helper

        result = f"{name}.{operator.lower()}.{given}"
        if result not in self._nodes:
            inputs = [name] if operator == "Transpose" else [name, f"{result}.shape"]
            attributes = {"perm": [1, 0]} if operator == "Transpose" else {}
            for extents in inputs[1:]:  # TVM's importer takes an initializer of an Expand's extents for an argument
                shape = numpy_helper.from_array(np.array(self._values[given].shape, "int64"))
                self._nodes[extents] = helper.make_node("Constant", [], [extents], name=extents, value=shape)
            self._nodes[result] = helper.make_node(operator, inputs, [result], name=result, **attributes)
        return result

    def replace_initializers(self) -> None:
        """Write the new initializers and the nodes that read them, and drop initializers that nobody reads any more."""
        from onnx import numpy_helper

        graph = self._proto.graph
        nodes = [*self._nodes.values(), *graph.node]
        del graph.node[:]
        graph.node.extend(nodes)
        read = names_read(graph)
        present = [tensor for tensor in graph.initializer if tensor.name in read]
        names = {tensor.name for tensor in present}
        for name, value in self._made.items():
            if name not in names:
                present.append(numpy_helper.from_array(np.ascontiguousarray(value), name))
        del graph.initializer[:]
        graph.initializer.extend(present)


__all__ = ["Exported", "class_weights", "state_dict_names", "with_exported_parameters"]
