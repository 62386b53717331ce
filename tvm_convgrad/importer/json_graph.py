# SPDX-License-Identifier: Apache-2.0
"""Relay programs from the JSON of tvm.ir.save_json, TVM 0.6 to 0.19: a list of numbered nodes becomes a Program.

Nothing recurses: nodes are built children first, from a stack, so that nesting costs memory only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tvm_convgrad.errors import ModelError
from tvm_convgrad.importer import program as ir
from tvm_convgrad.importer.schema import PREFIX, SCHEMAS, Spec
from tvm_convgrad.importer.tensors import decode_tensor

MAX_NODES = 8_000_000
_NUMBER = re.compile(r"-?[0-9]{1,19}")
_NAMES = {"relay.Module": "IRModule", "relay.GlobalVar": "GlobalVar", "relay.Op": "Op", "StrMap": "Map"}
_RENAMED = {"relay.TupleType": "TupleType", "StringImm": "runtime.String", "relay.Any": "tir.Any", "Any": "tir.Any"}
"""Names that node types had in TVM 0.6, and what they are called since."""

_CHILDREN: Mapping[str, tuple[str, ...]] = {
    "IRModule": ("functions",),
    "relay.Function": ("params", "body", "attrs"),
    "relay.Call": ("op", "args", "attrs", "_checked_type_"),
    "relay.Var": ("vid", "type_annotation"),
    "relay.Tuple": ("fields",),
    "relay.TupleGetItem": ("tuple_value",),
    "relay.Let": ("var", "value", "body"),
    "relay.If": ("cond", "true_branch", "false_branch"),
    "relay.RefCreate": ("value",),
    "relay.RefRead": ("ref",),
    "relay.RefWrite": ("ref", "value"),
    "relay.Match": ("data",),
    "relay.TensorType": ("shape",),
    "TupleType": ("fields",),
    "DictAttrs": ("__dict__",),
}
"""The fields that are node numbers and are read."""

_UNSUPPORTED = ("relay.RefCreate", "relay.RefRead", "relay.RefWrite", "relay.Match")
_TYPES = ("FuncType", "RefType", "TypeCall", "TypeVar", "GlobalTypeVar", "IncompleteType", "relay.RefType")


class Other:
    """A node of a type that nothing here needs to look into."""

    def __init__(self, kind: str) -> None:
        self.kind = kind


class Any_:
    """Relay's Any: an extent that is known when the program runs."""


ANY = Any_()


def is_relay_json(text: str) -> bool:
    """Whether a text looks like Relay's JSON, rather than that of newer versions of TVM."""
    return text.lstrip()[:1] == "{" and '"type_key"' in text[:4096]


def parse_json(text: str, source: str) -> ir.Program:
    """The program of a JSON text: of a module, or of one function, which is then called main.

    Raises:
        ModelError: it is no JSON of Relay, is damaged, or holds what is no program.
    """
    graph = Graph(text, source)
    root = graph.build(graph.root)
    if isinstance(root, ir.Function):
        return ir.Program({"main": root}, graph.version, source)
    if not isinstance(root, _Module):
        raise ModelError(f"{source} holds a {graph.kind(graph.root)}, not a module or function of Relay.")
    functions = {}
    for variable, function in root.functions.items():
        if isinstance(variable, ir.GlobalRef) and isinstance(function, ir.Function):
            functions[variable.name] = function
    return ir.Program(functions, graph.version, source)


class _Module:
    def __init__(self, functions: Mapping[Any, Any]) -> None:
        self.functions = functions


