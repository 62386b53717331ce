# SPDX-License-Identifier: Apache-2.0
"""What each type of node of Relay's JSON stands for, and the program that all nodes together are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer import program as ir
from tvm_convgrad.importer.json_graph import ANY, Any_, Graph, Makers, Other


def parse_json(text: str, source: str) -> ir.Program:
    """The program of a JSON text: of a module, or of one function, which is then called main.

    Raises:
        ModelError: it is not JSON of Relay, is damaged, or holds what is not a program.
    """
    graph = relay_graph(text, source)
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


def relay_graph(text: str, source: str) -> Graph:
    """The nodes of a JSON text, which become parts of a Relay program."""
    return Graph(text, source, _MAKERS)


class _Module:
    def __init__(self, functions: Mapping[Any, Any]) -> None:
        self.functions = functions


def _call(graph: Graph, index: int) -> ir.Expr:
    op = graph.child(index, "op")
    callee = op.name if isinstance(op, ir.Operator) else graph.expr(op, f"what node {index} calls")
    has = graph.fields(index)
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
    type_ = graph.child(index, "type_annotation") if "type_annotation" in graph.fields(index) else None
    if not isinstance(name, _Id):
        raise graph.damaged(f"variable {index} has no name")
    return ir.Var(name.name, type_ if isinstance(type_, ir.TYPES) else None)


class _Id:
    def __init__(self, name: str) -> None:
        self.name = name


def _function(graph: Graph, index: int) -> ir.Function:
    params = graph.exprs(index, "params")
    if not all(isinstance(param, ir.Var) for param in params):
        raise graph.damaged(f"a parameter of function {index} is not a variable")
    attributes = graph.child(index, "attrs") if "attrs" in graph.fields(index) else None
    body = graph.expr(graph.child(index, "body"), f"the body of function {index}")
    return ir.Function(
        tuple(param for param in params if isinstance(param, ir.Var)),
        body,
        attributes if isinstance(attributes, dict) else {},
    )


def _let(graph: Graph, index: int) -> ir.Expr:
    var = graph.child(index, "var")
    if not isinstance(var, ir.Var):
        raise graph.damaged(f"let {index} binds no variable")
    value = graph.expr(graph.child(index, "value"), f"the value of let {index}")
    return ir.Let(var, value, graph.expr(graph.child(index, "body"), f"the body of let {index}"))


def _if(graph: Graph, index: int) -> ir.Expr:
    parts = [graph.expr(graph.child(index, name), name) for name in ("cond", "true_branch", "false_branch")]
    return ir.If(parts[0], parts[1], parts[2])


def _tensor_type(graph: Graph, index: int) -> ir.Type:
    shape = graph.child(index, "shape")
    if not isinstance(shape, tuple):
        raise graph.damaged(f"the shape of type {index} is not a list")
    extents: list[int | None] = []
    for extent in shape:
        if isinstance(extent, int) and not isinstance(extent, bool) and extent >= 0:
            extents.append(extent)
        elif isinstance(extent, Any_ | Other):
            extents.append(None)
        else:
            raise graph.damaged(f"type {index} has the extent {str(extent)[:40]}")
    dtype = graph.field(index, "dtype")
    return ir.TensorType(tuple(extents), dtype if isinstance(dtype, str) else "")


def _tuple_type(graph: Graph, index: int) -> ir.Type:
    fields = graph.child(index, "fields")
    if not isinstance(fields, tuple):
        raise graph.damaged(f"the fields of type {index} are not a list")
    return ir.TupleType(tuple(field if isinstance(field, ir.TYPES) else None for field in fields))


def _map(graph: Graph, index: int) -> dict[Any, Any]:
    values = [graph.built[item] for item in graph.items(index)]
    keys = graph.node(index).get("keys")
    if keys is None:
        if len(values) % 2:
            raise graph.damaged(f"map {index} has a key without value")
        keys, values = values[::2], values[1::2]
    if not isinstance(keys, list) or len(keys) != len(values):
        raise graph.damaged(f"map {index} has other keys than values")
    if not all(isinstance(key, str | ir.GlobalRef | int) for key in keys):
        raise graph.damaged(f"map {index} has keys that are not names")
    return dict(zip(keys, values, strict=True))


def _string(graph: Graph, index: int) -> str:
    node = graph.node(index)
    value = node.get("repr_str", graph.fields(index).get("value", ""))
    if not isinstance(value, str):
        raise graph.damaged(f"text {index} is not a string")
    return value


def _operator(graph: Graph, index: int) -> ir.Operator:
    node = graph.node(index)
    name = node.get("repr_str", node.get("global_key"))
    if not isinstance(name, str):
        raise graph.damaged(f"operator {index} has no name")
    return ir.Operator(name)


def _integer_node(graph: Graph, index: int) -> Any:
    value = graph.literal(index, "value")
    return bool(value) if graph.fields(index).get("dtype") in ("bool", "uint1") else value


def _float_node(graph: Graph, index: int) -> float:
    try:
        return float(graph.field(index, "value"))
    except (ValueError, TypeError) as error:
        raise graph.damaged(f"number {index} is not a number") from error


def _module(graph: Graph, index: int) -> _Module:
    functions = graph.child(index, "functions")
    if not isinstance(functions, dict):
        raise graph.damaged("the functions of the module are not a map")
    return _Module(functions)


def _field_of(graph: Graph, index: int) -> ir.Expr:
    value = graph.expr(graph.child(index, "tuple_value"), f"the tuple of node {index}")
    return ir.Field(value, graph.literal(index, "index"))


def _part(graph: Graph, index: int, name: str) -> ir.Expr:
    return graph.expr(graph.child(index, name), f"{name} of node {index}")


_MAKERS: Makers = {
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
    "relay.RefCreate": lambda graph, index: ir.RefCreate(_part(graph, index, "value")),
    "relay.RefRead": lambda graph, index: ir.RefRead(_part(graph, index, "ref")),
    "relay.RefWrite": lambda graph, index: ir.RefWrite(_part(graph, index, "ref"), _part(graph, index, "value")),
    "relay.TensorType": _tensor_type,
    "TupleType": _tuple_type,
    "GlobalVar": lambda graph, index: ir.GlobalRef(graph.text(index, "name_hint")),
    "Op": _operator,
    "Array": lambda graph, index: tuple(graph.built[item] for item in graph.items(index)),
    "Map": _map,
    "DictAttrs": lambda graph, index: graph.child(index, "__dict__"),
    "IntImm": _integer_node,
    "UIntImm": _integer_node,
    "FloatImm": _float_node,
    "runtime.String": _string,
    "tir.Any": lambda graph, index: ANY,
}
