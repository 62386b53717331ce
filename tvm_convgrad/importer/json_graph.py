# SPDX-License-Identifier: Apache-2.0
"""The JSON of tvm.ir.save_json, TVM 0.6 to 0.19: a list of numbered nodes, each built when it is first needed.

Nothing recurses: nodes are built children first, from a stack, so that nesting costs memory only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from tvm_convgrad.core.errors import ModelError
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

_UNSUPPORTED = ("relay.Match",)
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


Makers = Mapping[str, Callable[["Graph", int], Any]]


class Graph:
    """The nodes of one JSON text, built on demand."""

    def __init__(self, text: str, source: str, makers: Makers) -> None:
        """Read the nodes; `makers` has for each type of node what builds one, given the graph and its number."""
        self.source = source
        self._makers = makers
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ModelError(f"{source} is not JSON ({error}); write it with tvm.ir.save_json.") from error
        if not isinstance(data, dict) or not isinstance(data.get("nodes"), list) or "root" not in data:
            raise ModelError(f"{source} is not a program of Relay: JSON of tvm.ir.save_json has root and nodes.")
        self.nodes: list[Any] = data["nodes"]
        if len(self.nodes) > MAX_NODES:
            raise ModelError(f"{source} has {len(self.nodes)} nodes; at most {MAX_NODES} are imported.")
        about = data.get("attrs")
        version = about.get("tvm_version") if isinstance(about, dict) else None
        self.version = version if isinstance(version, str) else ""
        tensors = data.get("b64ndarrays", [])
        if not isinstance(tensors, list):
            raise self.damaged("b64ndarrays is not a list")
        self._texts = tensors
        self._tensors: dict[int, ir.Array] = {}
        self.built: dict[int, Any] = {}
        self.root = self._index(data["root"])

    def damaged(self, what: str) -> ModelError:
        """The error of a text that is wrong in some place."""
        return ModelError(f"{self.source} is damaged: {what}; write it again with tvm.ir.save_json.")

    def _index(self, value: Any) -> int:
        if isinstance(value, str) and _NUMBER.fullmatch(value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < len(self.nodes):
            raise self.damaged(f"{str(value)[:40]!r} is not a number of a node, of which there are {len(self.nodes)}")
        return value

    def node(self, index: int) -> Mapping[str, Any]:
        """The node of this number."""
        node = self.nodes[index]
        if not isinstance(node, dict):
            raise self.damaged(f"node {index} is not an object")
        return node

    def kind(self, index: int) -> str:
        """The type of a node, by its name since TVM 0.7; empty for null."""
        kind = self.node(index).get("type_key", "")
        if not isinstance(kind, str):
            raise self.damaged(f"node {index} has no type_key")
        kind = _NAMES.get(kind, kind)
        return _RENAMED.get(kind, kind)

    def fields(self, index: int) -> Mapping[str, Any]:
        """The fields of a node by name, as they stand in the JSON."""
        fields = self.node(index).get("attrs", {})
        if not isinstance(fields, dict):
            raise self.damaged(f"the attributes of node {index} are not an object")
        return fields

    def field(self, index: int, name: str) -> Any:
        """One field of a node, as it stands in the JSON."""
        fields = self.fields(index)
        if name not in fields:
            raise self.damaged(f"node {index}, a {self.kind(index)}, has no {name}")
        return fields[name]

    def items(self, index: int) -> list[int]:
        """The numbers of the nodes in a list or map."""
        data = self.node(index).get("data", [])
        if not isinstance(data, list):
            raise self.damaged(f"the data of node {index} is not a list")
        return [self._index(item) for item in data]

    def _children(self, index: int) -> list[int]:
        kind = self.kind(index)
        if kind in _CHILDREN:
            fields = self.fields(index)
            optional = ("_checked_type_", "type_annotation", "attrs", "vid")
            return [
                self._index(self.field(index, name))
                for name in _CHILDREN[kind]
                if name in fields or name not in optional
            ]
        if kind in ("Array", "Map"):
            return self.items(index)
        if kind in ("relay.Id", "GlobalVar"):
            name = self.field(index, "name_hint")
            return [self._index(name)] if self._is_text_node(name) else []
        if kind.startswith(PREFIX):
            schema = SCHEMAS.get(kind.removeprefix(PREFIX), {})
            found = []
            for name, value in self.fields(index).items():
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
        built, open_nodes = self.built, set[int]()
        stack = [root]
        while stack:
            index = stack[-1]
            if index in built:
                stack.pop()
                continue
            missing = [child for child in self._children(index) if child not in built]
            if missing:
                if index in open_nodes:
                    raise self.damaged(f"node {index} contains itself")
                open_nodes.add(index)
                stack.extend(reversed(missing))
                continue
            built[index] = self._make(index)
            open_nodes.discard(index)
            stack.pop()
        return built[root]

    def _make(self, index: int) -> Any:
        kind = self.kind(index)
        maker = self._makers.get(kind)
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
        return self.built[self._index(self.field(index, name))]

    def expr(self, value: Any, what: str) -> ir.Expr:
        """`value`, if it is an expression."""
        if isinstance(value, Other):
            return ir.Unsupported(value.kind.removeprefix("relay."))
        if not isinstance(value, ir.EXPRS):
            raise self.damaged(f"{what} is not an expression")
        return value

    def exprs(self, index: int, name: str) -> tuple[ir.Expr, ...]:
        """The list of expressions in a field."""
        values = self.child(index, name)
        if not isinstance(values, tuple):
            raise self.damaged(f"{name} of node {index} is not a list")
        return tuple(self.expr(value, f"{name} of node {index}") for value in values)

    def text(self, index: int, name: str) -> str:
        """A field that is text."""
        value = self.field(index, name)
        if self._is_text_node(value):
            value = self.built[int(value)]
        if not isinstance(value, str):
            raise self.damaged(f"{name} of node {index} is not a string")
        return value

    def tensor(self, index: int) -> ir.Array:
        """The tensor that a constant refers to."""
        value = self.field(index, "data")
        number = int(value) if isinstance(value, str) and _NUMBER.fullmatch(value) else -1
        if not 0 <= number < len(self._texts) or not isinstance(self._texts[number], str):
            raise self.damaged(f"constant {index} has no tensor {str(value)[:20]!r}")
        if number not in self._tensors:
            self._tensors[number] = decode_tensor(self._texts[number], f"{self.source}: tensor {number}")
        return self._tensors[number]

    def literal(self, index: int, name: str) -> int:
        """A field that is an integer written out."""
        value = self.field(index, name)
        if not isinstance(value, str) or not _NUMBER.fullmatch(value):
            raise self.damaged(f"{name} of node {index} is {str(value)[:40]!r}, no integer")
        return int(value)

    def _attributes(self, index: int, kind: str) -> ir.Attributes:
        schema = SCHEMAS.get(kind)
        if schema is None:
            return ir.Attributes(kind, {}, f"attributes of the type {PREFIX}{kind} are unknown")
        values: dict[str, Any] = {}
        for name, value in self.fields(index).items():
            spec = schema.get(name)
            if spec is None:
                return ir.Attributes(kind, {}, f"{PREFIX}{kind} has the unknown field {name!r}")
            try:
                values[name] = self._value(spec, value)
            except (ValueError, TypeError, OverflowError):
                return ir.Attributes(
                    kind, {}, f"{PREFIX}{kind}: {name} = {str(value)[:40]!r} is not of type {spec.kind}"
                )
        return ir.Attributes(kind, values)

    def _value(self, spec: Spec, value: Any) -> Any:
        if not isinstance(value, str):
            raise TypeError
        if self._is_node(spec, value):
            found = self.built[int(value)]
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
