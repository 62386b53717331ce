# SPDX-License-Identifier: Apache-2.0
"""ConvProblem: one convolution, whichever of its three faces is computed, as a frozen value and as a short string.

    Y = conv(X, W)        the forward face
    dW = wgrad(dY, X)     its gradient with respect to the weight
    dX = dgrad(dY, W)     its gradient with respect to the data

The string form extends benchdnn's problem descriptor: `g2mb8ic96ih27oc256oh27kh5ph2`. See `ConvProblem.descriptor`.
This module knows no IR: extents are ints, or strings that name a symbolic extent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Union

from tvm_convgrad.errors import DescriptorError, DTypeError, ProblemError

Extent = Union[int, str]
"""A number of elements, or the name (or expression) of one that is known only at run time."""

SPATIAL = {1: "W", 2: "HW", 3: "DHW"}
"""Spatial letters of each rank, outermost first."""

FLOAT_DTYPES = {"float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64"}
"""Accepted element types and their short names in descriptors."""

_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_LONG_DTYPE = {short: long for long, short in FLOAT_DTYPES.items()}
_INT64_MAX = 2**63 - 1


def data_layout_of(rank: int) -> str:
    """The canonical layout of data and grad: `NCW`, `NCHW` or `NCDHW`."""
    return "NC" + SPATIAL[rank]


def kernel_layout_of(rank: int) -> str:
    """The canonical layout of the weight: `OIW`, `OIHW` or `OIDHW`."""
    return "OI" + SPATIAL[rank]


def check_layout(layout: str, rank: int, kind: str, name: str) -> str:
    """Return `layout` if it is a permutation of the letters that a `kind` tensor of this rank has.

    Args:
        layout: such as "NHWC".
        rank: number of spatial axes, 1 to 3.
        kind: "data" (letters N, C and the spatial ones) or "kernel" (O, I and the spatial ones).
        name: the parameter's name, for the message.

    Raises:
        ProblemError: a letter is missing, repeated or unknown.
    """
    canonical = data_layout_of(rank) if kind == "data" else kernel_layout_of(rank)
    if sorted(layout) != sorted(canonical):
        raise ProblemError(
            f"{name}={layout!r} is not a permutation of the letters {canonical!r}; "
            f"give one such as {canonical!r} or "
            f"{(canonical[0] + canonical[2:] + canonical[1]) if kind == 'data' else canonical[2:] + 'IO'!r}"
        )
    return layout


def check_dtype(dtype: str, name: str) -> str:
    """Return `dtype` if it is a floating type of this package, else raise DTypeError."""
    if dtype not in FLOAT_DTYPES:
        raise DTypeError(f"{name} has dtype {dtype!r}; accepted are {', '.join(FLOAT_DTYPES)}: cast it first")
    return dtype


def normalize_axes(value: int | Sequence[int], rank: int, name: str, *, least: int = 1) -> tuple[int, ...]:
    """Spread an int over the spatial axes, or check that a sequence has one int for each.

    Raises:
        ProblemError: wrong length, or an entry below `least`.
    """
    if isinstance(value, int):
        result: tuple[int, ...] = (value,) * rank
    else:
        result = tuple(int(v) for v in value)
        if len(result) == 1:
            result *= rank
    if len(result) != rank:
        raise ProblemError(
            f"{name}={tuple(result)} has {len(result)} entries; a {rank}-d convolution takes one int or {rank}"
        )
    for axis, v in zip(SPATIAL[rank], result, strict=True):
        if v < least:
            raise ProblemError(f"{name}={result}: the entry of axis {axis} is {v}; it must be at least {least}")
    return result


def effective_kernel(kernel: int, dilation: int) -> int:
    """Extent that a dilated kernel covers: `dilation * (kernel - 1) + 1`."""
    return dilation * (kernel - 1) + 1


def output_extent(data: Any, kernel: int, stride: int, dilation: int, low: int, high: int) -> Any:
    """Extent of Y on one axis: `(X + low + high - effective kernel) // stride + 1`.

    Works for ints and for IR expressions alike; the formula is the one of every framework with floor rounding.
    """
    return (data + (low + high - effective_kernel(kernel, dilation))) // stride + 1


def same_padding(data: Extent, kernel: int, stride: int, dilation: int, axis: str) -> tuple[int, int]:
    """TensorFlow's SAME: Y = ceil(X / stride), the odd element of padding goes to the high side.

    Source of the formula: tf.nn.convolution, "Notes on padding".

    Raises:
        ProblemError: the padding depends on a symbolic extent (stride > 1).
    """
    if isinstance(data, int):
        out = -(-data // stride)
        total = max((out - 1) * stride + effective_kernel(kernel, dilation) - data, 0)
    elif stride == 1:
        total = effective_kernel(kernel, dilation) - 1
    else:
        raise ProblemError(
            f'padding="SAME" with stride {stride} depends on the extent of axis {axis}, which is symbolic ({data}); '
            f"give the padding as numbers"
        )
    return total // 2, total - total // 2


def normalize_padding(
    padding: str | int | Sequence[int] | Sequence[Sequence[int]],
    *,
    data_extents: Sequence[Extent],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> tuple[tuple[int, int], ...]:
    """Every accepted form of padding as ((low, high), …), one pair a spatial axis.

    Args:
        padding: an int; one int an axis; `2*rank` ints, all lows then all highs (top, left, bottom, right);
            pairs (low, high), one an axis; "SAME" (TensorFlow's formula) or "VALID" (none).
        data_extents: the spatial extents of X; used by "SAME" only.
        kernel, strides, dilation: one int an axis.

    Raises:
        ProblemError: unknown name, wrong length, or a negative entry (crop the data instead).
    """
    rank = len(kernel)
    if isinstance(padding, str):
        upper = padding.upper()
        if upper == "VALID":
            return ((0, 0),) * rank
        if upper == "SAME":
            return tuple(
                same_padding(x, k, s, d, axis)
                for x, k, s, d, axis in zip(data_extents, kernel, strides, dilation, SPATIAL[rank], strict=True)
            )
        raise ProblemError(f'padding={padding!r} is unknown; names are "SAME" and "VALID"')
    if isinstance(padding, int):
        pairs = [(padding, padding)] * rank
    else:
        entries: list[Any] = list(padding)
        if entries and all(hasattr(e, "__len__") for e in entries):
            pairs = [(int(low), int(high)) for low, high in entries]
        else:
            flat = [int(p) for p in entries]
            if len(flat) == 1:
                flat *= rank
            if len(flat) == rank:
                pairs = [(p, p) for p in flat]
            elif len(flat) == 2 * rank:
                pairs = list(zip(flat[:rank], flat[rank:], strict=True))
            else:
                raise ProblemError(
                    f"padding={tuple(flat)} has {len(flat)} entries; a {rank}-d convolution takes one int, {rank} "
                    f'or {2 * rank} (all lows, then all highs), "SAME" or "VALID"'
                )
    if len(pairs) != rank:
        raise ProblemError(f"padding={tuple(pairs)} has {len(pairs)} pairs; a {rank}-d convolution takes {rank}")
    for axis, (low, high) in zip(SPATIAL[rank], pairs, strict=True):
        if low < 0 or high < 0:
            raise ProblemError(
                f"padding ({low}, {high}) of axis {axis} is negative; slice the data before the convolution instead"
            )
    return tuple(pairs)


def flat_padding(pairs: Iterable[tuple[int, int]]) -> tuple[int, ...]:
    """((low, high), …) in TVM's order: all lows, then all highs."""
    pairs = tuple(pairs)
    return tuple(low for low, _ in pairs) + tuple(high for _, high in pairs)


def _symbolic_output(data: str, kernel: int, stride: int, dilation: int, low: int, high: int) -> str:
    slack = low + high - effective_kernel(kernel, dilation)
    inner = data if slack == 0 else f"{data}{slack:+d}"
    if stride == 1:
        return data if slack == -1 else f"{data}{slack + 1:+d}"
    return f"({inner})//{stride}+1"


@dataclass(frozen=True)
class ConvProblem:
    """One convolution. Validated when made; equal problems hash alike; `descriptor` names it.

    Attributes:
        batch: N, or the name of a symbolic extent.
        in_channels, out_channels: C of X and C of Y, whole (not per group).
        data_extents: spatial extents of X, outermost first, each an int or a name.
        kernel, strides, dilation: one int an axis (dilation 1 = dense).
        padding: (low, high) an axis.
        groups: divides both channel counts.
        data_layout, kernel_layout, grad_layout: permutations of NC… and OI…; grad_layout is that of Y and dY.
        data_dtype, kernel_dtype, grad_dtype: of X / dX, W / dW and Y / dY; products are summed in `accumulator`.

    Raises:
        ProblemError, DTypeError: no such convolution exists; the sentence says which rule it breaks.
    """

    batch: Extent
    in_channels: int
    out_channels: int
    data_extents: tuple[Extent, ...]
    kernel: tuple[int, ...]
    strides: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    data_layout: str = ""
    kernel_layout: str = ""
    grad_layout: str = ""
    data_dtype: str = "float32"
    kernel_dtype: str = "float32"
    grad_dtype: str = "float32"

    def __post_init__(self) -> None:
        rank = len(self.kernel)
        if rank not in SPATIAL or len(self.data_extents) != rank:
            raise ProblemError(
                f"kernel={self.kernel} and data extents {self.data_extents} must both have 1, 2 or 3 entries"
            )
        fill = object.__setattr__
        fill(self, "data_extents", tuple(self.data_extents))
        fill(self, "kernel", normalize_axes(self.kernel, rank, "kernel_size"))
        fill(self, "strides", normalize_axes(self.strides or 1, rank, "strides"))
        fill(self, "dilation", normalize_axes(self.dilation or 1, rank, "dilation"))
        geometry = {"kernel": self.kernel, "strides": self.strides, "dilation": self.dilation}
        padding = normalize_padding(self.padding or 0, data_extents=self.data_extents, **geometry)
        fill(self, "padding", padding)
        for name, kind in (("data_layout", "data"), ("kernel_layout", "kernel"), ("grad_layout", "data")):
            canonical = data_layout_of(rank) if kind == "data" else kernel_layout_of(rank)
            fill(self, name, check_layout(getattr(self, name) or canonical, rank, kind, name))
        for name in ("data_dtype", "kernel_dtype", "grad_dtype"):
            check_dtype(getattr(self, name), name)
        check_channels(self.in_channels, self.out_channels, self.groups)
        for name, extent in (("batch", self.batch), *zip(SPATIAL[rank], self.data_extents, strict=True)):
            if isinstance(extent, int) and extent < 1:
                raise ProblemError(f"the extent of {name} is {extent}; every extent of X must be at least 1")
        for axis, y in zip(SPATIAL[rank], self.grad_extents, strict=True):
            if isinstance(y, int) and y < 1:
                i = SPATIAL[rank].index(axis)
                raise ProblemError(
                    f"axis {axis}: kernel {self.kernel[i]} with dilation {self.dilation[i]} covers "
                    f"{effective_kernel(self.kernel[i], self.dilation[i])} elements, more than the padded data has "
                    f"({self.data_extents[i]} + {sum(self.padding[i])}); enlarge the padding or the data"
                )
        for name, shape in (
            ("data", self.data_shape),
            ("weight", self.weight_shape),
            ("grad", self.grad_shape),
        ):
            check_size(shape, name)

    # -- derived ------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Number of spatial axes: 1, 2 or 3."""
        return len(self.kernel)

    @property
    def grad_extents(self) -> tuple[Extent, ...]:
        """Spatial extents of Y (and dY), by floor division; an expression in text where X's extent is symbolic."""
        return tuple(
            output_extent(x, k, s, d, low, high) if isinstance(x, int) else _symbolic_output(x, k, s, d, low, high)
            for x, k, s, d, (low, high) in zip(
                self.data_extents, self.kernel, self.strides, self.dilation, self.padding, strict=True
            )
        )

    @property
    def data_shape(self) -> tuple[Extent, ...]:
        """Shape of X in `data_layout`."""
        return self._arrange(self.data_layout, N=self.batch, C=self.in_channels, spatial=self.data_extents)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Shape of W in `kernel_layout`; the I axis has in_channels / groups."""
        shape = self._arrange(
            self.kernel_layout, O=self.out_channels, I=self.in_channels // self.groups, spatial=self.kernel
        )
        return tuple(int(s) for s in shape)

    @property
    def grad_shape(self) -> tuple[Extent, ...]:
        """Shape of Y and dY in `grad_layout`."""
        return self._arrange(self.grad_layout, N=self.batch, C=self.out_channels, spatial=self.grad_extents)

    @property
    def is_static(self) -> bool:
        """Whether every extent is a number."""
        return all(isinstance(e, int) for e in (self.batch, *self.data_extents))

    @property
    def is_depthwise(self) -> bool:
        """Whether each group has one input channel (a channel multiplier is allowed)."""
        return self.groups > 1 and self.groups == self.in_channels

    @property
    def accumulator(self) -> str:
        """The type in which products are summed: float64 if a tensor is float64, else float32."""
        return "float64" if "float64" in (self.data_dtype, self.kernel_dtype, self.grad_dtype) else "float32"

    @property
    def macs(self) -> int:
        """Multiply-accumulates of each face, padding counted as data; needs static extents.

        `N * O * C/groups * prod(kernel) * prod(Y)`; FLOP are twice that.
        """
        self.require_static("macs")
        out = math.prod(int(y) for y in self.grad_extents)
        per_output = self.in_channels // self.groups * math.prod(self.kernel)
        return int(self.batch) * self.out_channels * out * per_output

    @property
    def bytes(self) -> int:
        """Bytes of X, W and Y together: what each face has to move at the least; needs static extents."""
        self.require_static("bytes")
        return sum(
            math.prod(int(e) for e in shape) * _WIDTH[dtype]
            for shape, dtype in (
                (self.data_shape, self.data_dtype),
                (self.weight_shape, self.kernel_dtype),
                (self.grad_shape, self.grad_dtype),
            )
        )

    def require_static(self, what: str) -> None:
        """Raise ProblemError if an extent is symbolic, naming `what` needs numbers."""
        if not self.is_static:
            raise ProblemError(f"{what} of {self.descriptor} needs static extents; bind the symbolic ones first")

    def with_layouts(self, data: str | None = None, kernel: str | None = None, grad: str | None = None) -> ConvProblem:
        """The same convolution with other layouts; None is the canonical one (NC…, OI…, NC…)."""
        return replace(self, data_layout=data or "", kernel_layout=kernel or "", grad_layout=grad or "")

    def with_dtypes(self, data: str, kernel: str, grad: str) -> ConvProblem:
        """The same convolution with other element types."""
        return replace(self, data_dtype=data, kernel_dtype=kernel, grad_dtype=grad)

    @staticmethod
    def _arrange(layout: str, spatial: Sequence[Extent], **extents: Extent) -> tuple[Extent, ...]:
        by_letter = {**extents, **dict(zip(SPATIAL[len(spatial)], spatial, strict=True))}
        return tuple(by_letter[letter] for letter in layout)

    # -- making -------------------------------------------------------------------------------------------------

    @classmethod
    def from_shapes(
        cls,
        data_shape: Sequence[Extent],
        weight_shape: Sequence[int],
        *,
        strides: int | Sequence[int] = 1,
        padding: str | int | Sequence[int] | Sequence[Sequence[int]] = 0,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        data_layout: str | None = None,
        kernel_layout: str | None = None,
        grad_layout: str | None = None,
        dtypes: tuple[str, str, str] = ("float32", "float32", "float32"),
    ) -> ConvProblem:
        """The problem of a forward convolution of X by W, whose shapes are given in their layouts.

        Args:
            data_shape: of X, extents may be names.
            weight_shape: of W, with in_channels / groups on the I axis.
            strides, padding, dilation, groups: every form that `normalize_axes` and `normalize_padding` take.
            data_layout, kernel_layout, grad_layout: None is NC…, OI… and data_layout.
            dtypes: of X, W and Y.

        Raises:
            ProblemError: as the class; also if W's I axis does not match the channels of X.
        """
        rank = len(data_shape) - 2
        if rank not in SPATIAL or len(weight_shape) != rank + 2:
            raise ProblemError(
                f"data shape {tuple(data_shape)} and weight shape {tuple(weight_shape)} must both have 3, 4 or 5 axes"
            )
        data_layout = check_layout(data_layout or data_layout_of(rank), rank, "data", "data_layout")
        kernel_layout = check_layout(kernel_layout or kernel_layout_of(rank), rank, "kernel", "kernel_layout")
        grad_layout = grad_layout or data_layout
        x = dict(zip(data_layout, data_shape, strict=True))
        w = dict(zip(kernel_layout, (int(e) for e in weight_shape), strict=True))
        channels = x["C"]
        if not isinstance(channels, int):
            raise ProblemError(f"the channels of data are symbolic ({channels}); only batch and spatial extents may be")
        kernel = tuple(w[a] for a in SPATIAL[rank])
        extents = tuple(x[a] for a in SPATIAL[rank])
        strides = normalize_axes(strides, rank, "strides")
        dilation = normalize_axes(dilation, rank, "dilation")
        check_channels(channels, w["O"], groups)
        if w["I"] * groups != channels:
            raise ProblemError(
                f"the weight's I axis is {w['I']}, but {channels} channels in {groups} groups need "
                f"{channels // groups}; check groups and kernel_layout={kernel_layout!r}"
            )
        return cls(
            batch=x["N"],
            in_channels=channels,
            out_channels=w["O"],
            data_extents=extents,
            kernel=kernel,
            strides=strides,
            padding=normalize_padding(padding, data_extents=extents, kernel=kernel, strides=strides, dilation=dilation),
            dilation=dilation,
            groups=groups,
            data_layout=data_layout,
            kernel_layout=kernel_layout,
            grad_layout=grad_layout,
            data_dtype=dtypes[0],
            kernel_dtype=dtypes[1],
            grad_dtype=dtypes[2],
        )

    # -- descriptor ---------------------------------------------------------------------------------------------

    @property
    def descriptor(self) -> str:
        """The problem as a short string, read back by `from_descriptor`.

        benchdnn's letters: g groups, mb batch, ic/oc channels, then for each axis d, h, w: i data, o output,
        k kernel, s stride, d dilation (0 = dense), p low padding. If all axes are alike only the first is written;
        defaults (g1, stride 1, dilation 0, padding 0) are left out. Where benchdnn has no letter:

            r       high padding, where it differs from the low one
            {name}  in place of a number: a symbolic extent (`mb{n}`)
            _lay=   data:kernel:grad layouts, if not canonical (`_lay=NHWC:HWIO:NHWC`)
            _dt=    data:kernel:grad element types, if not all f32 (`_dt=bf16:f32:bf16`)
        """
        axes = list(zip(*self._axis_families(), strict=True))
        shown = 1 if all(axis == axes[0] for axis in axes) else self.rank
        letters = SPATIAL[self.rank].lower()[:shown]

        def family(name: str, values: Sequence[Extent], default: int | None = None) -> str:
            if all(v == default for v in values[:shown]):
                return ""
            return "".join(f"{name}{a}{_number(v)}" for a, v in zip(letters, values, strict=False))

        data, kernel, strides, dilation, lows, highs = self._axis_families()
        text = "" if self.groups == 1 else f"g{self.groups}"
        text += f"mb{_number(self.batch)}ic{self.in_channels}" + family("i", data)
        text += f"oc{self.out_channels}"
        if all(isinstance(y, int) for y in self.grad_extents):
            text += family("o", self.grad_extents)
        text += family("k", kernel) + family("s", strides, 1) + family("d", dilation, 0) + family("p", lows, 0)
        if lows != highs:
            text += family("r", highs)
        layouts = (self.data_layout, self.kernel_layout, self.grad_layout)
        if layouts != (data_layout_of(self.rank), kernel_layout_of(self.rank), data_layout_of(self.rank)):
            text += "_lay=" + ":".join(layouts)
        dtypes = (self.data_dtype, self.kernel_dtype, self.grad_dtype)
        if set(dtypes) != {"float32"}:
            text += "_dt=" + ":".join(FLOAT_DTYPES[d] for d in dtypes)
        return text

    def _axis_families(self) -> tuple[tuple[Any, ...], ...]:
        """Data, kernel, stride, dilation (0 = dense), low and high padding, each an entry an axis."""
        lows, highs = zip(*self.padding, strict=True)
        return (self.data_extents, self.kernel, self.strides, tuple(d - 1 for d in self.dilation), lows, highs)

    def __str__(self) -> str:
        return self.descriptor

    @classmethod
    def from_descriptor(cls, text: str) -> ConvProblem:
        """Read a descriptor: ours, or a plain benchdnn one (whose high padding follows from the output extents).

        Raises:
            DescriptorError: it does not parse, or what it says contradicts itself.
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
        try:
            problem = cls(
                batch=values.pop("mb", 2),  # benchdnn's default
                in_channels=whole("ic", take("ic")),
                out_channels=whole("oc", take("oc")),
                data_extents=extents,
                kernel=kernel,
                strides=strides,
                padding=tuple(zip(lows, highs, strict=True)),
                dilation=dilation,
                groups=whole("g", values.pop("g", 1)),
                **_parse_options(options, text),
            )
        except (ProblemError, DTypeError) as error:
            raise DescriptorError(f"descriptor {text!r}: {error}") from error
        if values:
            raise DescriptorError(f"descriptor {text!r}: {', '.join(sorted(values))} not understood for rank {rank}")
        if any(stated not in (None, found) for stated, found in zip(outputs, problem.grad_extents, strict=True)):
            raise DescriptorError(
                f"descriptor {text!r} says output {outputs}, but its convolution gives {problem.grad_extents}"
            )
        return problem


def check_channels(in_channels: int, out_channels: int, groups: int) -> None:
    """Raise ProblemError unless `groups` is at least 1 and divides both channel counts."""
    if groups < 1:
        raise ProblemError(f"groups={groups}; it must be at least 1")
    for name, channels in (("input", in_channels), ("output", out_channels)):
        if channels < 1:
            raise ProblemError(f"{channels} {name} channels; there must be at least 1")
        if channels % groups:
            raise ProblemError(f"{channels} {name} channels are not divisible by groups={groups}")


def check_size(shape: Sequence[Extent], name: str) -> None:
    """Raise ProblemError if the static extents multiply to more than an int64 counts."""
    if math.prod(e for e in shape if isinstance(e, int)) > _INT64_MAX:
        raise ProblemError(
            f"{name} of shape {tuple(shape)} has more than 2**63 - 1 elements; no TVM tensor can hold it"
        )


FIELD_NAMES = tuple(f.name for f in fields(ConvProblem))
"""Names of ConvProblem's fields, in order."""

_TOKEN = re.compile(r"([a-z]+)(?:(\d+)|\{([^{}]+)\})")
_NAME_SUFFIX = re.compile(r'n"[^"]*"$')


def _number(value: Extent) -> str:
    return str(value) if isinstance(value, int) else "{" + value + "}"


def _parse_tokens(text: str) -> tuple[dict[str, Extent], list[str]]:
    # benchdnn allows underscores between tokens; ours are followed by name=value.
    parts = _NAME_SUFFIX.sub("", text.strip()).split("_")
    body, options = "".join(p for p in parts if "=" not in p), [p for p in parts if "=" in p]
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
