# SPDX-License-Identifier: Apache-2.0
"""Functions with a backward of their own (`torch.autograd.Function`), of which torch.export keeps the forward only.

By default their forward's operators are those of the program, and differentiated as such. With `strict=True` they stand
under `torch.no_grad()`, so that no gradient passes them. The program does not name the function, but its operators have
the stack of the export.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING

from tvm_convgrad.training.frontends.torch_export.places import Frame, frames_of, shown_frame

if TYPE_CHECKING:  # an optional package
    import torch

_STRICT = ("_functorch", "autograd_function.py")
"""The end of the path in which strict export traces such a function."""


def own_backwards(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """A warning for each line that calls a `torch.autograd.Function` by its `apply`, in the order of the program."""
    found: dict[str, bool] = {}
    graphs = [part.graph for part in program.graph_module.modules() if hasattr(part, "graph")]
    for node in (node for graph in graphs for node in graph.nodes):
        frames = frames_of(node)
        for place in range(1, len(frames)):
            is_strict = PurePath(frames[place].path).parts[-2:] == _STRICT
            if is_strict or _enters(frames[place - 1], frames[place]):
                shown = shown_frame(frames[place - 1])
                found[shown] = found.get(shown, False) or is_strict
    return tuple(_warning(shown, is_strict) for shown, is_strict in found.items())


def _enters(caller: Frame, called: Frame) -> bool:
    """Whether a line outside of PyTorch calls `apply`, and what runs next is a function `forward`.

    PyTorch's own functions, as that of a checkpoint, have the gradient of their forward.
    """
    return "torch" not in PurePath(caller.path).parts and ".apply(" in caller.text and called.function == "forward"


def _warning(place: str, is_strict: bool) -> str:
    begin = f"{place} calls a torch.autograd.Function, whose backward torch.export does not keep"
    if is_strict:
        return f"{begin}: strict=True lets no gradient pass it. Export with strict=False to differentiate its forward."
    return f"{begin}: its forward is differentiated. Where its own gradient is another one, write that with detach()."
