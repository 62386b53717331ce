# SPDX-License-Identifier: Apache-2.0
"""Discrete Fourier transforms as products with tables of cosines and sines, of pairs of real and imaginary parts.

A transform of n elements along an axis is X[k] = Σ_j x[j]·exp(∓2πi·jk/n). Up to `_DENSE` elements it is a product with
the matrix of these numbers. Longer ones are split by n = a·b (Cooley and Tukey): with j = j1·b + j2 and k = k1 + a·k2,

    X[k1 + a·k2] = Σ_j2 exp(∓2πi·j2·k2/b) · ( exp(∓2πi·j2·k1/n) · Σ_j1 exp(∓2πi·j1·k1/a)·x[j1·b + j2] ).

Tables are constants, computed in float64. Gradients are those of the products.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.fourier_table import LARGEST_FACTOR, wave_table
from tvm_convgrad.training.frontends.torch_export.places import type_name

if TYPE_CHECKING:  # optional packages
    import torch
    from torch import Tensor
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

WAVES = "waves.default"
"""The operator that makes a table, as the importer calls it."""

_DENSE = 512


class Parts(NamedTuple):
    """A complex tensor: its real and its imaginary part, which is None where it is known to be 0."""

    real: Tensor
    imag: Tensor | None


def declare_waves() -> None:
    """Declare `convgrad::waves`, a table of cosines or sines."""
    import torch

    if hasattr(torch.ops.convgrad, "waves"):
        return
    sizes = "int rows, int columns, int period"
    torch.library.define(
        "convgrad::waves", f"({sizes}, bool is_sine, float scale, bool is_folded, ScalarType dtype) -> Tensor"
    )
    torch.library.impl("convgrad::waves", "CompositeExplicitAutograd", _waves)
    torch.library.register_fake("convgrad::waves", _no_waves)


def waves(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The table as a constant."""
    *given, dtype = node.args
    return relax.const(wave_table(*given).astype(type_name(dtype)), type_name(dtype))


def _waves(
    rows: int, columns: int, period: int, is_sine: bool, scale: float, is_folded: bool, dtype: torch.dtype
) -> Tensor:
    import torch

    return torch.from_numpy(wave_table(rows, columns, period, is_sine, scale, is_folded)).to(dtype)


def _no_waves(rows: int, columns: int, period: int, is_sine: bool, scale: float, is_folded: bool, dtype: Any) -> Tensor:
    import torch

    return torch.empty(rows, columns, dtype=dtype)


def transformed(x: Parts, axes: Sequence[int], norm: int, *, is_inverse: bool) -> Parts:
    """The transform along some axes.

    Args:
        norm: 0: none; 1: divided by the root of the number of elements; 2: by that number (PyTorch's `fft_norm_mode`).
    """
    for axis in reversed(list(axes)):
        extent = _extent(x.real, axis)
        x = _along(x, axis, lambda rows, n=extent: _product(rows, n, n, is_inverse, _scale(n, norm)))
    return x


