# SPDX-License-Identifier: Apache-2.0
"""Operators of complex tensors, written as operators of their real and imaginary parts.

A rule takes an operator's arguments, in which a complex tensor is a `Parts`, and returns a `Parts`, a real tensor, or a
sequence of them. PyTorch's gradient of a complex tensor is that of its parts, as a complex number: the gradients of
these rules are PyTorch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.operators.fourier import (
    Parts,
    half_spectrum,
    of_half_spectrum,
    transformed,
)
from tvm_convgrad.training.frontends.torch_export.operators.stft import istft

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor

Rule: TypeAlias = Callable[..., Any]

LINEAR = frozenset(
    {"permute", "transpose", "t", "expand", "unsqueeze", "squeeze", "slice", "select", "diagonal", "unfold", "flip"}
    | {"roll", "repeat", "cat", "stack", "split", "split_with_sizes", "unbind", "index", "index_select", "gather"}
    | {"slice_scatter", "select_scatter", "diagonal_scatter", "index_put", "copy", "clone", "alias", "detach"}
    | {"lift_fresh_copy", "stop_gradient", "sum", "mean", "cumsum", "neg", "constant_pad_nd", "scatter_add", "tril"}
    | {"triu", "rot90", "movedim", "narrow", "contiguous", "reflection_pad1d", "reflection_pad2d", "avg_pool2d"}
)
"""What is applied to the parts by themselves, with tensors that are no floats for both."""

_LARGEST_POWER = 8


def rules() -> dict[str, Rule]:
    """The rules by the operator's name without its overload."""
    import torch

    return {
        "complex": lambda real, imag: Parts(*torch.broadcast_tensors(real, imag)),
        "polar": lambda size, angle: Parts(size * torch.cos(angle), size * torch.sin(angle)),
        "view_as_complex": lambda x: Parts(x.select(-1, 0), x.select(-1, 1)),
        "view_as_real": lambda x: torch.stack([x.real, imag_of(x)], -1),
        "real": lambda x: x.real,
        "imag": imag_of,
        "view": _viewed,
        "_unsafe_view": _viewed,
        "reshape": _viewed,
        "full": _full,
        "full_like": lambda x, value, **given: _full(_real(x).shape, value, **{"dtype": _dtype(x), **given}),
        "zeros_like": lambda x, **given: _full(_real(x).shape, 0, **{"dtype": _dtype(x), **given}),
        "ones_like": lambda x, **given: _full(_real(x).shape, 1, **{"dtype": _dtype(x), **given}),
        "scalar_tensor": lambda value, **given: _full([], value, **given),
        "_to_copy": _converted,
        "conj": _conjugate,
        "_conj": _conjugate,
        "conj_physical": _conjugate,
        "_conj_physical": _conjugate,
        "resolve_conj": lambda x: x,
        "resolve_neg": lambda x: x,
        "add": lambda x, y, *, alpha=1: _sum(x, y, alpha),
        "sub": lambda x, y, *, alpha=1: _sum(x, y, -alpha),
        "rsub": lambda x, y, alpha=1: _sum(y, x, -alpha),
        "mul": lambda x, y: _bilinear(x, y),
        "div": _quotient,
        "reciprocal": lambda x: _quotient(1.0, x),
        "square": lambda x: _bilinear(x, x),
        "pow": _power,
        "exp": lambda x: Parts(*(torch.exp(x.real) * part for part in _unit(imag_of(x)))),
        "log": lambda x: Parts(torch.log(_size(x)), _angle(x)),
        "sqrt": lambda x: Parts(*(torch.sqrt(_size(x)) * part for part in _unit(_angle(x) / 2))),
        "abs": _size,
        "angle": _angle,
        "sgn": _sign,
        "linalg_vector_norm": lambda x, *given, **named: torch.linalg.vector_norm(_size(x), *given, **named),
        "var": lambda x, *given, **named: torch.var(x.real, *given, **named) + torch.var(imag_of(x), *given, **named),
        "eq": lambda x, y: (_real(x) == _real(y)) & (imag_of(x) == imag_of(y)),
        "ne": lambda x, y: (_real(x) != _real(y)) | (imag_of(x) != imag_of(y)),
        "isnan": lambda x: torch.isnan(x.real) | torch.isnan(imag_of(x)),
        "where": lambda condition, x, y: _split(lambda one, other: torch.where(condition, one, other), x, y),
        "masked_fill": lambda x, mask, value: _split(lambda one, other: one.masked_fill(mask, other), x, value),
        "mm": lambda x, y: _bilinear(x, y, torch.matmul),
        "bmm": lambda x, y: _bilinear(x, y, torch.matmul),
        "mv": lambda x, y: _bilinear(x, y, torch.matmul),
        "dot": lambda x, y: _bilinear(x, y, torch.matmul),
        "vdot": lambda x, y: _bilinear(_conjugate(x), y, torch.matmul),
        "addmm": _added_product,
        "baddbmm": _added_product,
        "convolution": _convolution,
        "_fft_r2c": _real_to_complex,
        "_fft_c2r": lambda x, axes, norm, extent: of_half_spectrum(x, axes, norm, extent),
        "_fft_c2c": lambda x, axes, norm, forward: transformed(x, axes, norm, is_inverse=not forward),
        "istft": istft,
    }


