# SPDX-License-Identifier: Apache-2.0
"""Problem descriptors: a convolution as a short string, benchdnn's with a few letters more, and back.

benchdnn's letters: g groups, mb batch, ic/oc channels, then for each axis d, h, w: i data, o output, k kernel,
s stride, d dilation (0 = dense), p low padding. If all axes are alike only the first is written; defaults (g1,
stride 1, dilation 0, padding 0) are left out. Where benchdnn has no letter:

    r       high padding, where it differs from the low one
    {name}  in place of a number: a symbolic extent (`mb{n}`)
    _lay=   data:kernel:grad layouts, if not canonical (`_lay=NHWC:HWIO:NHWC`)
    _dt=    data:kernel:grad element types, if not all f32 (`_dt=bf16:f32:bf16`)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tvm_convgrad.errors import DescriptorError
from tvm_convgrad.geometry import (
    FLOAT_DTYPES,
    SPATIAL,
    Extent,
    data_layout_of,
    effective_kernel,
    kernel_layout_of,
    output_extent,
)

if TYPE_CHECKING:
    from tvm_convgrad.problem import ConvProblem

_LONG_DTYPE = {short: long for long, short in FLOAT_DTYPES.items()}
_TOKEN = re.compile(r"([a-z]+)(?:(\d+)|\{([^{}]+)\})")
_SEPARATOR = re.compile(r"_(?![^{}]*\})")  # a symbolic extent's name may have underscores
_OPTION = re.compile(r"\w+=")
_NAME_SUFFIX = re.compile(r'n"[^"]*"$')


def _number(value: Extent) -> str:
    return str(value) if isinstance(value, int) else "{" + value + "}"


def _parse_tokens(text: str) -> tuple[dict[str, Extent], list[str]]:
    # benchdnn allows underscores between tokens; ours are followed by name=value.
    parts = _SEPARATOR.split(_NAME_SUFFIX.sub("", text.strip()))
    options = [part for part in parts if _OPTION.match(part)]
    body = "".join(part for part in parts if part not in options)
    values: dict[str, Extent] = {}
    end = 0
    for match in _TOKEN.finditer(body):
        if match.start() != end:
            break
        end = match.end()
        name, number, symbol = match.groups()
        if name in values:
            raise DescriptorError(f"descriptor {text!r} gives {name!r} twice")
        values[name] = int(number) if symbol is None else symbol
    if end != len(body) or not values:
        raise DescriptorError(
            f"descriptor {text!r} is not understood from {body[end:]!r} on; the form is letters and numbers, "
            f"such as g2mb8ic96ih27oc256oh27kh5ph2"
        )
    return values, options


def _parse_options(options: Sequence[str], text: str) -> dict[str, str]:
    result: dict[str, str] = {}
    for option in options:
        key, _, value = option.partition("=")
        parts = value.split(":")
        if key == "lay" and len(parts) == 3:
            result.update(zip(("data_layout", "kernel_layout", "grad_layout"), parts, strict=True))
        elif key == "dt" and len(parts) == 3 and all(p in _LONG_DTYPE for p in parts):
            names = ("data_dtype", "kernel_dtype", "grad_dtype")
            result.update(zip(names, (_LONG_DTYPE[p] for p in parts), strict=True))
        else:
            raise DescriptorError(
                f"descriptor {text!r}: option {option!r} is not understood; "
                f"there are _lay=data:kernel:grad and _dt=data:kernel:grad with {', '.join(_LONG_DTYPE)}"
            )
    return result


def _high_padding(data: Extent, output: Extent, kernel: int, stride: int, dilation: int, low: int, *, text: str) -> int:
    """The symmetric padding if it gives the stated output, else the least high padding that does."""
    if not isinstance(data, int) or not isinstance(output, int):
        return low
    if output_extent(data, kernel, stride, dilation, low, low) == output:
        return low
    high = (output - 1) * stride + effective_kernel(kernel, dilation) - data - low
    if high < 0:
        if output_extent(data, kernel, stride, dilation, low, 0) == output:
            return 0
        raise DescriptorError(
            f"descriptor {text!r}: output {output} leaves {-high} trailing elements of the data unused, more than the "
            f"stride {stride}; that would be a negative padding, which is refused: crop the data instead"
        )
    return high


def _axis_families(problem: ConvProblem) -> tuple[tuple[Any, ...], ...]:
    """Data, kernel, stride, dilation (0 = dense), low and high padding, each an entry an axis."""
    lows, highs = zip(*problem.padding, strict=True)
    return (problem.data_extents, problem.kernel, problem.strides, tuple(d - 1 for d in problem.dilation), lows, highs)


def write(problem: ConvProblem) -> str:
    """The problem's descriptor."""
    axes = list(zip(*_axis_families(problem), strict=True))
    shown = 1 if all(axis == axes[0] for axis in axes) else problem.rank
    letters = SPATIAL[problem.rank].lower()[:shown]

    def family(name: str, values: Sequence[Extent], default: int | None = None) -> str:
        if all(v == default for v in values[:shown]):
            return ""
        return "".join(f"{name}{a}{_number(v)}" for a, v in zip(letters, values, strict=False))

    data, kernel, strides, dilation, lows, highs = _axis_families(problem)
    text = "" if problem.groups == 1 else f"g{problem.groups}"
    text += f"mb{_number(problem.batch)}ic{problem.in_channels}" + family("i", data)
    text += f"oc{problem.out_channels}"
    if all(isinstance(y, int) for y in problem.grad_extents):
        text += family("o", problem.grad_extents)
    text += family("k", kernel) + family("s", strides, 1) + family("d", dilation, 0) + family("p", lows, 0)
    if lows != highs:
        text += family("r", highs)
    layouts = (problem.data_layout, problem.kernel_layout, problem.grad_layout)
    if layouts != (data_layout_of(problem.rank), kernel_layout_of(problem.rank), data_layout_of(problem.rank)):
        text += "_lay=" + ":".join(layouts)
    dtypes = (problem.data_dtype, problem.kernel_dtype, problem.grad_dtype)
    if set(dtypes) != {"float32"}:
        text += "_dt=" + ":".join(FLOAT_DTYPES[d] for d in dtypes)
    return text


