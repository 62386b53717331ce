# SPDX-License-Identifier: Apache-2.0
"""The one table of operators: name, attribute type, how many operands, converter. `ops_*.py` fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

from tvm import relax

from tvm_convgrad.importer.context import Context
from tvm_convgrad.importer.schema import SCHEMAS

Converter = Callable[[Context, list[relax.Expr], SimpleNamespace], relax.Expr | list[relax.Expr]]
"""converter(context, operands, attributes) -> the result: a Relax tensor, or a list of them.

Operands are Relax tensors, or lists of them where Relay has tuples.
"""


@dataclass(frozen=True)
class Entry:
    """An operator: its attribute type ("" for none), its number of operands, and its converter.

    `operands` is (fewest, most). `note` is what differs from Relay, or what is omitted, in the documentation.
    """

    name: str
    attributes: str
    operands: tuple[int, int]
    convert: Converter
    note: str


TABLE: dict[str, Entry] = {}
"""Every operator that is imported, by name."""


def op(
    *names: str, attributes: str = "", operands: int | tuple[int, int] = 1, note: str = ""
) -> Callable[[Converter], Converter]:
    """Register a converter under names."""
    if attributes and attributes not in SCHEMAS:
        raise KeyError(attributes)

    def add(convert: Converter) -> Converter:
        for name in names:
            if name in TABLE:
                raise KeyError(name)
            counts = (operands, operands) if isinstance(operands, int) else operands
            TABLE[name] = Entry(name, attributes, counts, convert, note)
        return convert

    return add
