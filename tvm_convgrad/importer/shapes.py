# SPDX-License-Identifier: Apache-2.0
"""Shape arithmetic of Relay: the codes of reshape, the modes of strided_slice, layouts with packed axes."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.attributes import axis_of, integers


def _product(extents: Any) -> Any:
    product: Any = 1
    for extent in extents:
        product = product * extent
    return product


def reshaped(shape: tuple[Any, ...], codes: tuple[int, ...], allowzero: bool = False) -> list[Any]:
    """The extents that Relay's codes mean for a tensor of extents `shape`.

    Codes: 0 copies an extent (unless `allowzero`), -1 is whatever is left, -2 copies the rest, -3 merges two
    extents, -4 splits one into the next two codes, of which one may be -1.

    Raises:
        ModelError: the codes do not fit.
    """
    result: list[Any] = []
    free: int | None = None
    source, at = 0, 0

    def current() -> Any:
        if source >= len(shape):
            raise ModelError(f"newshape {list(codes)} takes more axes than {list(map(str, shape))} has")
        return shape[source]

    while at < len(codes):
        code = codes[at]
        at += 1
        if code > 0 or (code == 0 and allowzero):
            result.append(code)
            source += 1
        elif code == 0:
            result.append(current())
            source += 1
        elif code == -1:
            if free is not None:
                raise ModelError(f"newshape {list(codes)} has two unknown extents")
            free = len(result)
            result.append(1)
            source += 1
        elif code == -2:
            result.extend(shape[source:])
            source = len(shape)
        elif code == -3:
            first = current()
            source += 1
            result.append(first * current())
            source += 1
        else:
            if len(codes) < at + 2:
                raise ModelError(f"newshape {list(codes)} splits an axis without saying how")
            result.extend(_halves(current(), codes[at], codes[at + 1], codes))
            source += 1
            at += 2
    if free is not None:
        result[free] = _left_over(shape, result, codes)
    return result


def _halves(extent: Any, first: int, second: int, codes: tuple[int, ...]) -> list[Any]:
    if first == -1 and second > 0 and isinstance(extent, int) and extent % second == 0:
        return [extent // second, second]
    if second == -1 and first > 0 and isinstance(extent, int) and extent % first == 0:
        return [first, extent // first]
    if first > 0 and second > 0 and (not isinstance(extent, int) or first * second == extent):
        return [first, second]
    raise ModelError(f"newshape {list(codes)} splits {extent} into {first} and {second}")


def _left_over(shape: tuple[Any, ...], result: list[Any], codes: tuple[int, ...]) -> Any:
    """The extent that makes the numbers of elements agree; symbolic extents that both have cancel out."""
    have, rest = list(shape), []
    for extent in result:
        match = next((i for i, other in enumerate(have) if other is extent and not isinstance(extent, int)), None)
        if match is None:
            rest.append(extent)
        else:
            have.pop(match)
    total, known = _product(have), _product(rest)
    if isinstance(total, int) and isinstance(known, int):
        if known == 0 or total % known:
            raise ModelError(f"{list(map(str, shape))} cannot become {list(codes)}")
        return total // known
    if isinstance(known, int) and known == 1:
        return total
    return total // known


def reversed_reshape(shape: tuple[Any, ...], codes: tuple[int, ...], allowzero: bool = False) -> list[Any]:
    """As `reshaped`, with the codes applied from the last axis on."""
    if -4 in codes:
        raise ModelError("reverse_reshape with -4 is not imported")
    return reshaped(shape[::-1], codes[::-1], allowzero)[::-1]


Bounds = tuple[list[int], list[Any], list[Any], list[int]]


def slice_bounds(shape: tuple[Any, ...], attrs: SimpleNamespace) -> Bounds:
    """Axes, begins, ends and strides as Relax takes them, with the defaults of Relay's attributes filled in.

    In mode "size" the ends are extents, -1 for all that is left, and there are no strides. Known extents make the
    bounds lie inside; a reversed slice that reaches element 0 ends at -(extent + 1).
    """
    begin = integers("begin", attrs.begin)
    end = () if attrs.end is None else integers("end", attrs.end)
    given = () if attrs.axes is None else integers("axes", attrs.axes)
    axes = [axis_of("strided_slice", axis, len(shape)) for axis in given] or list(range(len(begin)))
    if len(axes) != len(begin) or len(begin) > len(shape) or len(end) > len(begin) or len(set(axes)) != len(axes):
        raise ModelError(f"begin {list(begin)} and end {list(end)} do not fit {len(axes)} of {len(shape)} axes")
    if attrs.slice_mode not in ("end", "size"):
        raise ModelError(f"the slice_mode {attrs.slice_mode!r} is unknown")
    strides = [] if attrs.strides is None else list(integers("strides", attrs.strides))
    if attrs.slice_mode == "size":
        strides = []
    if len(strides) == 1 and len(axes) > 1:
        strides *= len(axes)
    strides += [1] * (len(axes) - len(strides))
    if 0 in strides or len(strides) > len(axes):
        raise ModelError(f"the strides are {strides}")
    starts, stops = [], []
    for place, axis in enumerate(axes):
        extent, stride = shape[axis], strides[place]
        stop = end[place] if place < len(end) else None
        if attrs.slice_mode == "size":
            stop = None if stop is None or stop < 0 else begin[place] + stop
        if isinstance(extent, int):
            found = range(extent)[slice(begin[place], stop, stride)]
            if not found:
                raise ModelError(f"the slice {begin[place]}:{stop}:{stride} of {extent} elements is empty")
            starts.append(found.start)
            stops.append(found.stop if found.stop >= 0 else -(extent + 1))
        else:
            starts.append(begin[place])
            stops.append(extent if stop is None else stop)
    return axes, starts, stops, strides


_PART = re.compile(r"([A-Z])|([1-9][0-9]{0,5})([a-z])")


def layout_parts(layout: str) -> list[tuple[str, int]]:
    """A layout as letters and factors: "NCHW4c" is N, C, H, W and c with 4; factors of capital letters are 0."""
    parts, at = [], 0
    while at < len(layout):
        match = _PART.match(layout, at)
        if match is None:
            raise ModelError(f"{layout!r} is not a layout")
        parts.append((match[1], 0) if match[1] else (match[3], int(match[2])))
        at = match.end()
    names = [name for name, _ in parts]
    if len(set(names)) != len(names) or any(name.upper() not in names for name in names):
        raise ModelError(f"{layout!r} is not a layout")
    return parts
