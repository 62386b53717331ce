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
import tvm_ffi
from numpy.typing import NDArray
from tvm import relax, te
from tvm.relax.expr_functor import PyExprMutator, mutator
from tvm_ffi.dataclasses import py_class

from tvm_convgrad.errors import DTypeError, ProblemError

MASK = "relax.nn.dropout_mask"
DROPOUT = "relax.nn.dropout"
LEVEL = 11
_MULTIPLIER, _WEYL, _ROUNDS = 0xD256D193, 0x9E3779B9, 10
_WORD = 2**32 - 1
_BITS = 24


@py_class("relax.attrs.DropoutMaskAttrs", frozen=True, structural_eq="tree")
class DropoutMaskAttrs(tvm.ir.Attrs):
    """Attributes of nn.dropout_mask."""

    rate: float
    seed: int
    stream: int


def dropout_mask(like: Any, step: Any, *, rate: float, seed: int = 0, stream: int = 0) -> Any:
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


def dropout(builder: Any, x: Any, step: Any, *, rate: float, seed: int = 0, stream: int = 0) -> tuple[Any, Any]:
    """(x·mask/(1 − rate), mask), emitted into the builder's open block: inverted dropout as in PyTorch.

    Its gradient is that of the product: the mask is data. At rate 1 everything is dropped. Arguments and errors are
    those of `dropout_mask`.
    """
    declare()
    mask = builder.emit(dropout_mask(x, step, rate=rate, seed=seed, stream=stream))
    mask = builder.emit(relax.op.grad.no_grad(mask))
    dtype = str(getattr(x.ty.dtype, "dtype", x.ty.dtype))
    scaled = relax.op.multiply(mask, relax.const(0.0 if rate == 1 else 1 / (1 - rate), dtype))
    return builder.emit(relax.op.multiply(x, scaled)), mask


def seed_dropouts(module: Any, function: str = "main", *, seed: int = 0, step: str = "dropout_step") -> Any:
    """The module with every nn.dropout of one function made real.

    The function gets one more parameter, an int64 scalar named `step`, at its end: give another number at each
    training step. Dropouts are numbered in their order. A function without dropout is left as it is, without the
    parameter. Apply before differentiating.
    """
    declare()
    rewriter = _Seeder(module, seed, relax.Var(step, relax.TensorType((), "int64")))
    original = module[function]
    changed = rewriter.visit_expr(original)
    if not rewriter.count:
        return module
    attributes = original.attrs
    changed = relax.Function([*changed.params, rewriter.step], changed.body, None, original.is_pure, attributes)
    rewriter.builder_.update_func(module.get_global_var(function), changed)
    return relax.transform.Normalize()(rewriter.builder_.get())


@mutator
class _Seeder(PyExprMutator):
    """Replaces the calls of nn.dropout."""

    def __init__(self, module: Any, seed: int, step: Any) -> None:
        super().__init__(module)
        self.seed, self.step, self.count = seed, step, 0

    def visit_call_(self, call: Any) -> Any:
        """One call: the pair of the masked tensor and the mask, or the call as it is."""
        call = self.visit_expr_post_order(call)
        if call.op != tvm.ir.Op.get(DROPOUT):
            return call
        stream, self.count = self.count, self.count + 1
        kept, mask = dropout(
            self.builder_, call.args[0], self.step, rate=float(call.attrs.rate), seed=self.seed, stream=stream
        )
        return relax.Tuple([kept, mask])


def reference_mask(shape: tuple[int, ...], step: int, *, rate: float, seed: int = 0, stream: int = 0) -> NDArray[Any]:
    """The mask by numpy, as float64: what the operator must give, bit for bit."""
    first, second = _seed_words(seed, stream)
    key, salt = philox((step & _WORD) ^ second, (step >> 32) & _WORD, first)
    place = np.arange(int(np.prod(shape, dtype="int64")), dtype="uint64")
    bits, _ = philox(place & np.uint64(_WORD), (place >> np.uint64(32)) ^ np.uint64(salt), key, np.uint64)
    return (bits >> np.uint64(32 - _BITS) >= np.uint64(_threshold(rate))).astype("float64").reshape(shape)