def linear(function: Callable[..., Any], arguments: Sequence[Any], named: dict[str, Any]) -> Any:
    """An operator of `LINEAR` applied to real parts, then to imaginary ones if any is not 0."""
    import torch

    if isinstance(named.get("dtype"), torch.dtype) and named["dtype"].is_complex:
        named = {**named, "dtype": named["dtype"].to_real()}
    is_real = not any(isinstance(each, Parts) and each.imag is not None for each in _leaves([*arguments]))
    real = function(*_mapped(_real, arguments), **named)
    imag = None if is_real else function(*_mapped(_imaginary, arguments), **named)
    if isinstance(real, tuple | list):
        return [Parts(part, None if imag is None else imag[at]) for at, part in enumerate(real)]
    return Parts(real, imag)


def imag_of(x: Any) -> Any:
    """The imaginary part of a tensor or number, of zeros where it is known to be 0."""
    import torch

    if isinstance(x, Parts):
        return torch.zeros_like(x.real) if x.imag is None else x.imag
    return torch.zeros_like(x) if isinstance(x, torch.Tensor) else complex(x).imag


def _leaves(values: Any) -> list[Any]:
    if isinstance(values, tuple | list) and not isinstance(values, Parts):
        return [leaf for each in values for leaf in _leaves(each)]
    return [values]


def _mapped(function: Callable[[Any], Any], values: Sequence[Any]) -> list[Any]:
    return [
        _mapped(function, each) if isinstance(each, tuple | list) and not isinstance(each, Parts) else function(each)
        for each in values
    ]


def _real(x: Any) -> Any:
    if isinstance(x, complex):
        return x.real
    return x.real if isinstance(x, Parts) else x


def _imaginary(x: Any) -> Any:
    """The imaginary part of a complex or real float; indices and masks are the same for both parts."""
    import torch

    is_float = isinstance(x, torch.Tensor) and x.is_floating_point()
    return imag_of(x) if isinstance(x, Parts) or is_float else x


def _split(function: Callable[[Any, Any], Tensor], x: Any, y: Any) -> Parts:
    """A function of two operands by parts; numbers and real tensors have the imaginary part 0."""
    return Parts(function(_real(x), _real(y)), function(imag_of(x), imag_of(y)))


def _viewed(x: Parts, size: Sequence[int]) -> Parts:
    return Parts(x.real.reshape(size), None if x.imag is None else x.imag.reshape(size))


