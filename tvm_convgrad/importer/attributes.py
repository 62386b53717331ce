# SPDX-License-Identifier: Apache-2.0
"""Reading the attributes of a Relay call: their types, defaults and ranges are checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.program import Attributes
from tvm_convgrad.importer.schema import REQUIRED, SCHEMAS, Spec

MAX_INTEGER = 2**40
"""Extents and what is added to them stay below it, so that no arithmetic of TVM overflows."""


def typed(operator: str, kind: str, given: Attributes) -> SimpleNamespace:
    """The attributes of a call with their types checked and defaults filled in.

    Args:
        operator: its name, for messages.
        kind: the type of its attributes in `schema.SCHEMAS`, or "" for an operator without any.

    Raises:
        ModelError: a field is unknown, missing, or of another type.
    """
    if given.unreadable:
        raise ModelError(f"{operator}: {given.unreadable}.")
    schema = SCHEMAS.get(kind, {})
    unknown = sorted(set(given.values) - set(schema))
    if unknown and given.kind in SCHEMAS:  # an attribute type that shares fields with the one that is expected
        schema = {**SCHEMAS[given.kind], **schema}
        unknown = sorted(set(given.values) - set(schema))
    if unknown:
        raise ModelError(f"{operator} has the attributes {', '.join(unknown)}, which are unknown in {kind or 'it'}.")
    values: dict[str, Any] = {}
    for name, spec in schema.items():
        value = given.values.get(name, spec.default)
        if value is REQUIRED:
            raise ModelError(f"{operator} lacks the attribute {name}.")
        values[name] = _checked(operator, name, spec, value)
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
        raise ModelError(f"{op_name}: {name} = {str(value)[:60]!r} is not of type {spec.kind.rstrip('?')}.")
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
        raise ModelError(f"{what} = {str(value)[:60]} is not a list of integers.")
    if any(abs(item) > MAX_INTEGER for item in items) or (lowest is not None and any(item < lowest for item in items)):
        raise ModelError(f"{what} = {str(value)[:60]} is out of range.")
    if count and len(items) not in count:
        raise ModelError(f"{what} = {str(value)[:60]} has {len(items)} items; {' or '.join(map(str, count))} fit.")
    return tuple(items)


def axis_of(what: str, axis: Any, rank: int) -> int:
    """An axis as a number from 0 to rank - 1.

    Raises:
        ModelError: there is no such axis.
    """
    if not isinstance(axis, int) or not -rank <= axis < rank:
        raise ModelError(f"{what}: axis {str(axis)[:40]} does not exist in {rank} axes.")
    return axis % rank
