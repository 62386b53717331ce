# SPDX-License-Identifier: Apache-2.0
"""vmap of a direction of the convolution by the batching table: operands folded, one unbatched call, result unfolded.

Levels of vmap are folded from the outermost to the innermost and unfolded in the opposite order. A batch of symbolic
extent cannot become channels or groups, which are numbers in a program: such a level is carried to the call as an axis.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from legalize.builder import Builder, Extent, Value
from legalize.rearrange import rearrange
from tvm_convgrad.core.batch_rules import BatchRule, rule_of
from tvm_convgrad.core.catalogue import Direction
from tvm_convgrad.core.errors import ProblemError

Level = Mapping[str, "int | None"]
"""Of one vmap: where each operand has the batch axis, counted from the front after the outer levels' axes are gone."""

_TERM = re.compile(r"\([^()]*\)|\.\.\.|\w+")


@dataclass(frozen=True)
class UnbatchedCall:
    """The unbatched call that a vmap comes to.

    Attributes:
        operands: in the direction's order; each has the `carried` batch axes first (of extent 1 where it is not
            batched).
        groups: those of the call.
        data_shape: dgrad's argument, in the data's layout; None for the other directions.
        carried: extents of the batch axes that could not be folded; usually none.
    """

    operands: list[Value]
    groups: int
    data_shape: list[Extent] | None
    carried: list[Extent]


def vmap(
    builder: Builder,
    direction: Direction,
    levels: Sequence[Level],
    operands: Mapping[str, Value],
    layouts: Mapping[str, str],
    groups: int,
    data_shape: Sequence[Extent] | None,
    call: Callable[[UnbatchedCall], Value],
    equal: Callable[[Any, Any], bool | None] = lambda a, b: bool(a == b),
) -> Value:
    """A direction of the convolution under one or more vmaps.

    Args:
        builder: emits reshapes and transposes.
        direction: of the catalogue.
        levels: outermost first; each batches at least one operand.
        operands: by tensor name, batch axes included.
        layouts: of "data", "weight" and "grad", batch axes excluded.
        groups: of each of the convolutions.
        data_shape: dgrad only: of each of the results, in the data's layout.
        call: computes the unbatched call; its result has the carried axes first.
        equal: proves two extents equal (True), different (False) or neither (None).

    Returns:
        The results, one batch axis a level first, the outermost one foremost.

    Raises:
        ProblemError: the operands of a level have different numbers of entries, or none.
    """
    values = dict(operands)
    axes = {name: _axes(layouts[name], [level[name] for level in levels]) for name in direction.operands}
    extents = [_extent(builder, number, values, axes, equal) for number in range(len(levels))]
    shape = None if data_shape is None else list(data_shape)
    undo: list[tuple[int, BatchRule, dict[str, Extent]]] = []
    carried = []
    for number, extent in enumerate(extents):
        batched = frozenset(name for name in direction.operands if f"b{number}" in axes[name])
        rule = rule_of(direction, batched)
        if rule.into != "N" and not isinstance(extent, int):
            carried.append(number)
            continue
        sizes = {"b": extent, "g": groups}
        for name, pattern in rule.folds.items():
            found = dict(zip(axes[name], builder.shape(values[name]), strict=True))
            if "N" in found:
                sizes["n"] = found["N"]
            left, right = (_terms(side, layouts[name]) for side in _sides(pattern))
            rest = [axis for axis in axes[name] if axis != f"b{number}"]
            rest.sort(key=lambda axis: not axis.startswith("b"))
            before = [left.get(axis, axis) if axis != f"b{number}" else "b" for axis in axes[name]]
            after = [right.get(axis, axis) for axis in rest]
            values[name] = _rearranged(builder, values[name], before, after, sizes)
            axes[name] = rest
        undo.append((number, rule, sizes))
        if rule.into == "groups":
            groups *= extent
        if shape is not None:
            longer = layouts["data"].index("N" if rule.into == "N" else "C")
            shape[longer] = shape[longer] * extent
    first = [f"b{number}" for number in carried]
    lined_up = [_lined_up(builder, values[name], axes[name], first) for name in direction.operands]
    result = call(UnbatchedCall(lined_up, groups, shape, [extents[number] for number in carried]))

    layout, done = layouts[direction.result], first
    for number, rule, sizes in reversed(undo):
        left, right = (_terms(side, layout) for side in _sides(rule.result))
        before = [*done, *(left[axis] for axis in layout)]
        done = [f"b{number}", *done]
        after = ["b", *done[1:], *(right[axis] for axis in layout)]
        result = _rearranged(builder, result, before, after, sizes)
    own = list(layout)
    return _transposed(builder, result, [*done, *own], [*sorted(done, key=lambda axis: int(axis[1:])), *own])


def _axes(layout: str, dims: Sequence[int | None]) -> list[str]:
    """Names of an operand's axes: its layout's letters, and b0, b1, … for the levels that batch it."""
    axes = list(layout)
    for number, dim in reversed(list(enumerate(dims))):
        if dim is not None:
            axes.insert(dim, f"b{number}")
    return axes


def _extent(
    builder: Builder,
    number: int,
    values: Mapping[str, Value],
    axes: Mapping[str, Sequence[str]],
    equal: Callable[[Any, Any], bool | None],
) -> Extent:
    """The number of entries of a level, which its operands must agree on."""
    found = {
        name: builder.shape(values[name])[names.index(f"b{number}")]
        for name, names in axes.items()
        if f"b{number}" in names
    }
    (first, extent), *others = found.items()
    for name, other in others:
        if equal(extent, other) is not True:
            raise ProblemError(
                f"the batch of {first} has {extent} entries, that of {name} {other}; they must be equal, and known "
                "to be (one name for both, where they are symbolic)"
            )
    if isinstance(extent, int) and extent < 1:
        raise ProblemError(f"the batch of {first} has {extent} entries; a vmap needs at least 1")
    return extent


def _sides(pattern: str) -> tuple[str, str]:
    left, _, right = pattern.partition("->")
    return left, right


def _terms(side: str, layout: str) -> dict[str, str]:
    """The term of each letter of a layout in a side of a canonical pattern; spatial axes keep their own names."""
    terms = [term for term in _TERM.findall(side) if term not in ("b", "...")]
    canonical = "OI" if "O" in layout else "NC"
    return {letter: letter.lower() for letter in layout} | dict(zip(canonical, terms, strict=True))


def _rearranged(
    builder: Builder, value: Value, before: Sequence[str], after: Sequence[str], sizes: Mapping[str, Extent]
) -> Value:
    return rearrange(builder, value, f"{' '.join(before)} -> {' '.join(after)}", **sizes)


def _transposed(builder: Builder, value: Value, have: Sequence[str], want: Sequence[str]) -> Value:
    return builder.transpose(value, [have.index(axis) for axis in want])


def _lined_up(builder: Builder, value: Value, axes: Sequence[str], first: Sequence[str]) -> Value:
    """The operand with all of the axes `first` in front, those that it lacks with extent 1."""
    if not first:
        return value
    present = [axis for axis in first if axis in axes]
    own = [axis for axis in axes if axis not in first]
    value = _transposed(builder, value, axes, [*present, *own])
    if present == list(first):
        return value
    shape = dict(zip([*present, *own], builder.shape(value), strict=True))
    return builder.reshape(value, [*(shape.get(axis, 1) for axis in first), *(shape[axis] for axis in own)])
