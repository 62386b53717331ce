# SPDX-License-Identifier: Apache-2.0
"""`torch.no_grad()` and `detach` in a graph of torch.export: what gradients must not pass.

The subgraph is a call, whose arguments are replaced by copies behind `convgrad::stop_gradient` where they depend on
trained parameters. Others stay themselves: a buffer that is updated there (power iteration, moving averages, running
statistics) has no gradient anyway, and the copy would be updated instead. So does a detached tensor that is written to.
What PyTorch returns as the argument itself, such as `x.float()` of float32, has the gradient that it had.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterator
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends.torch_export.places import name_of, place_of

if TYPE_CHECKING:  # an optional package
    import torch

_SUBGRAPH = "wrap_with_set_grad_enabled"

_NORMS = ("batch_norm.default", "instance_norm.default")
"""Operators that write to their running statistics, arguments 3 and 4, of which their schemas do not tell."""


def trained_parameters(program: torch.export.ExportedProgram) -> set[str]:
    """The names of the parameters that have gradients."""
    return {name for name, parameter in program.named_parameters() if parameter.requires_grad}


def trained_inputs(program: torch.export.ExportedProgram) -> set[str]:
    """The inputs of a program's graph that are trained parameters."""
    trained = trained_parameters(program)
    return {spec.arg.name for spec in program.graph_signature.input_specs if spec.target in trained}


def stop_gradients(node: torch.fx.Node, trained: Container[str], source: str) -> None:
    """Let no gradient pass the call of a subgraph that was exported under `torch.no_grad()`; other nodes stay.

    Args:
        node: any call.
        trained: as `trained_inputs` gives them.
        source: what errors call the program.

    Raises:
        ModelError: the subgraph writes to a tensor that depends on trained parameters, whose gradient would be lost.
    """
    import torch

    if name_of(node) != _SUBGRAPH or node.args[0] is not False:
        return
    written, returned = _written(node), _returned(node)
    arguments = list(node.args[2:])
    for number, argument in enumerate(arguments):
        if not isinstance(argument, torch.fx.Node) or not _depends_on(argument, trained):
            continue
        if number in written:
            raise _refusal(written[number], "inside torch.no_grad()", source)
        for field in node.users:
            if field.target is operator.getitem and returned.get(field.args[1]) == number:
                field.replace_all_uses_with(argument)
        with node.graph.inserting_before(node):
            arguments[number] = node.graph.call_function(torch.ops.convgrad.stop_gradient.default, (argument,))
    node.args = (*node.args[:2], *arguments)


def is_own_value(node: torch.fx.Node, trained: Container[str], source: str) -> bool:
    """Whether a detached tensor may be a copy; if not, it stays the memory of its operand, which is no parameter's.

    Args:
        node: a call of `detach`.
        trained, source: as for `stop_gradients`.

    Raises:
        ModelError: it depends on trained parameters, and it is written to, or read after its operand was.
    """
    operand, order = node.args[0], list(node.graph.nodes)
    views, others = {node}, {operand} | {each for each in order if is_view(each, operand)} - {node}
    view_written, other_written = None, None
    is_read_later = False
    for each in order[order.index(node) + 1 :]:
        is_read_later |= other_written is not None and not views.isdisjoint(each.all_input_nodes)
        for tensor, is_written, is_returned in aliases_of(each):
            if is_written and tensor in views:
                view_written = view_written or each
            elif is_written and tensor in others:
                other_written = other_written or each
            for owned in (views, others):
                if is_returned and tensor in owned:
                    owned.add(each)
    depends = _depends_on(node, trained)
    if depends and view_written is not None:
        raise _refusal(view_written, "through detach()", source)
    if depends and other_written is not None and is_read_later:
        raise _refusal(other_written, "which is read through an earlier detach() later", source)
    return depends or (view_written is None and not is_read_later)


def is_view(node: torch.fx.Node, of: torch.fx.Node) -> bool:
    """Whether a tensor is the memory of another, directly or through views."""
    while node is not of:
        shared = [tensor for tensor, _, is_returned in aliases_of(node) if is_returned] if node.op != "output" else []
        if not shared:
            return False
        node = shared[0]
    return True


