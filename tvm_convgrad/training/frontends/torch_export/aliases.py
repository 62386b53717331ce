# SPDX-License-Identifier: Apache-2.0
"""Parameters and buffers with several names: modules that a model holds more than once, and tied weights.

torch.export makes an input for each name, and reads one of them only. The names are one tensor no longer when the
program has been saved, so that PyTorch's decomposition finds tensors that share memory, and fails if one is written to.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    import torch


def with_one_name(program: torch.export.ExportedProgram, others: Mapping[str, str]) -> torch.export.ExportedProgram:
    """The program in which each tensor has one name, the first one that the model has for it, and one input.

    Args:
        program: it stays as it is; the new one has the same tensors.
        others: its `other_names`.
    """
    if not others:
        return program
    program = with_own_graph(program)
    graph, signature = program.graph, program.graph_signature
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    first = {spec.target: inputs[spec.arg.name] for spec in signature.input_specs if spec.target is not None}
    kept = []
    for spec in signature.input_specs:
        name = others.get(spec.target)
        if name is None:
            kept.append(spec)
            continue
        inputs[spec.arg.name].replace_all_uses_with(first[name])
        graph.erase_node(inputs[spec.arg.name])
    signature.input_specs[:] = kept
    for spec in signature.output_specs:
        spec.target = others.get(spec.target, spec.target)
    for name in others:
        del program.state_dict[name]
    program.graph_module.recompile()
    return program


def with_own_graph(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """A copy of the program, whose graph may be changed; it has the same tensors, which must not be."""
    tensors = (*program.state_dict.values(), *program.constants.values())
    return copy.deepcopy(program, {id(tensor): tensor for tensor in tensors})


def other_names(program: torch.export.ExportedProgram) -> dict[str, str]:
    """The first name of the same tensor, by each other name of one that is an input of the program under both."""
    order = list(program.state_dict)
    read = {spec.target for spec in program.graph_signature.input_specs}
    names: dict[tuple[object, ...], str] = {}
    others = {}
    for name in order:
        tensor = program.state_dict[name]
        if name not in read or not tensor.numel():
            continue
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        first = names.setdefault(place, name)
        if first != name:
            others[name] = first
    return others


__all__ = ["other_names", "with_one_name", "with_own_graph"]