def _full(size: Sequence[int], value: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    import torch

    if dtype is not None and not dtype.is_complex:
        return torch.full(size, _real(value), dtype=dtype)
    number, real_type = complex(value), None if dtype is None else dtype.to_real()
    real = torch.full(size, number.real, dtype=real_type)
    return Parts(real, torch.full(size, number.imag, dtype=real_type) if number.imag else None)


def _dtype(x: Any) -> torch.dtype:
    dtype: torch.dtype = _real(x).dtype
    return dtype.to_complex() if isinstance(x, Parts) else dtype


def _converted(x: Any, *, dtype: torch.dtype | None = None, **_: Any) -> Any:
    x = x if isinstance(x, Parts) else Parts(x, None)
    if dtype is None:
        return x
    if not dtype.is_complex:
        return x.real.to(dtype)
    return Parts(*(None if part is None else part.to(dtype.to_real()) for part in x))


def _conjugate(x: Any) -> Any:
    return Parts(x.real, None if x.imag is None else -x.imag) if isinstance(x, Parts) else x


def _sum(x: Any, y: Any, alpha: Any) -> Parts:
    y = y if isinstance(alpha, int | float) and alpha == 1 else _bilinear(y, alpha)
    real, (first, second) = _real(x) + _real(y), (_parts(each)[1] for each in (x, y))
    if first is None and second is None:
        return Parts(real, None)
    alone = second if first is None else first if second is None else None
    if getattr(alone, "shape", None) == real.shape:
        return Parts(real, alone)
    return Parts(real, imag_of(x) + imag_of(y))


def _bilinear(x: Any, y: Any, product: Callable[[Any, Any], Any] = operator.mul) -> Any:
    """The product of two operands, of which one may be real, by those of their parts."""
    (a, b), (c, d) = _parts(x), _parts(y)
    real = product(a, c) if b is None or d is None else product(a, c) - product(b, d)
    terms = [product(left, right) for left, right in ((a, d), (b, c)) if left is not None and right is not None]
    return Parts(real, None if not terms else terms[0] if len(terms) == 1 else terms[0] + terms[1])


def _parts(x: Any) -> tuple[Any, Any]:
    if isinstance(x, complex):
        return x.real, x.imag or None
    return (x.real, x.imag) if isinstance(x, Parts) else (x, None)


def _quotient(x: Any, y: Any, *, rounding_mode: str | None = None) -> Any:
    """x / y: x times the conjugate of y, both divided by the larger part of y, so that squares stay in range."""
    c, d = _parts(y)
    if d is None:
        return Parts(_real(x) / c, None if _parts(x)[1] is None else _parts(x)[1] / c)
    if not isinstance(y, Parts):
        return _bilinear(x, 1 / y)
    scale = _scale_of(y)
    c, d = c / scale, d / scale
    size = (c * c + d * d) * scale
    return _bilinear(x, Parts(c / size, -d / size))


def _scale_of(x: Parts) -> Tensor:
    """The larger one of the parts' sizes, without gradient, and 1 where both are 0."""
    import torch

    larger = torch.maximum(x.real.abs(), imag_of(x).abs())
    scale: Tensor = torch.ops.convgrad.stop_gradient(torch.where(larger == 0, torch.ones_like(larger), larger))
    return scale


def _size(x: Parts) -> Tensor:
    """The absolute value, whose gradient is 0 at 0, as PyTorch's."""
    import torch

    if x.imag is None:
        return x.real.abs()
    scale = _scale_of(x)
    real, imag = x.real / scale, x.imag / scale
    square = real * real + imag * imag
    zero = square == 0
    return torch.where(zero, torch.zeros_like(square), torch.sqrt(torch.where(zero, 1.0, square))) * scale


def _angle(x: Parts) -> Tensor:
    """The argument in [-π, π], whose gradient is 0 at 0, as PyTorch's."""
    import torch

    real, imag = x.real, imag_of(x)
    zero = (real == 0) & (imag == 0)
    nothing = torch.zeros_like(real)
    found = torch.atan2(torch.where(zero, nothing, imag), torch.where(zero, torch.ones_like(real), real))
    return torch.where(zero, nothing, found)


def _unit(angle: Tensor) -> tuple[Tensor, Tensor]:
    import torch

    return torch.cos(angle), torch.sin(angle)


def _sign(x: Parts) -> Parts:
    """x divided by its size; 0 at 0."""
    import torch

    size = _size(x)
    size = torch.where(size == 0, torch.ones_like(size), size)
    return Parts(x.real / size, imag_of(x) / size)


def _power(x: Any, power: Any) -> Any:
    """Whole powers, by squares."""
    if not isinstance(x, Parts) or not isinstance(power, int | float) or power != int(power):
        raise UnsupportedError("powers of complex numbers are imported for whole exponents only; write exp(p · log(z))")
    count = abs(int(power))
    if count > _LARGEST_POWER:
        raise UnsupportedError(
            f"powers of complex numbers are imported up to {_LARGEST_POWER}, not {power}; write exp(p · log(z))"
        )
    found: Any = None
    square: Any = x
    while count:
        if count % 2:
            found = square if found is None else _bilinear(found, square)
        count //= 2
        square = _bilinear(square, square) if count else square
    if found is None:
        return Parts(x.real * 0 + 1, None)
    return _quotient(1.0, found) if power < 0 else found


def _added_product(x: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Parts:
    import torch

    return _sum(_bilinear(x, beta) if beta != 1 else x, _bilinear(left, right, torch.matmul), alpha)


def _convolution(x: Any, weight: Any, bias: Any, *given: Any) -> Parts:
    import torch

    def plain(one: Any, other: Any) -> Any:
        return torch.ops.aten.convolution.default(one, other, None, *given)

    found: Parts = _bilinear(x, weight, plain)
    if bias is None:
        return found
    shape = [-1] + [1] * (found.real.ndim - 2)
    wide = Parts(*(None if part is None else part.reshape(shape) for part in _parts(bias)))
    return _sum(found, wide, 1)


def _real_to_complex(x: Tensor, axes: Sequence[int], norm: int, is_half: bool) -> Parts:
    return half_spectrum(x, axes, norm) if is_half else transformed(Parts(x, None), axes, norm, is_inverse=False)


__all__ = ["LINEAR", "Rule", "imag_of", "linear", "rules"]
