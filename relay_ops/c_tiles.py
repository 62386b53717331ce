# SPDX-License-Identifier: Apache-2.0
"""Register tiles of the C loops: the three inner axes of a convolution with vectors of GNU C, sums in registers.

Of the axes o, i and the last one of y, the result lacks one, over which it sums; each operand has that one and one of
the other two. A tile is a few places of those by a vector.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from tvm_convgrad.core.catalogue import Direction

WIDTHS = (16, 8, 4, 2)
"""Elements of the vectors that there are types for."""

TILE = 8
"""Vectors of sums in registers; x86-64 has 16 registers at least."""


class Inner(NamedTuple):
    """The inner loops of a direction.

    Attributes:
        direction: which of forward, wgrad and dgrad.
        ctype: the element type.
        axes: o, i and the last one of y.
        vector: of them, the one along which vectors lie.
        bounds: first and end of each axis, C expressions.
        move: how far each tensor moves when an axis moves by one.
    """

    direction: Direction
    ctype: str
    axes: tuple[str, ...]
    vector: str
    bounds: Mapping[str, tuple[str, str]]
    move: Mapping[str, Mapping[str, int]]

    @property
    def reduction(self) -> str:
        """The axis that the result lacks."""
        return next(axis for axis in self.axes if not self.move[self.direction.result][axis])


def vector_types(ctypes: tuple[str, ...]) -> str:
    """The types of vectors: unaligned, and of memory that is read as their elements, too."""
    sizes = {"float": 4, "double": 8}
    lines = [
        f"typedef {ctype} {ctype}{width} __attribute__((vector_size({sizes[ctype] * width}), "
        f"aligned({sizes[ctype]}), may_alias));"
        for ctype in ctypes
        for width in WIDTHS
    ]
    return "\n".join(lines) + "\n"


def tiles(inner: Inner, width: int, extent: int) -> list[str] | None:
    """The statements of the inner loops, from pointers <tensor>_row; None where vectors would not be contiguous.

    Args:
        inner: the loops; each of their axes that is not the reduction moves the result.
        width: elements of the widest vector of the target.
        extent: of the vector's axis.
    """
    operands, result, v = inner.direction.operands, inner.direction.result, inner.vector
    moving = [tensor for tensor in (*operands, result) if inner.move[tensor][v]]
    if any(inner.move[tensor][v] != 1 for tensor in moving):
        return None
    if v == inner.reduction:
        return list(_dots(inner, _fewest_steps(width, extent)))
    (vector,) = (operand for operand in operands if operand in moving)
    (scalar,) = (operand for operand in operands if operand not in moving)
    return list(_updates(inner, vector, scalar, width))


def _updates(inner: Inner, vector: str, scalar: str, width: int) -> Iterator[str]:
    """The vector lies along the result: each step adds an operand's vector times a scalar of the other one."""
    v, r, move = inner.vector, inner.reduction, inner.move
    (t,) = (axis for axis in inner.axes if axis not in (v, r))
    result = inner.direction.result
    yield f"int64_t {t} = {inner.bounds[t][0]};"
    for tile in (TILE, 2, 1):
        yield f"for (; {t} + {tile} <= {inner.bounds[t][1]}; {t} += {tile}) {{"
        yield f"int64_t {v} = {inner.bounds[v][0]};"
        for lanes in (*(each for each in WIDTHS if each <= width), 1):
            kind = f"{inner.ctype}{lanes}" if lanes > 1 else inner.ctype
            yield f"for (; {v} + {lanes} <= {inner.bounds[v][1]}; {v} += {lanes}) {{"
            places = [f"{result}_row + {v} + ({t} + {n}) * {move[result][t]}" for n in range(tile)]
            for n, place in enumerate(places):
                yield f"{kind} sum{n} = *({kind}*)({place});"
            yield f"for (int64_t {r} = {inner.bounds[r][0]}; {r} < {inner.bounds[r][1]}; ++{r}) {{"
            yield f"const {kind} x = *(const {kind}*)({vector}_row + {v} + {r} * {move[vector][r]});"
            for n in range(tile):
                yield f"sum{n} += x * {scalar}_row[({t} + {n}) * {move[scalar][t]} + {r} * {move[scalar][r]}];"
            yield "}"
            for n, place in enumerate(places):
                yield f"*({kind}*)({place}) = sum{n};"
            yield "}"
        yield "}"


def _dots(inner: Inner, width: int) -> Iterator[str]:
    """The vector lies along the reduction: products of vectors of both operands, whose lanes are added at the end."""
    v, move, result = inner.vector, inner.move, inner.direction.result
    first, second = inner.direction.operands
    # The axis that each operand shares with the result.
    a, b = (next(axis for axis in inner.axes if axis != v and move[each][axis]) for each in (first, second))
    kind = f"{inner.ctype}{width}" if width > 1 else inner.ctype
    yield f"int64_t {a} = {inner.bounds[a][0]};"
    for rows in (4, 1):
        yield f"for (; {a} + {rows} <= {inner.bounds[a][1]}; {a} += {rows}) {{"
        yield f"int64_t {b} = {inner.bounds[b][0]};"
        for columns in (TILE // 4, 1):
            cells = [(m, n) for m in range(rows) for n in range(columns)]
            yield f"for (; {b} + {columns} <= {inner.bounds[b][1]}; {b} += {columns}) {{"
            yield f"int64_t {v} = {inner.bounds[v][0]};"
            yield from (f"{kind} lanes{m}_{n} = {{0}};" for m, n in cells)
            yield f"for (; {v} + {width} <= {inner.bounds[v][1]}; {v} += {width}) {{"
            for m in range(rows):
                yield f"const {kind} p{m} = *(const {kind}*)({first}_row + ({a} + {m}) * {move[first][a]} + {v});"
            for n in range(columns):
                yield f"const {kind} q{n} = *(const {kind}*)({second}_row + ({b} + {n}) * {move[second][b]} + {v});"
            yield from (f"lanes{m}_{n} += p{m} * q{n};" for m, n in cells)
            yield "}"
            for m, n in cells:
                lanes = " + ".join(f"lanes{m}_{n}[{lane}]" for lane in range(width)) if width > 1 else f"lanes{m}_{n}"
                yield f"{inner.ctype} sum{m}_{n} = {lanes};"
            yield f"for (; {v} < {inner.bounds[v][1]}; ++{v}) {{"
            for m, n in cells:
                p = f"{first}_row[({a} + {m}) * {move[first][a]} + {v}]"
                yield f"sum{m}_{n} += {p} * {second}_row[({b} + {n}) * {move[second][b]} + {v}];"
            yield "}"
            for m, n in cells:
                place = f"({a} + {m}) * {move[result][a]} + ({b} + {n}) * {move[result][b]}"
                yield f"{result}_row[{place}] += sum{m}_{n};"
            yield "}"
        yield "}"


def _fewest_steps(width: int, extent: int) -> int:
    """The width that covers an extent in the fewest steps, those of single elements included."""
    return min(
        (each for each in (*WIDTHS, 1) if each <= width), key=lambda each: (extent // each + extent % each, -each)
    )


__all__ = ["Inner", "tiles", "vector_types"]
