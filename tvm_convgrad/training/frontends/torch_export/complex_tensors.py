# SPDX-License-Identifier: Apache-2.0
"""Complex tensors of a torch.export program as pairs of real ones: TVM has no complex type.

Each operator of complex tensors is replaced by real operators of real and imaginary parts (`torch_complex_rules`). A
complex parameter or buffer is held as PyTorch's `view_as_real` of it: a real tensor with a last axis of 2, which
optimizers and clipping treat as PyTorch treats the complex one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm_convgrad.core.errors import ModelError, UnsupportedError, first_line
from tvm_convgrad.training.frontends.torch_export.aliases import with_own_graph
from tvm_convgrad.training.frontends.torch_export.complex_rules import LINEAR, Rule, linear, rules
from tvm_convgrad.training.frontends.torch_export.operators.fourier import Parts, declare_waves
from tvm_convgrad.training.frontends.torch_export.places import listed, name_of, place_of

if TYPE_CHECKING:  # an optional package
    import torch

_BY_MEMORY = ("view.dtype", "resize.default", "as_strided.default")
_ASSERTION = "_assert_tensor_metadata.default"
_REPLACE = "there are no rules for their real and imaginary parts: write them with torch.view_as_real."


def is_complex(node: torch.fx.Node) -> bool:
    """Whether a node's value is a complex tensor, or has one among others."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else [value]
    return any(getattr(each, "dtype", None) is not None and bool(each.is_complex()) for each in values)


def of_real_tensors(decomposition: Callable[..., Any]) -> Callable[..., Any]:
    """A decomposition that leaves operators of complex tensors to `with_real_parts`."""
    import torch
    from torch.utils._pytree import tree_leaves

    def decomposed(*arguments: Any, **named: Any) -> Any:
        leaves = tree_leaves((arguments, named))
        if any(isinstance(each, torch.Tensor) and each.is_complex() for each in leaves):
            return NotImplemented
        return decomposition(*arguments, **named)

    return decomposed


def with_real_parts(program: torch.export.ExportedProgram, source: str) -> torch.export.ExportedProgram:
    """The decomposed program without complex tensors; itself, if it has none.

    Raises:
        ModelError: complex inputs or outputs, or an operator that has no rule.
    """
    if not any(map(is_complex, program.graph.nodes)):
        return program
    _refuse(program, source)
    program = with_own_graph(program)
    declare_waves()
    rewriting = _Rewriting(program, source)
    for node in list(program.graph.nodes):
        rewriting.visit(node)
    rewriting.finish()
    return program


def _refuse(program: torch.export.ExportedProgram, source: str) -> None:
    known, inputs = rules().keys() | LINEAR | {"getitem"}, program.graph_signature.user_inputs
    nodes = list(program.graph.nodes)
    for node in nodes:
        if node.op == "placeholder" and node.name in inputs and is_complex(node):
            raise ModelError(
                f"{source}: input {node.name!r} is complex, and a step's data are real; let the model take "
                "torch.view_as_real of it, and begin with torch.view_as_complex."
            )
    results = [node for node in nodes[-1].all_input_nodes if node.name in program.graph_signature.user_outputs]
    for node in results:
        if is_complex(node):
            raise ModelError(
                f"{source}: output {node.name!r} is complex, and losses are of real tensors; return torch.view_as_real "
                "of it, or its abs()."
            )
    found = [node for node in nodes if _is_of_complex(node) and name_of(node) != _ASSERTION]
    unknown = [node for node in found if _packet(node) not in known or name_of(node) in _BY_MEMORY]
    if unknown:
        raise ModelError(f"{source} uses complex-number operators: {listed(unknown)}; {_REPLACE}")


