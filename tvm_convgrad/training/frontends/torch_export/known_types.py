# SPDX-License-Identifier: Apache-2.0
"""Types of inputs and outputs that a .pt2 file names: dataclasses of the user, output classes of libraries.

torch.export.load knows such a type only if the process has registered it, which a library does when it is imported. A
model's step needs no more of it than the names of its fields, so unknown ones get a stand-in while a file is read.
"""

from __future__ import annotations

import json
import zipfile
from collections import namedtuple
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # an optional package
    from torch.utils._pytree import TreeSpec


class _StandIn:
    """The values of a type that is not known, and what its file says of their names."""

    def __init__(self, values: Sequence[Any], context: str) -> None:
        self.values, self.context = list(values), context


@contextmanager
def known_types(path: Path) -> Iterator[None]:
    """All types that a .pt2 file names can be read, under this context; the names themselves stay free after it."""
    import torch.utils._pytree as tree  # optional

    make_tuple: Any = namedtuple  # of fields that only the file names
    named, tuples = _types_of(path)
    missing = (named | tuples.keys()) - tree.SERIALIZED_TYPE_TO_PYTHON_TYPE.keys()
    for name in missing & tuples.keys():
        tree._register_namedtuple(make_tuple("StandIn", tuples[name]), serialized_type_name=name)
    for name in missing - tuples.keys():
        made = type(name.rpartition(".")[2] or "StandIn", (_StandIn,), {})
        tree.register_pytree_node(
            made,
            lambda value: (value.values, value.context),
            lambda values, context, made=made: made(list(values), context),
            serialized_type_name=name,
            to_dumpable_context=lambda context: context,
            from_dumpable_context=lambda text: text,
        )
    try:
        yield
    finally:
        for name in missing:
            del tree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name]
        if missing:
            getattr(tree.treespec_loads, "cache_clear", lambda: None)()


def _types_of(path: Path) -> tuple[set[str], dict[str, list[str]]]:
    """The names of types in the signatures of a .pt2 file; those of named tuples, with their fields."""
    names: set[str] = set()
    tuples: dict[str, list[str]] = {}

    def visit(value: Any) -> None:
        if isinstance(value, list):
            for each in value:
                visit(each)
        elif isinstance(value, dict):
            if "children_spec" in value:
                names.add(value["type"])
            for name, fields in (value.get("treespec_namedtuple_fields") or {}).items():
                tuples[name] = fields["field_names"]
            for key, each in value.items():
                visit(json.loads(each) if key in ("in_spec", "out_spec") and each else each)

    with zipfile.ZipFile(path) as archive:
        for entry in archive.namelist():
            if entry.endswith(".json") and "weights_config" not in entry:
                try:
                    visit(json.loads(archive.read(entry)))
                except ValueError:
                    continue  # torch.export.load says what is wrong with it
    return names - {None}, tuples


def leaf_names(spec: TreeSpec) -> list[str]:
    """The names of the leaves of nested values: keys, fields or positions, with dots between."""
    children = spec.children() if hasattr(spec, "children") else spec.children_specs
    if spec.type is None:
        return [""]
    names = _child_names(spec.type, spec.context, len(children))
    return [
        ".".join(filter(None, (name, leaf)))
        for name, child in zip(names, children, strict=True)
        for leaf in leaf_names(child)
    ]


def _child_names(kind: Any, context: Any, count: int) -> list[str]:
    """The names of the parts of one value: what its context lists of them, or their positions."""
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except ValueError:
            context = None
    if isinstance(context, type) and hasattr(context, "_fields"):
        context = context._fields
    candidates = [context, *(context if isinstance(context, list | tuple) else ())]
    for names in candidates:  # a dataclass has a list of the names of its fields, and one of those that are None
        if isinstance(names, list | tuple) and len(names) == count and all(isinstance(n, str | int) for n in names):
            return [str(name) for name in names]
    return [str(position) for position in range(count)]