class Graph:
    """The nodes of one JSON text, built on demand."""

    def __init__(self, text: str, source: str) -> None:
        self.source = source
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{source} is no JSON ({error}); write it with tvm.ir.save_json.") from error
        if not isinstance(data, dict) or not isinstance(data.get("nodes"), list) or "root" not in data:
            raise ModelError(f"{source} is no program of Relay: JSON of tvm.ir.save_json has root and nodes.")
        self.nodes: list[Any] = data["nodes"]
        if len(self.nodes) > MAX_NODES:
            raise ModelError(f"{source} has {len(self.nodes)} nodes; at most {MAX_NODES} are imported.")
        about = data.get("attrs")
        version = about.get("tvm_version") if isinstance(about, dict) else None
        self.version = version if isinstance(version, str) else ""
        tensors = data.get("b64ndarrays", [])
        if not isinstance(tensors, list):
            raise self._damaged("b64ndarrays is no list")
        self._texts = tensors
        self._tensors: dict[int, ir.Array] = {}
        self._built: dict[int, Any] = {}
        self.root = self._index(data["root"])

    def _damaged(self, what: str) -> ModelError:
        return ModelError(f"{self.source} is damaged: {what}; write it again with tvm.ir.save_json.")

    def _index(self, value: Any) -> int:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.nodes):
            raise self._damaged(f"{str(value)[:40]!r} is no number of a node, of which there are {len(self.nodes)}")
        return value

    def node(self, index: int) -> Mapping[str, Any]:
        """The node of this number."""
        node = self.nodes[index]
        if not isinstance(node, dict):
            raise self._damaged(f"node {index} is no object")
        return node

    def kind(self, index: int) -> str:
        """The type of a node, by its name since TVM 0.7; empty for null."""
        kind = self.node(index).get("type_key", "")
        if not isinstance(kind, str):
            raise self._damaged(f"node {index} has no type_key")
        kind = _NAMES.get(kind, kind)
        return _RENAMED.get(kind, kind)

    def _fields(self, index: int) -> Mapping[str, Any]:
        fields = self.node(index).get("attrs", {})
        if not isinstance(fields, dict):
            raise self._damaged(f"the attributes of node {index} are no object")
        return fields

    def _field(self, index: int, name: str) -> Any:
        fields = self._fields(index)
        if name not in fields:
            raise self._damaged(f"node {index}, a {self.kind(index)}, has no {name}")
        return fields[name]

    def _items(self, index: int) -> list[int]:
        data = self.node(index).get("data", [])
        if not isinstance(data, list):
            raise self._damaged(f"the data of node {index} is no list")
        return [self._index(item) for item in data]

    def _children(self, index: int) -> list[int]:
        kind = self.kind(index)
        if kind in _CHILDREN:
            fields = self._fields(index)
            optional = ("_checked_type_", "type_annotation", "attrs", "vid")
            return [
                self._index(self._field(index, name))
                for name in _CHILDREN[kind]
                if name in fields or name not in optional
            ]
        if kind in ("Array", "Map"):
            return self._items(index)
        if kind in ("relay.Id", "GlobalVar"):
            name = self._field(index, "name_hint")
            return [self._index(name)] if self._is_text_node(name) else []
        if kind.startswith(PREFIX):
            schema = SCHEMAS.get(kind.removeprefix(PREFIX), {})
            found = []
            for name, value in self._fields(index).items():
                if name in schema and self._is_node(schema[name], value):
                    found.append(int(value))
            return found
        return []

    def _is_text_node(self, value: Any) -> bool:
        """Whether a field that is text is the number of a node that holds it (since 0.7), not the text itself."""
        return (
            isinstance(value, str)
            and _NUMBER.fullmatch(value) is not None
            and 0 <= int(value) < len(self.nodes)
            and self.kind(int(value)) == "runtime.String"
        )

    def _is_node(self, spec: Spec, value: Any) -> bool:
        """Whether a field's value is the number of a node."""
        if not isinstance(value, str) or not _NUMBER.fullmatch(value) or not 0 <= int(value) < len(self.nodes):
            return False
        if spec.kind == "int?":  # node 0 is null, 1 the root: neither is an integer, so small values are plain
            return self.kind(int(value)) == "IntImm"
        return spec.kind == "node" or (spec.kind == "str" and self._is_text_node(value))

    def build(self, root: int) -> Any:
        """What a node stands for: an expression, a type, attributes, or plain data."""
        built, open_nodes = self._built, set[int]()
        stack = [root]
        while stack:
            index = stack[-1]
            if index in built:
                stack.pop()
                continue
            missing = [child for child in self._children(index) if child not in built]
            if missing:
                if index in open_nodes:
                    raise self._damaged(f"node {index} contains itself")
                open_nodes.add(index)
                stack.extend(reversed(missing))
                continue
            built[index] = self._make(index)
            open_nodes.discard(index)
            stack.pop()
        return built[root]

    def _make(self, index: int) -> Any:
        kind = self.kind(index)
        maker = _MAKERS.get(kind)
        if maker is not None:
            return maker(self, index)
        if kind.startswith(PREFIX):
            return self._attributes(index, kind.removeprefix(PREFIX))
        if kind in _UNSUPPORTED:
            return ir.Unsupported(kind.removeprefix("relay."))
        if kind in _TYPES:
            return ir.OtherType(kind)
        return Other(kind)

    def child(self, index: int, name: str) -> Any:
        """What the field `name` of a node stands for."""
        return self._built[self._index(self._field(index, name))]

    def expr(self, value: Any, what: str) -> ir.Expr:
        """`value`, if it is an expression."""
        if isinstance(value, Other):
            return ir.Unsupported(value.kind.removeprefix("relay."))
        if not isinstance(value, ir.EXPRS):
            raise self._damaged(f"{what} is no expression")
        return value

    def exprs(self, index: int, name: str) -> tuple[ir.Expr, ...]:
        """The list of expressions in a field."""
        values = self.child(index, name)
        if not isinstance(values, tuple):
            raise self._damaged(f"{name} of node {index} is no list")
        return tuple(self.expr(value, f"{name} of node {index}") for value in values)

    def text(self, index: int, name: str) -> str:
        """A field that is text."""
        value = self._field(index, name)
        if self._is_text_node(value):
            value = self._built[int(value)]
        if not isinstance(value, str):
            raise self._damaged(f"{name} of node {index} is no text")
        return value

    def tensor(self, index: int) -> ir.Array:
        """The tensor that a constant refers to."""
        value = self._field(index, "data")
        number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else -1
        if not 0 <= number < len(self._texts) or not isinstance(self._texts[number], str):
            raise self._damaged(f"constant {index} has no tensor {str(value)[:20]!r}")
        if number not in self._tensors:
            self._tensors[number] = decode_tensor(self._texts[number], f"{self.source}: tensor {number}")
        return self._tensors[number]

    def literal(self, index: int, name: str) -> int:
        """A field that is an integer written out."""
        value = self._field(index, name)
        if not isinstance(value, str) or not _NUMBER.fullmatch(value):
            raise self._damaged(f"{name} of node {index} is {str(value)[:40]!r}, no integer")
        return int(value)

    def _attributes(self, index: int, kind: str) -> ir.Attributes:
        schema = SCHEMAS.get(kind)
        if schema is None:
            return ir.Attributes(kind, {}, f"attributes of the type {PREFIX}{kind} are unknown")
        values: dict[str, Any] = {}
        for name, value in self._fields(index).items():
            spec = schema.get(name)
            if spec is None:
                return ir.Attributes(kind, {}, f"{PREFIX}{kind} has the unknown field {name!r}")
            try:
                values[name] = self._value(spec, value)
            except (ValueError, TypeError, OverflowError):
                return ir.Attributes(kind, {}, f"{PREFIX}{kind}: {name} = {str(value)[:40]!r} is no {spec.kind}")
        return ir.Attributes(kind, values)

    def _value(self, spec: Spec, value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError
        if self._is_node(spec, value):
            found = self._built[int(value)]
            if found is None and spec.kind == "int?":
                raise TypeError
            return found
        match spec.kind:
            case "int" | "int?":
                return _integer(value)
            case "bool":
                return bool(_integer(value))
            case "float":
                return float(value)
            case "node":
                raise TypeError
        return value


def _integer(value: str) -> int:
    if not _NUMBER.fullmatch(value):
        raise ValueError
    return int(value)


def _call(graph: Graph, index: int) -> ir.Expr:
    op = graph.child(index, "op")
    callee = op.name if isinstance(op, ir.Operator) else graph.expr(op, f"what node {index} calls")
    has = graph._fields(index)
    attributes = graph.child(index, "attrs") if "attrs" in has else None
    checked = graph.child(index, "_checked_type_") if "_checked_type_" in has else None
    if isinstance(attributes, Other):
        attributes = ir.Attributes(attributes.kind, {}, f"attributes of the type {attributes.kind} are unknown")
    return ir.Call(
        callee,
        graph.exprs(index, "args"),
        attributes if isinstance(attributes, ir.Attributes) else ir.NO_ATTRIBUTES,
        checked if isinstance(checked, ir.TYPES) else None,
    )


def _var(graph: Graph, index: int) -> ir.Var:
    name = graph.child(index, "vid")
    type_ = graph.child(index, "type_annotation") if "type_annotation" in graph._fields(index) else None
    if not isinstance(name, _Id):
        raise graph._damaged(f"variable {index} has no name")
    return ir.Var(name.name, type_ if isinstance(type_, ir.TYPES) else None)


class _Id:
    def __init__(self, name: str) -> None:
        self.name = name


def _function(graph: Graph, index: int) -> ir.Function:
    params = graph.exprs(index, "params")
    if not all(isinstance(param, ir.Var) for param in params):
        raise graph._damaged(f"a parameter of function {index} is no variable")
    attributes = graph.child(index, "attrs") if "attrs" in graph._fields(index) else None
    body = graph.expr(graph.child(index, "body"), f"the body of function {index}")
    return ir.Function(
        tuple(param for param in params if isinstance(param, ir.Var)),
        body,
        attributes if isinstance(attributes, dict) else {},
    )


def _let(graph: Graph, index: int) -> ir.Expr:
    var = graph.child(index, "var")
    if not isinstance(var, ir.Var):
        raise graph._damaged(f"let {index} binds no variable")
    value = graph.expr(graph.child(index, "value"), f"the value of let {index}")
    return ir.Let(var, value, graph.expr(graph.child(index, "body"), f"the body of let {index}"))


def _if(graph: Graph, index: int) -> ir.Expr:
    parts = [graph.expr(graph.child(index, name), name) for name in ("cond", "true_branch", "false_branch")]
    return ir.If(parts[0], parts[1], parts[2])


def _tensor_type(graph: Graph, index: int) -> ir.Type:
    shape = graph.child(index, "shape")
    if not isinstance(shape, tuple):
        raise graph._damaged(f"the shape of type {index} is no list")
    extents: list[int | None] = []
    for extent in shape:
        if isinstance(extent, int) and not isinstance(extent, bool) and extent >= 0:
            extents.append(extent)
        elif isinstance(extent, Any_ | Other):
            extents.append(None)
        else:
            raise graph._damaged(f"type {index} has the extent {str(extent)[:40]}")
    dtype = graph._field(index, "dtype")
    return ir.TensorType(tuple(extents), dtype if isinstance(dtype, str) else "")


def _tuple_type(graph: Graph, index: int) -> ir.Type:
    fields = graph.child(index, "fields")
    if not isinstance(fields, tuple):
        raise graph._damaged(f"the fields of type {index} are no list")
    return ir.TupleType(tuple(field if isinstance(field, ir.TYPES) else None for field in fields))


def _map(graph: Graph, index: int) -> dict[Any, Any]:
    values = [graph._built[item] for item in graph._items(index)]
    keys = graph.node(index).get("keys")
    if keys is None:
        if len(values) % 2:
            raise graph._damaged(f"map {index} has a key without value")
        keys, values = values[::2], values[1::2]
    if not isinstance(keys, list) or len(keys) != len(values):
        raise graph._damaged(f"map {index} has other keys than values")
    if not all(isinstance(key, str | ir.GlobalRef | int) for key in keys):
        raise graph._damaged(f"map {index} has keys that are no names")
    return dict(zip(keys, values, strict=True))


def _string(graph: Graph, index: int) -> str:
    node = graph.node(index)
    value = node.get("repr_str", graph._fields(index).get("value", ""))
    if not isinstance(value, str):
        raise graph._damaged(f"text {index} is no text")
    return value


def _operator(graph: Graph, index: int) -> ir.Operator:
    node = graph.node(index)
    name = node.get("repr_str", node.get("global_key"))
    if not isinstance(name, str):
        raise graph._damaged(f"operator {index} has no name")
    return ir.Operator(name)


def _integer_node(graph: Graph, index: int) -> Any:
    value = graph.literal(index, "value")
    return bool(value) if graph._fields(index).get("dtype") in ("bool", "uint1") else value


def _float_node(graph: Graph, index: int) -> float:
    try:
        return float(graph._field(index, "value"))
    except (ValueError, TypeError) as error:
        raise graph._damaged(f"number {index} is none") from error


def _module(graph: Graph, index: int) -> _Module:
    functions = graph.child(index, "functions")
    if not isinstance(functions, dict):
        raise graph._damaged("the functions of the module are no map")
    return _Module(functions)


def _field_of(graph: Graph, index: int) -> ir.Expr:
    value = graph.expr(graph.child(index, "tuple_value"), f"the tuple of node {index}")
    return ir.Field(value, graph.literal(index, "index"))


_MAKERS: Mapping[str, Callable[[Graph, int], Any]] = {
    "": lambda graph, index: None,
    "IRModule": _module,
    "relay.Function": _function,
    "relay.Call": _call,
    "relay.Var": _var,
    "relay.Id": lambda graph, index: _Id(graph.text(index, "name_hint")),
    "relay.Constant": lambda graph, index: ir.Constant(graph.tensor(index)),
    "relay.Tuple": lambda graph, index: ir.Tuple(graph.exprs(index, "fields")),
    "relay.TupleGetItem": _field_of,
    "relay.Let": _let,
    "relay.If": _if,
    "relay.TensorType": _tensor_type,
    "TupleType": _tuple_type,
    "GlobalVar": lambda graph, index: ir.GlobalRef(graph.text(index, "name_hint")),
    "Op": _operator,
    "Array": lambda graph, index: tuple(graph._built[item] for item in graph._items(index)),
    "Map": _map,
    "DictAttrs": lambda graph, index: graph.child(index, "__dict__"),
    "IntImm": _integer_node,
    "UIntImm": _integer_node,
    "FloatImm": _float_node,
    "runtime.String": _string,
    "tir.Any": lambda graph, index: ANY,
}