def _is_of_complex(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and (is_complex(node) or any(map(is_complex, node.all_input_nodes)))


class _Rewriting:
    """One program, of which each node of complex tensors gets nodes of their parts beside it."""

    def __init__(self, program: torch.export.ExportedProgram, source: str) -> None:
        self._program, self._graph, self._source = program, program.graph, source
        self._parts: dict[torch.fx.Node, Any] = {}  # Parts of nodes, or lists of them
        self._rules = rules()
        self._placed: dict[tuple[object, ...], torch.fx.Node] = {}
        self._last_input = [node for node in program.graph.nodes if node.op == "placeholder"][-1]
        self._first_place = self._last_input  # behind the waves, which are read everywhere

    def visit(self, node: torch.fx.Node) -> None:
        """Replace one node, after those before it."""
        if node.op == "placeholder" and is_complex(node):
            self._hold_real(node)
        elif node.op == "output":
            node.args = self._with_views(node, node.args)
        elif not is_complex(node) and self._parts.keys().isdisjoint(node.all_input_nodes):
            return
        elif name_of(node) == _ASSERTION:
            self._graph.erase_node(node)
        elif name_of(node) == "getitem":
            self._set(node, self._parts[node.args[0]][node.args[1]])
        else:
            try:
                self._set(node, self._traced(node))
            except UnsupportedError as error:
                raise ModelError(f"{self._source}: aten.{name_of(node)}{place_of(node)}: {error}.") from error
            except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
                raise ModelError(
                    f"{self._source}: aten.{name_of(node)}{place_of(node)} of complex tensors is not imported "
                    f"({first_line(error)}); write it with torch.view_as_real."
                ) from error

    def finish(self) -> None:
        """Remove the complex nodes."""
        for node in reversed(list(self._graph.nodes)):
            if node.op == "call_function" and is_complex(node):
                self._graph.erase_node(node)
        self._graph.lint()
        self._program.graph_module.recompile()

    def _set(self, node: torch.fx.Node, found: Any) -> None:
        if is_complex(node):
            self._parts[node] = found
        else:
            self._rename_output(node, found)
            node.replace_all_uses_with(found)
            self._graph.erase_node(node)

    def _rename_output(self, node: torch.fx.Node, made: torch.fx.Node) -> None:
        """Let the outputs that are a node's value be those of the node made in its place."""
        for spec in self._program.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = made.name

    def _hold_real(self, node: torch.fx.Node) -> None:
        """A complex parameter, buffer or constant as a real one with a last axis of 2."""
        import torch

        for held in (self._program.state_dict, self._program.constants):
            for spec in self._program.graph_signature.input_specs:
                if spec.arg.name == node.name and spec.target in held:
                    tensor = held[spec.target]
                    view = torch.view_as_real(tensor.detach().resolve_conj().contiguous())
                    is_parameter = isinstance(tensor, torch.nn.Parameter)
                    held[spec.target] = torch.nn.Parameter(view, tensor.requires_grad) if is_parameter else view
        given = node.meta["val"]
        with given.fake_mode:
            node.meta["val"] = torch.empty([*given.shape, 2], dtype=given.dtype.to_real())
        parts = self._inlined(self._last_input, lambda x: [x.select(-1, 0), x.select(-1, 1)], [node], {})
        self._parts[node] = Parts(*parts)

    def _with_views(self, node: torch.fx.Node, values: Any) -> Any:
        """The results, with complex buffers that the model writes as real ones."""
        import torch

        def viewed(each: torch.fx.Node) -> torch.fx.Node:
            parts = self._parts.get(each)
            if parts is None:
                return each
            before = node.prev
            inputs = [part for part in parts if part is not None]
            (made,) = self._inlined(
                before, lambda *x: [torch.stack([x[0], x[1] if len(x) > 1 else torch.zeros_like(x[0])], -1)], inputs, {}
            )
            self._rename_output(each, made)
            return made

        return torch.fx.node.map_arg(values, viewed)

    def _traced(self, node: torch.fx.Node) -> Any:
        """The nodes of an operator's result, by its rule."""
        import torch

        inputs: list[torch.fx.Node] = []

        def place(each: torch.fx.Node) -> Any:
            parts = self._parts.get(each)
            if parts is not None:
                return Parts(*(None if part is None else _Slot(_number(inputs, part)) for part in parts))
            return _Slot(_number(inputs, each))

        arguments, named = _changed((list(node.args), dict(node.kwargs)), torch.fx.Node, place)
        rule, layout = self._rule(node), []

        def function(*tensors: Any) -> list[Any]:
            given, keywords = _changed((arguments, named), _Slot, lambda slot: tensors[slot.number])
            found = rule(*given, **keywords)
            layout.append(found)
            return _flat(found)

        made = self._inlined(node.prev, function, inputs, node.meta)
        return _like(layout[-1], iter(made))

    def _rule(self, node: torch.fx.Node) -> Rule:
        packet, target = _packet(node), node.target
        if packet in self._rules:
            return self._rules[packet]
        return lambda *given, **named: linear(target, given, named)

    def _inlined(
        self,
        place: torch.fx.Node,
        function: Callable[..., list[Any]],
        inputs: list[torch.fx.Node],
        meta: dict[str, Any],
    ) -> list[torch.fx.Node]:
        """The nodes of a function's results, put after a node of the graph."""
        import torch
        from torch.fx.experimental.proxy_tensor import make_fx

        fakes = [node.meta["val"] for node in inputs]
        mode = next(fake.fake_mode for fake in fakes + self._fakes() if hasattr(fake, "fake_mode"))
        with mode, torch.no_grad():
            traced = make_fx(function, tracing_mode="symbolic")(*fakes)
        traced.graph.eliminate_dead_code()
        of_node = dict(zip((each for each in traced.graph.nodes if each.op == "placeholder"), inputs, strict=True))
        at = self._first_place if place is self._last_input else place
        for each in traced.graph.nodes:
            if each.op in ("placeholder", "output"):
                continue
            if each.op != "call_function":
                raise UnsupportedError("a rule has made a constant, which is an error of this package; report it")
            key = (each.target, *map(str, each.args)) if name_of(each).startswith("waves") else None
            if key is not None and key in self._placed:
                of_node[each] = self._placed[key]
                continue
            with self._graph.inserting_after(self._first_place if key else at):
                of_node[each] = self._graph.node_copy(each, lambda old: of_node[old])
            of_node[each].meta = {**meta, "val": each.meta["val"]}
            if key is not None:
                self._placed[key] = of_node[each]
                at = of_node[each] if at is self._first_place else at
                self._first_place = of_node[each]
            else:
                at = of_node[each]
        (results,) = next(each for each in traced.graph.nodes if each.op == "output").args
        return [of_node[each] for each in results]

    def _fakes(self) -> list[Any]:
        return [node.meta["val"] for node in self._graph.nodes if "val" in node.meta]


class _Slot:
    """The place of a tensor among the inputs of a traced function."""

    def __init__(self, number: int) -> None:
        self.number = number


def _number(inputs: list[torch.fx.Node], node: torch.fx.Node) -> int:
    """The number of a node among inputs, to which it is added."""
    if node not in inputs:
        inputs.append(node)
    return inputs.index(node)


def _changed(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Nested values with those of a class replaced."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, Parts):
        return Parts(*(_changed(each, kind, function) for each in value))
    if isinstance(value, tuple | list):
        return [_changed(each, kind, function) for each in value]
    if isinstance(value, dict):
        return {name: _changed(each, kind, function) for name, each in value.items()}
    return value


def _flat(found: Any) -> list[Any]:
    """The tensors of a rule's result."""
    if isinstance(found, tuple | list):
        return [tensor for each in found for tensor in _flat(each)]
    return [] if found is None else [found]


def _like(found: Any, nodes: Any) -> Any:
    """Nodes in place of the tensors of a rule's result."""
    if isinstance(found, Parts):
        return Parts(*(None if part is None else next(nodes) for part in found))
    if isinstance(found, tuple | list):
        return [_like(each, nodes) for each in found]
    return next(nodes)


def _packet(node: torch.fx.Node) -> str:
    """An operator's name without its overload."""
    return name_of(node).partition(".")[0]


__all__ = ["is_complex", "of_real_tensors", "with_real_parts"]
