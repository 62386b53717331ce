# SPDX-License-Identifier: Apache-2.0
"""repeat_interleave by a constant tensor of repeats: a selection at constant indices.

torch.export gives its result an extent that depends on data, which is known if the repeats are a tensor of the program.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tvm import relax

from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

NUMBERS = "numbers.default"
"""The operator that makes a constant vector, as the importer calls it."""

_COPIES = (
    *("lift_fresh_copy.default", "detach.default", "detach_.default", "clone.default", "alias.default"),
    "stop_gradient.default",
)


def numbers(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The vector as a constant."""
    return relax.const(np.array(node.args[0], "int64"), "int64")


def with_constant_repeats(program: torch.export.ExportedProgram) -> None:
    """Change a program so that each repeat_interleave by a constant tensor selects at constant indices."""
    import torch

    _declare_numbers()
    for node in list(program.graph.nodes):
        if node.op != "call_function" or name_of(node) != "repeat_interleave.self_Tensor":
            continue
        repeats = _constant(program, node.args[1])
        if repeats is None:
            continue
        meta = {name: value for name, value in node.meta.items() if name != "unbacked_bindings"}
        x, axis = node.args[0], node.args[2] if len(node.args) > 2 else node.kwargs.get("dim")
        with program.graph.inserting_before(node):
            if axis is None:
                x = program.graph.call_function(torch.ops.aten.reshape.default, (x, [-1]))
                x.meta = {**meta, "val": node.args[0].meta["val"].reshape(-1)}
            extent = x.meta["val"].shape[axis or 0]
            counts = [int(repeats)] * extent if repeats.ndim == 0 or repeats.numel() == 1 else repeats.tolist()
            places = [place for place, count in enumerate(counts) for _ in range(count)]
            vector = program.graph.call_function(torch.ops.convgrad.numbers.default, (places,))
            with node.meta["val"].fake_mode:
                vector.meta = {**meta, "val": torch.empty(len(places), dtype=torch.int64)}
                value = x.meta["val"].index_select(axis or 0, vector.meta["val"])
            found = program.graph.call_function(torch.ops.aten.index_select.default, (x, axis or 0, vector))
            found.meta = {**meta, "val": value}
        node.replace_all_uses_with(found)
        program.graph.erase_node(node)


def _constant(program: torch.export.ExportedProgram, node: torch.fx.Node) -> torch.Tensor | None:
    """The value of a tensor that the program keeps and does not write, or None."""
    while node.op == "call_function" and name_of(node) in _COPIES:
        node = node.args[0]
    signature = program.graph_signature
    written = (*signature.buffers_to_mutate.values(), *signature.parameters_to_mutate.values())
    target = {spec.arg.name: spec.target for spec in signature.input_specs if spec.target is not None}.get(node.name)
    if node.op != "placeholder" or target is None or target in written:
        return None
    return program.constants.get(target, program.state_dict.get(target))


def _declare_numbers() -> None:
    import torch

    if not hasattr(torch.ops.convgrad, "numbers"):
        torch.library.define("convgrad::numbers", "(int[] values) -> Tensor")
        torch.library.impl("convgrad::numbers", "CompositeExplicitAutograd", lambda values: torch.tensor(values))
        torch.library.register_fake("convgrad::numbers", lambda values: torch.empty(len(values), dtype=torch.int64))


__all__ = ["NUMBERS", "numbers", "with_constant_repeats"]
