# SPDX-License-Identifier: Apache-2.0
"""Max pools as kernels see them: extents, windows and types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tvm_convgrad.codegen.loops import Loops, make_parameter
from tvm_convgrad.codegen.tir import Buffer
from tvm_convgrad.core.dtypes import SHORT_FLOATS

Triple = tuple[int, int, int]


@dataclass(frozen=True)
class MaxPool:
    """A max pool without dilation; extents over depth, height, width, 1 where an axis does not exist.

    Attributes:
        planes: channels of all images.
        extents, results: of a plane of the data and of the result.
        kernel, strides: of the window; low: the padding before.
        dtype: of data and result; 16-bit ones are compared and summed in float32.
    """

    planes: int
    extents: Triple
    results: Triple
    kernel: Triple
    strides: Triple
    low: Triple
    dtype: str

    @property
    def is_narrow(self) -> bool:
        """Whether data and result have 16 bits."""
        return self.dtype in SHORT_FLOATS

    @property
    def wide(self) -> str:
        """The type to compute in."""
        return "float32" if self.is_narrow else self.dtype

    @property
    def refusal(self) -> str:
        """Why there is no kernel, or ""."""
        if not self.planes or not all(self.results) or not all(self.extents):
            return "there are no elements"
        for extent, count, kernel, stride, low in zip(
            self.extents, self.results, self.kernel, self.strides, self.low, strict=True
        ):
            if low >= kernel or (count - 1) * stride - low >= extent:
                return "a window lies in the padding"
        return ""


def parameters_of(
    loops: Loops, dtype: str, names: Sequence[str], shapes: Sequence[Sequence[int]]
) -> tuple[list[Buffer], list[Buffer]]:
    """The parameters of a PrimFunc and flat views of them."""
    parameters = [make_parameter(name, shape, dtype) for name, shape in zip(names, shapes, strict=True)]
    return parameters, [loops.flat(p, math.prod(shape)) for p, shape in zip(parameters, shapes, strict=True)]


__all__ = ["MaxPool", "Triple", "parameters_of"]