def read(text: str) -> tuple[dict[str, Any], tuple[Extent | None, ...]]:
    """Parse a descriptor, ours or a plain benchdnn one (whose high padding follows from the output extents).

    Returns:
        The fields of ConvProblem, and the output extents that the text states (None where it does not).

    Raises:
        DescriptorError: it does not parse.
    """
    values, options = _parse_tokens(text)
    rank = next((r for r in (3, 2, 1) if f"i{SPATIAL[r][0].lower()}" in values), 0)
    if not rank:
        raise DescriptorError(f"descriptor {text!r} has no data extent: give iw, ih or id")
    axes = SPATIAL[rank].lower()

    def take(name: str) -> Any:
        if name not in values:
            raise DescriptorError(f"descriptor {text!r} lacks {name!r}")
        return values.pop(name)

    def whole(name: str, value: Extent) -> int:
        if isinstance(value, str):
            raise DescriptorError(f"descriptor {text!r}: {name} must be a number, not {{{value}}}")
        return value

    # An axis without a data extent is a copy of the first one, as in benchdnn.
    source = [a if "i" + a in values else axes[0] for a in axes]

    def family(name: str, default: Extent | None = None) -> tuple[Any, ...]:
        found = tuple(values.get(name + a, default) for a in source)
        for a in axes:
            values.pop(name + a, None)
        return found

    def numbers(name: str, default: int | None = None) -> tuple[int, ...]:
        found = family(name, default)
        for axis, value in zip(source, found, strict=True):
            if value is None:
                raise DescriptorError(f"descriptor {text!r} lacks {name + axis!r}")
        return tuple(whole(name, v) for v in found)

    extents, outputs = family("i"), family("o")
    kernel, strides = numbers("k"), numbers("s", 1)
    dilation = tuple(d + 1 for d in numbers("d", 0))
    lows = numbers("p", 0)
    if any("r" + a in values for a in axes):
        highs = numbers("r", 0)
    else:
        geometry = zip(extents, outputs, kernel, strides, dilation, lows, strict=True)
        highs = tuple(_high_padding(*g, text=text) for g in geometry)
    fields = {
        "batch": values.pop("mb", 2),  # benchdnn's default
        "in_channels": whole("ic", take("ic")),
        "out_channels": whole("oc", take("oc")),
        "data_extents": extents,
        "kernel": kernel,
        "strides": strides,
        "padding": tuple(zip(lows, highs, strict=True)),
        "dilation": dilation,
        "groups": whole("g", values.pop("g", 1)),
        **_parse_options(options, text),
    }
    if values:
        raise DescriptorError(f"descriptor {text!r}: {', '.join(sorted(values))} not understood for rank {rank}")
    return fields, outputs
