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
from typing import TypedDict

from tvm_convgrad.core.errors import DescriptorError
from tvm_convgrad.core.geometry import (
    FLOAT_DTYPES,
    SPATIAL,
    Extent,
    data_layout_of,
    kernel_layout_of,
    output_extent,
    transposed_extent,
)


class Fields(TypedDict):
    """The fields of ConvProblem, which has their meaning; `data_layout` and so on may be empty in what `read` gives."""

    batch: Extent
    in_channels: int
    out_channels: int
    data_extents: tuple[Extent, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    data_layout: str
    kernel_layout: str
    grad_layout: str
    data_dtype: str
    kernel_dtype: str
    grad_dtype: str


_LAYOUTS = ("data_layout", "kernel_layout", "grad_layout")
_DTYPES = ("data_dtype", "kernel_dtype", "grad_dtype")
_LONG_DTYPE = {short: long for long, short in FLOAT_DTYPES.items()}
_TOKEN = re.compile(r"([a-z]+)(?:([0-9]+)|\{([^{}]+)\})")
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
            result.update(zip(_LAYOUTS, parts, strict=True))
        elif key == "dt" and len(parts) == 3 and all(p in _LONG_DTYPE for p in parts):
            result.update(zip(_DTYPES, (_LONG_DTYPE[p] for p in parts), strict=True))
        else:
            raise DescriptorError(
                f"descriptor {text!r}: option {option!r} is not understood; "
                f"there are _lay=data:kernel:grad and _dt=data:kernel:grad with {', '.join(_LONG_DTYPE)}"
            )
    return result


def _high_padding(
    data: Extent, output: Extent | None, kernel: int, stride: int, dilation: int, low: int, *, text: str
) -> int:
    """The symmetric padding if it gives the stated output, else the least high padding that does."""
    if not isinstance(data, int) or not isinstance(output, int):
        return low
    if output_extent(data, kernel, stride, dilation, low, low) == output:
        return low
    high = int(transposed_extent(output, kernel, stride, dilation, low, 0)) - data
    if high < 0:
        if output_extent(data, kernel, stride, dilation, low, 0) == output:
            return 0
        raise DescriptorError(
            f"descriptor {text!r}: output {output} leaves {-high} trailing elements of the data unused, more than the "
            f"stride {stride}; that would be a negative padding, which is refused: crop the data instead"
        )
    return high


def write(fields: Fields, outputs: Sequence[Extent]) -> str:
    """The descriptor of a problem.

    Args:
        fields: those of a ConvProblem.
        outputs: the spatial extents of Y; they are written if all of them are numbers.
    """
    rank = len(fields["kernel"])
    lows, highs = zip(*fields["padding"], strict=True)
    data, kernel, strides = fields["data_extents"], fields["kernel"], fields["strides"]
    dilation = tuple(d - 1 for d in fields["dilation"])  # benchdnn's 0 is a dense kernel
    axes = list(zip(data, kernel, strides, dilation, lows, highs, strict=True))
    shown = 1 if all(axis == axes[0] for axis in axes) else rank
    letters = SPATIAL[rank].lower()[:shown]

    def family(name: str, values: Sequence[Extent], default: int | None = None) -> str:
        if all(v == default for v in values[:shown]):
            return ""
        return "".join(f"{name}{a}{_number(v)}" for a, v in zip(letters, values, strict=False))

    text = "" if fields["groups"] == 1 else f"g{fields['groups']}"
    text += f"mb{_number(fields['batch'])}ic{fields['in_channels']}" + family("i", data)
    text += f"oc{fields['out_channels']}"
    if all(isinstance(y, int) for y in outputs):
        text += family("o", outputs)
    text += family("k", kernel) + family("s", strides, 1) + family("d", dilation, 0) + family("p", lows, 0)
    if lows != highs:
        text += family("r", highs)
    layouts = (fields["data_layout"], fields["kernel_layout"], fields["grad_layout"])
    if layouts != (data_layout_of(rank), kernel_layout_of(rank), data_layout_of(rank)):
        text += "_lay=" + ":".join(layouts)
    dtypes = (fields["data_dtype"], fields["kernel_dtype"], fields["grad_dtype"])
    if set(dtypes) != {"float32"}:
        text += "_dt=" + ":".join(FLOAT_DTYPES[d] for d in dtypes)
    return text


def read(text: str) -> tuple[Fields, tuple[Extent | None, ...]]:
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

    def whole(name: str, value: Extent | None) -> int:
        if value is None:
            raise DescriptorError(f"descriptor {text!r} lacks {name!r}")
        if isinstance(value, str):
            raise DescriptorError(f"descriptor {text!r}: {name} must be a number, not {{{value}}}")
        return value

    # An axis without a data extent is a copy of the first one, as in benchdnn.
    source = [a if "i" + a in values else axes[0] for a in axes]

    def family(name: str) -> list[Extent | None]:
        found = [values.get(name + a) for a in source]
        for a in axes:
            values.pop(name + a, None)
        return found

    def numbers(name: str, default: int | None = None) -> tuple[int, ...]:
        found = zip(source, family(name), strict=True)
        return tuple(whole(name + axis, default if value is None else value) for axis, value in found)

    extents = tuple(extent for extent in family("i") if extent is not None)  # `source` has those that are given
    outputs = tuple(family("o"))
    kernel, strides = numbers("k"), numbers("s", 1)
    dilation = tuple(d + 1 for d in numbers("d", 0))
    lows = numbers("p", 0)
    if any("r" + a in values for a in axes):
        highs = numbers("r", 0)
    else:
        geometry = zip(extents, outputs, kernel, strides, dilation, lows, strict=True)
        highs = tuple(_high_padding(*g, text=text) for g in geometry)
    chosen = {**dict.fromkeys(_LAYOUTS, ""), **dict.fromkeys(_DTYPES, "float32"), **_parse_options(options, text)}
    fields: Fields = {
        "batch": values.pop("mb", 2),  # benchdnn's default
        "in_channels": whole("ic", values.pop("ic", None)),
        "out_channels": whole("oc", values.pop("oc", None)),
        "data_extents": extents,
        "kernel": kernel,
        "strides": strides,
        "padding": tuple(zip(lows, highs, strict=True)),
        "dilation": dilation,
        "groups": whole("g", values.pop("g", 1)),
        "data_layout": chosen["data_layout"],
        "kernel_layout": chosen["kernel_layout"],
        "grad_layout": chosen["grad_layout"],
        "data_dtype": chosen["data_dtype"],
        "kernel_dtype": chosen["kernel_dtype"],
        "grad_dtype": chosen["grad_dtype"],
    }
    if values:
        raise DescriptorError(f"descriptor {text!r}: {', '.join(sorted(values))} not understood for rank {rank}")
    return fields, outputs
