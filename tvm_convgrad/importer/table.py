# SPDX-License-Identifier: Apache-2.0
"""The one table of operators: name, attribute type, how many operands, converter. `ops_*.py` fill it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tvm_convgrad.errors import ModelError
from tvm_convgrad.importer.program import Attributes
from tvm_convgrad.importer.schema import REQUIRED, SCHEMAS, Spec

if TYPE_CHECKING:
    from tvm_convgrad.importer.context import Context

Converter = Callable[["Context", list[Any], SimpleNamespace], Any]
"""converter(context, operands, attributes) -> the result: a Relax tensor, or a list of them.

Operands are Relax tensors, or lists of them where Relay has tuples.
"""


@dataclass(frozen=True)
class Entry:
    """An operator: the attribute type by which its fields are known ("" for none), operands, and what makes it.

    `operands` is (fewest, most). `note` says what differs from Relay, or what is left out, in the documentation.
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


def typed(entry: Entry, given: Attributes) -> SimpleNamespace:
    """The attributes of a call with their types checked and defaults filled in.

    Raises:
        ModelError: a field is unknown, missing, or of another type.
    """
    if given.unreadable:
        raise ModelError(f"{entry.name}: {given.unreadable}.")
    schema = SCHEMAS.get(entry.attributes, {})
    unknown = sorted(set(given.values) - set(schema))
    if unknown and given.kind in SCHEMAS:  # an attribute type that shares fields with the one that is expected
        schema = {**SCHEMAS[given.kind], **schema}
        unknown = sorted(set(given.values) - set(schema))
    if unknown:
        raise ModelError(
            f"{entry.name} has the attributes {', '.join(unknown)}, which are not known of {entry.attributes or 'it'}."
        )
    values: dict[str, Any] = {}
    for name, spec in schema.items():
        value = given.values.get(name, spec.default)
        if value is REQUIRED:
            raise ModelError(f"{entry.name} lacks the attribute {name}.")
        values[name] = _checked(entry.name, name, spec, value)
    return SimpleNamespace(**values)


def _checked(op_name: str, name: str, spec: Spec, value: Any) -> Any:
    if spec.kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if spec.kind == "bool" and isinstance(value, int):
        value = bool(value)
    if spec.kind in ("str", "dtype") and value is None:
        value = ""
    if spec.kind == "int?" and value is None and spec.default is not REQUIRED:
        value = spec.default
    wanted: dict[str, type] = {"int": int, "int?": int, "bool": bool, "float": float, "str": str, "dtype": str}
    if spec.kind in wanted and not isinstance(value, wanted[spec.kind]):
        raise ModelError(f"{op_name}: {name} = {str(value)[:60]!r} is no {spec.kind.rstrip('?')}.")
    return value


def integers(what: str, value: Any, *, lowest: int | None = None, count: tuple[int, ...] = ()) -> tuple[int, ...]:
    """An attribute that is a list of integers, or one integer, as a tuple.

    Args:
        what: the attribute, for the message.
        lowest: no integer may be below it.
        count: how many there may be, if that is limited.

    Raises:
        ModelError: it is something else.
    """
    items = (value,) if isinstance(value, int) else value
    if not isinstance(items, tuple | list) or not all(
        isinstance(item, int) and not isinstance(item, bool) for item in items
    ):
        raise ModelError(f"{what} = {str(value)[:60]} is no list of integers.")
    if any(abs(item) > MAX_INTEGER for item in items) or (lowest is not None and any(item < lowest for item in items)):
        raise ModelError(f"{what} = {str(value)[:60]} is out of range.")
    if count and len(items) not in count:
        raise ModelError(f"{what} = {str(value)[:60]} has {len(items)} items; {' or '.join(map(str, count))} fit.")
    return tuple(items)


MAX_INTEGER = 2**40
"""Extents and what is added to them stay below it, so that no arithmetic of TVM overflows."""


def axis_of(what: str, axis: Any, rank: int) -> int:
    """An axis as a number from 0 to rank - 1.

    Raises:
        ModelError: there is no such axis.
    """
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ModelError(f"{what}: axis {str(axis)[:40]} does not exist in {rank} axes.")
    return axis % rank
