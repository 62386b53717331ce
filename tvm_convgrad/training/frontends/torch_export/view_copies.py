# SPDX-License-Identifier: Apache-2.0
"""Views: a step has none, so that operators which copy are those which view, and views need no strides."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm_convgrad.training.frontends.torch_export.no_grad import aliases_of, is_view
from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # an optional package
    import torch

_VIEWS = (
    *("view", "permute", "expand", "squeeze", "unsqueeze", "t", "transpose", "select", "slice", "split"),
    *("split_with_sizes", "unbind", "diagonal", "unfold", "as_strided", "alias", "view_as_real", "view_as_complex"),
    *("_conj", "_neg_view"),
)


def view_copies() -> dict[Any, Callable[..., Any]]:
    """Each copying operator, such as `view_copy` of functionalised programs, as the viewing one."""
    import torch

    aten = torch.ops.aten
    found: dict[Any, Callable[..., Any]] = {}
    for name in _VIEWS:
        copying = getattr(aten, f"{name}_copy")
        for overload in copying.overloads():
            if not overload.endswith("out"):
                found[getattr(copying, overload)] = getattr(getattr(aten, name), overload)
    return found


_PERMUTATIONS = ("permute.default", "transpose.int", "t.default", "movedim.int", "movedim.intlist", "swapaxes.default")


def with_reshapes(program: torch.export.ExportedProgram) -> None:
    """Change a program so that a view of a permuted tensor is a reshape, unless it or a view of it is written to.

    Such a view relies on the strides of what is permuted: those of attention's result on CPUs are such that it is
    contiguous with the axes of heads and positions exchanged. A decomposition has other strides.
    """
    import torch

    nodes = list(program.graph.nodes)
    found = [
        node for node in nodes if node.target is torch.ops.aten.view.default and name_of(node.args[0]) in _PERMUTATIONS
    ]
    written = [tensor for node in nodes for tensor, is_written, _ in aliases_of(node) if is_written] if found else []
    for node in found:
        if not any(is_view(tensor, node) for tensor in written):
            node.target = torch.ops.aten.reshape.default


__all__ = ["view_copies", "with_reshapes"]
