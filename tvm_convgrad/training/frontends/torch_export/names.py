# SPDX-License-Identifier: Apache-2.0
"""Names of parameters and buffers that torch.fx's GraphModule has for itself, such as `code` and `graph`.

torch.export takes and saves a model whose attributes are called so, but PyTorch cannot decompose the program: it sets
each tensor as an attribute of a GraphModule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.torch_export.aliases import with_own_graph

if TYPE_CHECKING:  # an optional package
    import torch

_PREFIX = "convgrad_"


def with_free_names(program: torch.export.ExportedProgram) -> tuple[torch.export.ExportedProgram, Mapping[str, str]]:
    """The program with each tensor that has such a name called otherwise, and the model's names by the new ones."""
    import torch  # optional

    empty = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    tensors = {*program.state_dict, *program.constants}
    renamed = {name: _PREFIX + name for name in tensors if hasattr(empty, name.partition(".")[0])}
    if not renamed:
        return program, {}
    program = with_own_graph(program)
    signature = program.graph_signature
    kinds = torch.export.graph_signature.OutputKind
    mutations = (kinds.BUFFER_MUTATION, kinds.PARAMETER_MUTATION)
    for spec in (*signature.input_specs, *(each for each in signature.output_specs if each.kind in mutations)):
        spec.target = renamed.get(spec.target, spec.target)
    for holder in (program.state_dict, program.constants):
        for old in renamed.keys() & holder.keys():
            holder[renamed[old]] = holder.pop(old)
    return program, {new: old for old, new in renamed.items()}
