# SPDX-License-Identifier: Apache-2.0
"""Relay programs as plain frozen values: what both parsers make, and what the converter reads. Loads no TVM.

Expressions are compared by identity: one that is used twice is one object, and is computed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Union

import numpy as np

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class TensorType:
    """Extents (None where Relay has Any) and element type, such as "float32", "int8" or "bool"."""

    shape: tuple[int | None, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join('?' if extent is None else str(extent) for extent in self.shape)}]"


@dataclass(frozen=True)
class TupleType:
    """Types of the fields; None: an unknown field."""

    fields: tuple[Type | None, ...]

    def __str__(self) -> str:
        return f"({', '.join('?' if field is None else str(field) for field in self.fields)})"


@dataclass(frozen=True)
class OtherType:
    """A type that no tensor has: of a function, a reference, an algebraic data type. `kind` is Relay's name."""

    kind: str

    def __str__(self) -> str:
        return self.kind


Type = Union[TensorType, TupleType, OtherType]


@dataclass(frozen=True, eq=False)
class Var:
    """A parameter, or what a let binds. Two variables of one name are two variables."""

    name: str
    type: Type | None


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor. `value` is None where the text refers to metadata that it does not carry; `name` is that reference."""

    value: Array | None
    type: Type | None = None
    name: str = ""


@dataclass(frozen=True, eq=False)
class Tuple:
    """Several values."""

    fields: tuple[Expr, ...]


@dataclass(frozen=True, eq=False)
class Field:
    """One value of a tuple."""

    value: Expr
    index: int


@dataclass(frozen=True)
class Attributes:
    """What a call was given beside its arguments: `kind` names the Relay type, and is empty for keywords of a text.

    `values` are raw: strings as JSON holds them, or those of a text; `schema` makes them typed. `unreadable` is
    set for attributes that could not be read; it is the reason.
    """

    kind: str
    values: Mapping[str, Any]
    unreadable: str = ""


NO_ATTRIBUTES = Attributes("", {})


@dataclass(frozen=True, eq=False)
class Call:
    """A call of an operator (`op` is its name) or of a function. `type` is what Relay inferred, if that is known."""

    op: str | Expr
    args: tuple[Expr, ...]
    attributes: Attributes = NO_ATTRIBUTES
    type: Type | None = None


@dataclass(frozen=True, eq=False)
class Function:
    """A function literal; `attributes` are those such as Primitive, Composite and Compiler."""

    params: tuple[Var, ...]
    body: Expr
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Let:
    """`value` is computed, then `body` with `var` standing for it."""

    var: Var
    value: Expr
    body: Expr


@dataclass(frozen=True, eq=False)
class If:
    """One of two values."""

    condition: Expr
    then: Expr
    other: Expr


@dataclass(frozen=True, eq=False)
class GlobalRef:
    """A function of the module by its name."""

    name: str


@dataclass(frozen=True, eq=False)
class Operator:
    """An operator that stands where a value is wanted, by its name."""

    name: str


@dataclass(frozen=True, eq=False)
class RefCreate:
    """A new reference that holds `value`."""

    value: Expr


@dataclass(frozen=True, eq=False)
class RefRead:
    """What a reference holds."""

    ref: Expr


@dataclass(frozen=True, eq=False)
class RefWrite:
    """Another value for a reference; the result is the empty tuple."""

    ref: Expr
    value: Expr


@dataclass(frozen=True, eq=False)
class Unsupported:
    """An expression of a kind that is not imported: pattern matching, constructors."""

    kind: str
    children: tuple[Expr, ...] = ()


Expr = Union[
    Var,
    Constant,
    Tuple,
    Field,
    Call,
    Function,
    Let,
    If,
    GlobalRef,
    Operator,
    RefCreate,
    RefRead,
    RefWrite,
    Unsupported,
]


@dataclass(frozen=True)
class Program:
    """The functions of a module by name, the version that wrote it ("" if unknown), and where it was read from."""

    functions: Mapping[str, Function]
    version: str
    source: str


TYPES = (TensorType, TupleType, OtherType)
REFERENCES = (RefCreate, RefRead, RefWrite)
EXPRS = (Var, Constant, Tuple, Field, Call, Function, Let, If, GlobalRef, Operator, *REFERENCES, Unsupported)
"""The classes, for isinstance."""


def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly inside one."""
    match expr:
        case Tuple(fields=fields):
            return fields
        case Field(value=value) | RefCreate(value=value) | RefRead(ref=value):
            return (value,)
        case RefWrite(ref=ref, value=value):
            return (ref, value)
        case Call(op=op, args=args):
            return args if isinstance(op, str) else (op, *args)
        case Function(params=params, body=body):
            return (*params, body)
        case Let(var=var, value=value, body=body):
            return (var, value, body)
        case If(condition=condition, then=then, other=other):
            return (condition, then, other)
        case Unsupported(children=inside):
            return inside
    return ()


def walk(program: Program, entry: str = "main") -> Iterator[Expr]:
    """Every expression that `entry` reaches, each once, through global functions too; without recursion."""
    seen: set[int] = set()
    stack: list[Expr] = [program.functions[entry]]
    while stack:
        expr = stack.pop()
        if id(expr) in seen:
            continue
        seen.add(id(expr))
        yield expr
        stack.extend(reversed(children(expr)))
        if isinstance(expr, GlobalRef) and expr.name in program.functions:
            stack.append(program.functions[expr.name])
