# SPDX-License-Identifier: Apache-2.0
"""Operators along an axis of a tensor that has none, which PyTorch takes for a vector of one element.

TVM's operators refuse axis 0 of a scalar: of `loss.softmax(0)` and `x.sum().cumsum(0)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # an optional package
    import torch


def with_scalars_as_vectors(program: torch.export.ExportedProgram) -> None:
    """Change a program so that operators along an axis get vectors of one element in place of scalars."""
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not _is_along_axis(node):
            continue
        number = node.args[3:] if name_of(node) == "index_fill.int_Tensor" else ()  # is a scalar always
        for operand in node.all_input_nodes:
            if operand in number:
                continue
            value = operand.meta.get("val")
            if getattr(value, "ndim", None) == 0:
                with program.graph.inserting_before(node):
                    node.replace_input_with(operand, _viewed(operand, [1]))
        results = [user for user in node.users if name_of(user) == "getitem"] or [node]
        for result in results:
            users = list(result.users)
            with program.graph.inserting_after(result):
                scalar = _viewed(result, [])
            result.meta = {**result.meta, "val": result.meta["val"].reshape(1)}
            for user in users:
                user.replace_input_with(result, scalar)


def _is_along_axis(node: torch.fx.Node) -> bool:
    """Whether an operator has an axis, a scalar as first operand, and scalars as results."""
    schema = getattr(node.target, "_schema", None)
    if schema is None or not any(argument.name in ("dim", "dims") for argument in schema.arguments):
        return False
    first = node.args[0] if node.args else None
    if name_of(node).startswith("permute"):  # of no axes
        return False
    if getattr(getattr(first, "meta", {}).get("val"), "ndim", None) != 0:
        return False
    given = node.meta.get("val")
    results = list(given) if isinstance(given, tuple | list) else [given]
    return all(getattr(result, "ndim", None) == 0 for result in results)


def _viewed(tensor: torch.fx.Node, shape: list[int]) -> torch.fx.Node:
    import torch

    made = tensor.graph.call_function(torch.ops.aten.view.default, (tensor, shape))
    made.meta = {**tensor.meta, "val": tensor.meta["val"].reshape(shape)}
    return made
