# SPDX-License-Identifier: Apache-2.0
"""Axis rearrangement said as a string, `"n (g o) ... -> (g n) o ..."`, over a Builder's reshape and transpose.

The notation is einops': names are axes, parentheses merge axes (or split one), `...` stands for the spatial axes, and a
literal 1 is an axis of one element.
"""

from __future__ import annotations

import re
from functools import reduce
from operator import mul
from typing import Any

from legalize.builder import Builder, Extent, Value
from tvm_convgrad.core.errors import ProblemError

_WORD = re.compile(r"\(([^()]*)\)|(\.\.\.|\w+)")


def parse_side(side: str) -> list[list[str]]:
    """One side of a pattern as a list of axes, each a list of elementary names (`1` is the empty list)."""
    axes: list[list[str]] = []
    for group, word in _WORD.findall(side):
        axes.append([] if word == "1" else [word] if word else group.split())
    return axes


def rearrange(builder: Builder, value: Value, pattern: str, **sizes: Extent) -> Value:
    """Rearrange the axes of `value`.

    Args:
        builder: emits the reshapes and the transpose, each only if it changes something.
        value: the tensor.
        pattern: `"left -> right"`; every name on the left stands on the right and conversely.
        sizes: extents of names that the shape alone does not tell; one name a group may be left out.

    Raises:
        ProblemError: the pattern does not fit the tensor.
    """
    left, _, right = pattern.partition("->")
    source, target = parse_side(left), parse_side(right)
    shape = builder.shape(value)
    spatial = len(shape) - (len(source) - 1)
    dots = [f"...{i}" for i in range(spatial)]
    source, target = _spread(source, dots), _spread(target, dots)
    known: dict[str, Extent] = dict(sizes)
    if len(source) != len(shape):
        raise ProblemError(f"pattern {pattern!r} has {len(source)} axes, the tensor has {len(shape)}: {shape}")
    for axis, extent in zip(source, shape, strict=True):
        missing = [name for name in axis if name not in known]
        if len(missing) > 1:
            raise ProblemError(f"pattern {pattern!r} leaves the sizes of {', '.join(missing)} open; give all but one")
        if missing:
            rest = _product(known[name] for name in axis if name != missing[0])
            known[missing[0]] = extent if _is_one(rest) else extent // rest
    names = [name for axis in source for name in axis]
    order = [name for axis in target for name in axis]
    if sorted(names) != sorted(order):
        raise ProblemError(f"pattern {pattern!r} must have the same names on both sides")
    # An axis of one element that is inside a group on both sides changes nothing: without it most ungrouped cases need
    # no reshape.
    alone = {axis[0] for side in (source, target) for axis in side if len(axis) == 1}
    idle = {name for name in names if _is_one(known[name]) and name not in alone}
    source, target = ([[name for name in axis if name not in idle] for axis in side] for side in (source, target))
    names = [name for axis in source for name in axis]
    order = [name for axis in target for name in axis]
    if names != order and [n for n in names if not _is_one(known[n])] == [n for n in order if not _is_one(known[n])]:
        # Only axes of one element change places: no element moves.
        return builder.reshape(value, [_product(known[name] for name in axis) for axis in target])
    if any(len(axis) != 1 for axis in source):
        value = builder.reshape(value, [known[name] for name in names])
    value = builder.transpose(value, [names.index(name) for name in order])
    if any(len(axis) != 1 for axis in target):
        value = builder.reshape(value, [_product(known[name] for name in axis) for axis in target])
    return value


def permute(builder: Builder, value: Value, source: str, target: str) -> Value:
    """Transpose from one layout string to another, such as "NHWC" to "NCHW"."""
    return builder.transpose(value, [source.index(letter) for letter in target])


def _spread(axes: list[list[str]], dots: list[str]) -> list[list[str]]:
    spread: list[list[str]] = []
    for axis in axes:
        if axis == ["..."]:
            spread.extend([name] for name in dots)
        else:
            spread.append(axis)
    return spread


def _product(extents: Any) -> Extent:
    return reduce(mul, extents, 1)


def _is_one(extent: Extent) -> bool:
    return isinstance(extent, int) and extent == 1
