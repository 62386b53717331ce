# SPDX-License-Identifier: Apache-2.0
"""Which node of an ONNX file an operator stands for, and the line of the user's module, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePath
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # optional packages, imported where they are needed
    import onnx

_STACK = "pkg.torch.onnx.stack_trace"
_FRAME = re.compile(r'File "(.+)", line (\d+), in (\S+)(?:\n\s+(.+))?')
_OWN = ("", "ai.onnx")


def place_of(node: onnx.NodeProto) -> str:
    """`'node_7', net.py:31: x = x.foo()`; only the name where the exporter noted no line, "" if there is none."""
    name = f"'{node.name}'" if node.name else ""
    notes = {entry.key: entry.value for entry in getattr(node, "metadata_props", ())}
    frames = _FRAME.findall(notes.get(_STACK, ""))
    own = [frame for frame in frames if "torch" not in PurePath(frame[0]).parts] or frames
    if not own:
        return name
    path, line, _function, text = own[-1]
    place = f"{PurePath(path).name}:{line}" + (f": {text.strip()}" if text else "")
    return f"{name}, {place}" if name else place


def listed(nodes: Iterable[onnx.NodeProto]) -> str:
    """The operators of some nodes, each with its count, and name and line of the first."""
    found: dict[str, list[onnx.NodeProto]] = {}
    for node in nodes:
        kind = node.op_type if node.domain in _OWN else f"{node.domain}.{node.op_type}"
        found.setdefault(kind, []).append(node)
    parts = []
    for kind, each in sorted(found.items()):
        place = place_of(each[0])
        parts.append(f"{kind} ({len(each)}x{f': {place}' if place else ''})")
    return ", ".join(parts)
