# SPDX-License-Identifier: Apache-2.0
"""ConvProblem: one convolution, whichever of its three directions is computed, as a frozen value and as a short string.

    Y = conv(X, W)        the forward direction
    dW = wgrad(dY, X)     its gradient with respect to the weight
    dX = dgrad(dY, W)     its gradient with respect to the data

The string form extends benchdnn's problem descriptor: `g2mb8ic96ih27oc256oh27kh5ph2`. See `ConvProblem.descriptor`.
Extents are ints, or strings that name a symbolic extent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import cast

from tvm_convgrad.core import descriptor as _descriptor
from tvm_convgrad.core.errors import DescriptorError, DTypeError, ProblemError
from tvm_convgrad.core.geometry import (
    DTYPE_BYTES,
    SPATIAL,
    Extent,
    check_channels,
    check_dtype,
    check_layout,
    check_size,
    data_layout_of,
    kernel_layout_of,
    normalize_axes,
    normalize_padding,
    output_extent,
    symbolic_output,
)


@dataclass(frozen=True)
class ConvProblem:
    """A convolution problem: extents, strides, padding, dilation, groups, layouts and element types.

    One value describes all three directions (forward, wgrad and dgrad). It is immutable, hashable, and validated by its
    constructor. `strides`, `padding` and `dilation` may be a single int, which then holds for every axis. Letters of
    the shapes: N batch, C channels of X, O channels of Y, D, H, W spatial axes; the weight is (O, C / groups, ...).

    Args:
        batch: N, or the name of a symbolic extent (known at run time only).
        in_channels: C, the channels of X over all groups.
        out_channels: O, the channels of Y over all groups.
        data_extents: spatial extents of X, outermost first, each an int or the name of a symbolic extent.
        kernel: spatial extents of the weight, one int per axis.
        strides: one int per axis; empty means 1.
        padding: zeros around X, (low, high) per axis, or another form that `from_shapes` takes; empty means none.
        dilation: distance between the elements of the kernel, one int per axis; empty means 1.
        groups: number of groups; it divides both channel counts.
        data_layout: of X and dX, a permutation of NCW, NCHW or NCDHW; empty means that order.
        kernel_layout: of W and dW, a permutation of OIW, OIHW or OIDHW; empty means that order.
        grad_layout: of Y and dY, as `data_layout`.
        data_dtype: of X and dX: "float16", "bfloat16", "float32" or "float64".
        kernel_dtype: of W and dW.
        grad_dtype: of Y and dY; products are summed in the type `accumulator`.

    Raises:
        ProblemError: the arguments describe no valid convolution; the message names the rule that is violated.
        DTypeError: an element type is not one of the four.

    Example:
        >>> from tvm_convgrad import ConvProblem
        >>> problem = ConvProblem.from_shapes((8, 96, 27, 27), (256, 48, 5, 5), padding=2, groups=2)
        >>> problem.grad_shape
        (8, 256, 27, 27)
        >>> print(problem)
        g2mb8ic96ih27oc256oh27kh5ph2
        >>> ConvProblem.from_descriptor("g2mb8ic96ih27oc256oh27kh5ph2") == problem
        True
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
            if isinstance(extent, int) and extent < 0:
                raise ProblemError(f"the extent of {name} is {extent}; extents cannot be negative")
        for name, (shape, _) in self.tensors.items():
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
            output_extent(x, k, s, d, low, high) if isinstance(x, int) else symbolic_output(x, k, s, d, low, high)
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
    def tensors(self) -> dict[str, tuple[tuple[Extent, ...], str]]:
        """Shape and element type of "data", "weight" and "grad"."""
        return {
            "data": (self.data_shape, self.data_dtype),
            "weight": (self.weight_shape, self.kernel_dtype),
            "grad": (self.grad_shape, self.grad_dtype),
        }

    @property
    def is_static(self) -> bool:
        """Whether every extent is a number."""
        return all(isinstance(e, int) for e in (self.batch, *self.data_extents))

    @property
    def is_empty(self) -> bool:
        """Whether X, W or Y has no element, so that every gradient is empty or zero."""
        return any(extent == 0 for shape, _ in self.tensors.values() for extent in shape)

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
        """Multiply-accumulates of each direction, padding counted as data; needs static extents.

        `N * O * C/groups * prod(kernel) * prod(Y)`; FLOP are twice that.
        """
        self.require_static("macs")
        out = math.prod(int(y) for y in self.grad_extents)
        per_output = self.in_channels // self.groups * math.prod(self.kernel)
        return int(self.batch) * self.out_channels * out * per_output

    @property
    def bytes(self) -> int:
        """Bytes of X, W and Y together: what each direction has to move at the least; needs static extents."""
        self.require_static("bytes")
        return sum(math.prod(int(e) for e in shape) * DTYPE_BYTES[dtype] for shape, dtype in self.tensors.values())

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
            data_shape: of X, such as (N, C, H, W); N and spatial extents may be names.
            weight_shape: of W, such as (O, C / groups, H, W).
            strides: one int, or one an axis.
            padding: an int; one int an axis; all lows, then all highs; pairs (low, high); "SAME" or "VALID".
            dilation: one int, or one an axis; 1 is a dense kernel.
            groups: divides both channel counts.
            data_layout: of X; None is NCW, NCHW or NCDHW.
            kernel_layout: of W; None is OIW, OIHW or OIDHW.
            grad_layout: of Y; None is `data_layout`.
            dtypes: of X, W and Y.

        Returns:
            The problem; its `grad_shape` is that of Y.

        Raises:
            ProblemError: as the class; also if W's I axis does not match the channels of X.
            DTypeError: as the class.
        """
        rank = len(data_shape) - 2
        if rank not in SPATIAL or len(weight_shape) != rank + 2:
            rule = "have 3, 4 or 5 axes each" if len(data_shape) == len(weight_shape) else "have equally many axes"
            raise ProblemError(f"data shape {tuple(data_shape)} and weight shape {tuple(weight_shape)} must {rule}")
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

    @property
    def descriptor(self) -> str:
        """The problem as a short string in the letters of `core.descriptor`, which `from_descriptor` reads."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _descriptor.write(cast("_descriptor.Fields", values), self.grad_extents)

    def __str__(self) -> str:
        return self.descriptor

    @classmethod
    def from_descriptor(cls, text: str) -> ConvProblem:
        """The problem of a descriptor: ours, or a plain one of oneDNN's benchdnn.

        Args:
            text: such as "g2mb8ic96ih27oc256oh27kh5ph2"; `core.descriptor` has the letters.

        Returns:
            The problem; what the text leaves out has benchdnn's defaults.

        Raises:
            DescriptorError: it does not parse, or contradicts itself.
        """
        values, outputs = _descriptor.read(text)
        try:
            problem = cls(**values)
        except (ProblemError, DTypeError) as error:
            raise DescriptorError(f"descriptor {text!r}: {error}") from error
        columns = (SPATIAL[problem.rank], problem.kernel, problem.data_extents, outputs, problem.grad_extents)
        for axis, kernel, x, stated, found in zip(*columns, strict=True):
            if found == 0 and x != 0 and stated is None:
                raise DescriptorError(
                    f"descriptor {text!r}: kernel {kernel} covers more of axis {axis} than the padded data has, which "
                    f"leaves no output; enlarge the padding, or write o{axis.lower()}0 if that is meant"
                )
        if any(stated not in (None, found) for stated, found in zip(outputs, problem.grad_extents, strict=True)):
            raise DescriptorError(
                f"descriptor {text!r} states output {outputs}, but its convolution gives {problem.grad_extents}"
            )
        return problem


REPRESENTATIVE_BATCH = 8
"""The number of images that code is planned for if its batch is known only at run time."""


def planned(problem: ConvProblem) -> ConvProblem:
    """The problem that code is planned for: with a representative batch if its own is known only at run time."""
    return replace(problem, batch=REPRESENTATIVE_BATCH) if isinstance(problem.batch, str) else problem