def _refusal(node: torch.fx.Node, how: str, source: str) -> ModelError:
    place = place_of(node).removeprefix(", ")
    if name_of(node) == "embedding_renorm_.default":
        return ModelError(
            f"{source}: an embedding with max_norm{f' ({place})' if place else ''} changes its weight in the forward "
            "pass, which the optimizer updates, too; shorten the rows that are read instead: "
            "rows * (max_norm / rows.norm(dim=-1, keepdim=True)).clamp(max=1)."
        )
    return ModelError(
        f"{source}: aten.{name_of(node)}{f' ({place})' if place else ''} writes to a tensor that depends on "
        f"parameters, {how}, so that its gradient would be wrong; write to a copy of it (x.detach().clone()), or to a "
        "buffer."
    )


def _called(node: torch.fx.Node) -> torch.fx.Graph:
    """The graph that the call of a subgraph runs."""
    import torch

    called = node.args[1]
    assert isinstance(called, torch.fx.Node)
    module = node.graph.owning_module.get_submodule(str(called.target))
    assert isinstance(module, torch.fx.GraphModule)
    return module.graph


def _returned(node: torch.fx.Node) -> dict[int, int]:
    """For each result of a subgraph that is one of its arguments, their numbers."""
    graph = _called(node)
    places = [each for each in graph.nodes if each.op == "placeholder"]
    found = {}
    for number, result in enumerate(graph.output_node().args[0]):
        while _is_node(result) and result.op == "call_function" and _is_its_operand(result):
            result = result.args[0]
        if result in places:
            found[number] = places.index(result)
    return found


def _is_its_operand(node: torch.fx.Node) -> bool:
    """Whether an operator gives its first operand itself, and no view or copy of it: PyTorch is asked."""
    import torch

    operand = node.args[0] if node.args else None
    if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(operand, torch.fx.Node):
        return False
    value, others = operand.meta.get("val"), [*node.args[1:], *node.kwargs.values()]
    if not isinstance(value, torch.Tensor) or any(_is_node(each) for each in others):
        return False
    sizes = [int(extent) if isinstance(extent, int) else 2 for extent in value.shape]
    trial = torch.empty(sizes, dtype=value.dtype, device="meta")
    with torch.no_grad():
        return node.target(trial, *node.args[1:], **node.kwargs) is trial


def _written(node: torch.fx.Node) -> dict[int, torch.fx.Node]:
    """The arguments of a subgraph, by number, that it writes to, each with an operator that does."""
    graph = _called(node)
    places = [each for each in graph.nodes if each.op == "placeholder"]
    owner = {place: place for place in places}
    """For each tensor of the subgraph the argument whose memory it is, if it is that of one."""
    found: dict[int, torch.fx.Node] = {}
    for each in graph.nodes:
        if each.op != "call_function":
            continue
        for tensor, is_written, is_returned in aliases_of(each):
            if tensor in owner and is_written:
                found.setdefault(places.index(owner[tensor]), each)
            if tensor in owner and is_returned:
                owner[each] = owner[tensor]
    return found


def aliases_of(node: torch.fx.Node) -> Iterator[tuple[torch.fx.Node, bool, bool]]:
    """The tensors among a call's arguments: whether it writes to them, and whether its result is memory of theirs."""
    import torch

    if node.target is operator.getitem:
        yield node.args[0], False, True
    elif name_of(node) == _SUBGRAPH:
        inner = _written(node)
        yield from ((each, number in inner, False) for number, each in enumerate(node.args[2:]) if _is_node(each))
    elif name_of(node) in _NORMS:
        yield from ((each, True, False) for each in node.args[3:5] if _is_node(each))
    elif isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        returned = {name for each in schema.returns if each.alias_info for name in each.alias_info.before_set}
        given = dict(zip((each.name for each in schema.arguments), node.args, strict=False)) | node.kwargs
        for argument in schema.arguments:
            alias, tensor = argument.alias_info, given.get(argument.name)
            if alias is not None and _is_node(tensor):
                yield tensor, alias.is_write, bool(alias.before_set & returned)


def _is_node(value: object) -> bool:
    import torch

    return isinstance(value, torch.fx.Node)


def _depends_on(node: torch.fx.Node, trained: Container[str]) -> bool:
    """Whether a tensor is a trained parameter, or is computed from one other than through `stop_gradient`."""
    seen, waiting = set(), [node]
    while waiting:
        each = waiting.pop()
        if each in seen or name_of(each) == "stop_gradient.default":
            continue
        seen.add(each)
        if each.op == "placeholder" and each.name in trained:
            return True
        waiting += each.all_input_nodes
    return False


__all__ = ["is_own_value", "stop_gradients", "trained_inputs"]
