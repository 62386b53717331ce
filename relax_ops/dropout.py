# SPDX-License-Identifier: Apache-2.0
"""Dropout that really drops: a 0/1 mask from a counter-based hash of (seed, step, number of the dropout, place).

TVM lowers nn.dropout to the identity. Here `nn.dropout_mask` is an operator without state: the same seed, step and
stream give the same mask on every machine, in the forward and in the backward pass, whatever the thread count.

The generator is Philox2x32-10 (J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011): the place is
its counter, its key comes from seed, stream and step by the same function. Its products of 32-bit numbers fit in 64
bits: TVM compiles unsigned overflow to undefined behaviour, so a hash that wraps around cannot be used. An element is
kept if the upper 24 bits, as a number in [0, 1), reach the rate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm_ffi.dataclasses import py_class

from relax_ops.declaration import declare_operator
from tvm_convgrad import register
from tvm_convgrad.core.errors import DTypeError, ProblemError

MASK = "relax.nn.dropout_mask"
DROPOUT = "relax.nn.dropout"
_MULTIPLIER, _WEYL, _ROUNDS = 0xD256D193, 0x9E3779B9, 10
WORD = 2**32 - 1
BITS = 24


@py_class("relax.attrs.DropoutMaskAttrs", frozen=True, structural_eq="tree")
class DropoutMaskAttrs(tvm.ir.Attrs):
    """Attributes of nn.dropout_mask."""

    rate: float
    seed: int
    stream: int


def dropout_mask(like: relax.Expr, step: relax.Expr, *, rate: float, seed: int = 0, stream: int = 0) -> relax.Call:
    """A tensor of the shape and dtype of `like`: 0 with probability `rate`, else 1.

    Args:
        like: a floating-point tensor, of which only the type is read.
        step: a scalar of int64; another value gives another mask.
        rate: in [0, 1].
        seed: of the whole program; its low 64 bits count.
        stream: which dropout of the program this is.

    Raises:
        ProblemError: the rate is outside of [0, 1].
    """
    if not 0.0 <= rate <= 1.0:
        raise ProblemError(f"nn.dropout_mask: rate {rate} must lie in [0, 1]")
    attrs = DropoutMaskAttrs(rate=float(rate), seed=int(seed), stream=int(stream))
    return relax.Call(tvm.ir.Op.get(MASK), [like, step], attrs)


def dropout(
    builder: relax.BlockBuilder, x: relax.Expr, step: relax.Expr, *, rate: float, seed: int = 0, stream: int = 0
) -> tuple[relax.Var, relax.Var]:
    """(x·mask/(1 − rate), mask), emitted into the builder's open block: inverted dropout as in PyTorch.

    Its gradient is that of the product: the mask is data. At rate 1 everything is dropped. Arguments and errors are
    those of `dropout_mask`.
    """
    register()
    mask = builder.emit(dropout_mask(x, step, rate=rate, seed=seed, stream=stream))
    mask = builder.emit(relax.op.grad.no_grad(mask))
    dtype = str(getattr(x.ty.dtype, "dtype", x.ty.dtype))
    scaled = relax.op.multiply(mask, relax.const(0.0 if rate == 1 else 1 / (1 - rate), dtype))
    return builder.emit(relax.op.multiply(x, scaled)), mask


def reference_mask(shape: tuple[int, ...], step: int, *, rate: float, seed: int = 0, stream: int = 0) -> NDArray[Any]:
    """The mask by numpy, as float64: what the operator must give, bit for bit."""
    first, second = seed_words(seed, stream)
    key, salt = philox((step & WORD) ^ second, (step >> 32) & WORD, first)
    place = np.arange(int(np.prod(shape, dtype="int64")), dtype="uint64")
    bits, _ = philox(place & np.uint64(WORD), (place >> np.uint64(32)) ^ np.uint64(salt), key, np.uint64)
    return (bits >> np.uint64(32 - BITS) >= np.uint64(threshold(rate))).astype("float64").reshape(shape)


def philox(low: Any, high: Any, key: Any, constant: Callable[[int], Any] = int) -> tuple[relax.Var, relax.Var]:
    """Philox2x32-10 of the counter (low, high): two 32-bit words, held in 64-bit ones.

    Works on Python ints, numpy arrays of uint64 and TIR expressions; `constant` makes constants of their type.
    """
    for number in range(_ROUNDS):
        product = low * constant(_MULTIPLIER)
        step = (key + constant(number * _WEYL)) & constant(WORD)
        low, high = (product >> constant(32)) ^ step ^ high, product & constant(WORD)
    return low, high


def seed_words(seed: int, stream: int) -> tuple[int, int]:
    """What stands for seed and stream in the key: two 32-bit words."""
    return philox(seed & WORD, (seed >> 32) & WORD, stream & WORD)


def threshold(rate: float) -> int:
    """The least of the upper 24 bits with which an element is kept."""
    return round(rate * 2**BITS)


def infer_type(call: relax.Call, _block_builder: relax.BlockBuilder) -> relax.TensorType:
    """FInferType: the type of `like`."""
    like, step = (argument.ty for argument in call.args)
    if not isinstance(like, relax.TensorType) or str(like.dtype) not in ("float16", "bfloat16", "float32", "float64"):
        raise DTypeError(f"nn.dropout_mask: like must be a floating-point tensor, but is {like}")
    if not isinstance(step, relax.TensorType) or step.ndim != 0 or str(step.dtype) != "int64":
        raise DTypeError(f"nn.dropout_mask: step must be an int64 tensor of rank 0, but is {step}")
    return like


def declare() -> None:
    """Register nn.dropout_mask; repeating is harmless."""
    declare_operator(MASK, "Seeded 0/1 mask of dropout", infer_type)
    relax.op.nn.dropout_mask = dropout_mask
