# SPDX-License-Identifier: Apache-2.0
"""The messages of errors, read from the sources: what stands in `raise SomeError(...)`."""

from __future__ import annotations

import ast
from collections.abc import Set
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("tvm_convgrad", "relax_ops", "relay_ops", "legalize")


def by_class(classes: Set[str]) -> dict[str, list[tuple[str, str]]]:
    """For each class (message, file) of all places that raise it with a text, in the order of the messages."""
    found: dict[str, set[tuple[str, str]]] = {name: set() for name in sorted(classes)}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for name, message in _calls_with_texts(path):
                if name in found:
                    found[name].add((message, f"`{path.relative_to(ROOT)}`"))
    return {name: sorted(rows) for name, rows in found.items() if rows}


@cache
def _calls_with_texts(path: Path) -> tuple[tuple[str, str], ...]:
    """The names that a file calls with a text as the first argument, and the texts."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.args:
            message = _text(node.args[0])
            if message.strip("… "):
                found.append((node.func.id, f"`{message}`" if "`" not in message else f"`` {message} ``"))
    return tuple(found)


def _text(node: ast.expr) -> str:
    """A string as it is written, with … for each value in it; "…" of what is not a string."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split(" "))
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"