def philox(low: Any, high: Any, key: Any, constant: Callable[[int], Any] = int) -> tuple[Any, Any]:
    """Philox2x32-10 of the counter (low, high): two 32-bit words, held in 64-bit ones.

    Works on Python ints, numpy arrays of uint64 and TIR expressions; `constant` makes constants of their type.
    """
    for number in range(_ROUNDS):
        product = low * constant(_MULTIPLIER)
        step = (key + constant(number * _WEYL)) & constant(_WORD)
        low, high = (product >> constant(32)) ^ step ^ high, product & constant(_WORD)
    return low, high


def _seed_words(seed: int, stream: int) -> tuple[int, int]:
    return philox(seed & _WORD, (seed >> 32) & _WORD, stream & _WORD)


def _threshold(rate: float) -> int:
    return round(rate * 2**_BITS)


def _constant(value: int) -> Any:
    return tvm.tirx.IntImm("uint64", value)


def legalize(block_builder: Any, call: Any) -> Any:
    """FLegalize: one tensor expression, for any target."""
    attrs = call.attrs
    threshold = _threshold(float(attrs.rate))
    first, second = _seed_words(int(attrs.seed), int(attrs.stream))

    def compute(like: Any, step: Any) -> Any:
        # The key is computed once, not for every element.
        def key_word(word: Any) -> Any:
            number = step().astype("uint64")
            words = philox(
                (number & _constant(_WORD)) ^ _constant(second), number >> _constant(32), _constant(first), _constant
            )
            return tvm.tirx.Select(word == 0, *words)

        key = te.compute((2,), key_word, name="dropout_key")

        def element(*place: Any) -> Any:
            number: Any = tvm.tirx.IntImm("int64", 0)
            for index, extent in zip(place, like.shape, strict=True):
                number = number * tvm.tirx.Cast("int64", extent) + tvm.tirx.Cast("int64", index)
            number = number.astype("uint64")
            bits, _ = philox(number & _constant(_WORD), (number >> _constant(32)) ^ key[1], key[0], _constant)
            kept = (bits >> _constant(32 - _BITS)) >= _constant(threshold)
            dtype = like.dtype
            return tvm.tirx.Select(kept, tvm.tirx.const(1, dtype), tvm.tirx.const(0, dtype))

        return te.compute(like.shape, element, name="dropout_mask")

    return block_builder.call_te(compute, *call.args, primfunc_name_hint="dropout_mask")


def infer_type(call: Any, _block_builder: Any) -> Any:
    """FInferType: the type of `like`."""
    like, step = (argument.ty for argument in call.args)
    if not isinstance(like, relax.TensorType) or str(like.dtype) not in ("float16", "bfloat16", "float32", "float64"):
        raise DTypeError(f"nn.dropout_mask: like must be a floating-point tensor, but is {like}")
    if not isinstance(step, relax.TensorType) or step.ndim != 0 or str(step.dtype) != "int64":
        raise DTypeError(f"nn.dropout_mask: step must be an int64 tensor of rank 0, but is {step}")
    return like


_registered = False


def declare() -> None:
    """Register nn.dropout_mask; repeating is harmless."""
    global _registered
    if _registered:
        return
    tvm_ffi.get_global_func("ir.RegisterOp")(MASK, "Seeded 0/1 mask of dropout")
    op = tvm.ir.Op.get(MASK)
    op.set_attr("FInferType", infer_type, LEVEL)
    op.set_attr("FPurity", True, LEVEL)
    op.set_attr("FLegalize", legalize, LEVEL)
    relax.op.nn.dropout_mask = dropout_mask
    _registered = True
