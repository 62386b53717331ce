# SPDX-License-Identifier: Apache-2.0
"""Where in the user's files an operator of a torch.export graph stands, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # an optional package
    import torch

_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)(?:\n\s+(.+))?')


class Frame(NamedTuple):
    """A line of a stack: its file, its number, the function that it stands in, and its text, "" where it is unknown."""

    path: str
    line: str
    function: str
    text: str


def frames_of(node: torch.fx.Node) -> list[Frame]:
    """The stack of the export of an operator, outermost first; empty where the export kept none."""
    return _frames(str(node.meta.get("stack_trace") or ""))


def shown_frame(frame: Frame) -> str:
    """`net.py:31: x = x.foo()`."""
    return f"{PurePath(frame.path).name}:{frame.line}" + (f": {frame.text.strip()}" if frame.text else "")


def place_of(node: torch.fx.Node) -> str:
    """`, net.py:31: x = x.foo()`, the innermost line outside of PyTorch; "" where the export kept no stack."""
    return place_in(str(node.meta.get("stack_trace") or ""))


def place_in(stack: str) -> str:
    """The same of a stack as Python prints it."""
    frames = _frames(stack)
    written = [frame for frame in frames if not frame.path.startswith("<")]  # others are generated
    own = [frame for frame in written if "torch" not in PurePath(frame.path).parts] or frames
    return f", {shown_frame(own[-1])}" if own else ""


def _frames(stack: str) -> list[Frame]:
    return [Frame(*found) for found in _FRAME.findall(stack)]


def listed(nodes: Iterable[torch.fx.Node]) -> str:
    """The operators of some nodes, each with its count and the line of the first."""
    found: dict[str, list[torch.fx.Node]] = {}
    for node in nodes:
        found.setdefault(name_of(node), []).append(node)
    return "; ".join(f"aten.{name} ({len(each)}x{place_of(each[0])})" for name, each in sorted(found.items()))


def type_name(dtype: torch.dtype) -> str:
    """An element type as TVM and numpy call it: `float32`."""
    return str(dtype).removeprefix("torch.")


def name_of(node: torch.fx.Node) -> str:
    """An operator's name and overload, such as `mul.Tensor`."""
    return str(getattr(node.target, "__name__", node.target))