def half_spectrum(x: Tensor, axes: Sequence[int], norm: int) -> Parts:
    """The transform of a real tensor, of which the last one of the axes keeps n // 2 + 1 elements."""
    *others, last = axes
    extent = _extent(x, last)
    found = _along(
        Parts(x, None), last, lambda rows: _product(rows, extent, extent // 2 + 1, False, _scale(extent, norm))
    )
    return transformed(found, others, norm, is_inverse=False)


def of_half_spectrum(x: Parts, axes: Sequence[int], norm: int, extent: int) -> Tensor:
    """The inverse of `half_spectrum`: a real tensor with `extent` elements along the last one of the axes."""
    *others, last = axes
    if not isinstance(extent, int):
        raise UnsupportedError(_symbolic(extent))
    x = transformed(x, others, norm, is_inverse=True)
    count = extent // 2 + 1
    x = Parts(*(None if part is None else part.narrow(last, 0, count) for part in x))
    return _along(x, last, lambda rows: _folded(rows, extent, _scale(extent, norm))).real


def _folded(x: Parts, extent: int, scale: float) -> Parts:
    """The real inverse of half a spectrum along the last axis."""
    real, imag = x
    count = real.shape[-1]
    if extent <= _DENSE or _factor(extent) == 1:
        _check(extent)
        found = real @ _table(real, count, extent, extent, False, scale, True)
        if imag is not None:
            found = found - imag @ _table(real, count, extent, extent, True, scale, True)
        return Parts(found, None)
    import torch

    def whole(part: Tensor, sign: int) -> Tensor:
        twins = part.narrow(-1, 1, extent - count).flip(-1)
        return torch.cat([part, twins if sign > 0 else -twins], -1)

    spectrum = Parts(whole(real, 1), None if imag is None else whole(imag, -1))
    return Parts(_product(spectrum, extent, extent, True, scale).real, None)


def _product(x: Parts, extent: int, count: int, is_inverse: bool, scale: float) -> Parts:
    """The first `count` elements of the transform along the last axis."""
    first = _factor(extent) if extent > _DENSE else 1
    if first == 1:
        _check(extent)
        cosines, sines = _waves_of(x.real, extent, count, extent, is_inverse, scale)
        return _times(x, cosines, sines, lambda left, right: left @ right)
    second = extent // first
    rows = Parts(*(None if part is None else part.unflatten(-1, (first, second)).mT for part in x))
    inner = _product(rows, first, first, is_inverse, 1.0)
    cosines, sines = _waves_of(x.real, second, first, extent, is_inverse, 1.0)
    inner = _times(inner, cosines, sines, lambda left, right: left * right)
    needed = min(-(-count // first), second)
    columns = Parts(*(None if part is None else part.mT for part in inner))
    outer = _product(columns, second, needed, is_inverse, scale)
    found = [None if part is None else part.mT.flatten(-2) for part in outer]
    return Parts(*(part if part is None or needed * first == count else part.narrow(-1, 0, count) for part in found))


def _times(x: Parts, cosines: Tensor, sines: Tensor, product: Any) -> Parts:
    """x times cosines + i·sines, by a product of two tensors."""
    real, imag = product(x.real, cosines), product(x.real, sines)
    if x.imag is None:
        return Parts(real, imag)
    return Parts(real - product(x.imag, sines), imag + product(x.imag, cosines))


def _along(x: Parts, axis: int, function: Any) -> Parts:
    """A function along the last axis, for another one."""
    axis %= x.real.ndim
    if axis == x.real.ndim - 1:
        found: Parts = function(x)
        return found
    moved = Parts(*(None if part is None else part.movedim(axis, -1) for part in x))
    return Parts(*(None if part is None else part.movedim(-1, axis) for part in function(moved)))


def _waves_of(
    like: Tensor, rows: int, columns: int, period: int, is_inverse: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The real and the imaginary part of exp(∓2πi·jk/period), times scale."""
    signed = scale if is_inverse else -scale
    cosines = _table(like, rows, columns, period, False, scale, False)
    return cosines, _table(like, rows, columns, period, True, signed, False)


def _table(like: Tensor, rows: int, columns: int, period: int, is_sine: bool, scale: float, is_folded: bool) -> Tensor:
    import torch

    table: Tensor = torch.ops.convgrad.waves(rows, columns, period, is_sine, scale, is_folded, like.dtype)
    return table


def _factor(extent: int) -> int:
    """The factor of a length next to its root, among those of at most `_DENSE`; 1: there is none."""
    return max(factor for factor in range(1, min(math.isqrt(extent), _DENSE) + 1) if extent % factor == 0)


def _scale(extent: int, norm: int) -> float:
    return (1.0, 1.0 / math.sqrt(extent), 1.0 / extent)[norm]


def _extent(x: Tensor, axis: int) -> int:
    extent = x.shape[axis]
    if not isinstance(extent, int):
        raise UnsupportedError(_symbolic(extent))
    return extent


def _symbolic(extent: object) -> str:
    return (
        f"a Fourier transform of {extent} elements needs a fixed length; export the model without a dynamic shape for "
        "this axis"
    )


def _check(extent: int) -> None:
    if extent > LARGEST_FACTOR:
        raise UnsupportedError(
            f"a Fourier transform of a length with the prime factor {extent} is not imported: its table would have "
            f"{extent} x {extent} numbers, and factors of at most {LARGEST_FACTOR} are taken; pad or crop the axis to "
            "a length of small factors (the parameter n or s of torch.fft's functions)"
        )


__all__ = ["WAVES", "Parts", "declare_waves", "half_spectrum", "of_half_spectrum", "transformed", "waves"]
