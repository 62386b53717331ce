# SPDX-License-Identifier: Apache-2.0
"""Dropout that really drops: a 0/1 mask from a counter-based hash of (seed, step, number of the dropout, place).

TVM lowers nn.dropout to the identity. Here `nn.dropout_mask` is an operator without state: the same seed, step and
stream give the same mask on every machine, in the forward and in the backward pass, whatever the thread count.

The generator is SplitMix64's finaliser (G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators",
OOPSLA 2014) over key + place·γ, γ the odd fraction of the golden ratio; the key is the same hash of seed, stream and
step. An element is kept if the hash's upper 24 bits, as a number in [0, 1), reach the rate.
"""

from __future__ import annotations

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
_GAMMA = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_BITS = 24


@py_class("relax.attrs.DropoutMaskAttrs", frozen=True, structural_eq="tree")
class DropoutMaskAttrs(tvm.ir.Attrs):  # type: ignore[misc]
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
class _Seeder(PyExprMutator):  # type: ignore[misc]
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
    place = np.arange(int(np.prod(shape, dtype="int64")), dtype="uint64")
    with np.errstate(over="ignore"):
        key = _hash(_hash(np.uint64(seed % 2**64) + np.uint64(_GAMMA * (stream + 1) % 2**64)) + np.uint64(step % 2**64))
        bits = _hash(key + place * np.uint64(_GAMMA))
    return (bits >> np.uint64(64 - _BITS) >= np.uint64(_threshold(rate))).astype("float64").reshape(shape)


def _threshold(rate: float) -> int:
    return round(rate * 2**_BITS)


def _hash(z: Any) -> Any:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def _constant(value: int) -> Any:
    return tvm.tirx.IntImm("uint64", value)


def _tir_hash(z: Any) -> Any:
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z = (z ^ (z >> _constant(shift))) * _constant(factor)
    return z ^ (z >> _constant(31))


def legalize(block_builder: Any, call: Any) -> Any:
    """FLegalize: one tensor expression, for any target."""
    attrs = call.attrs
    threshold = _threshold(float(attrs.rate))
    start = int(_hash_int((int(attrs.seed) + _GAMMA * (int(attrs.stream) + 1)) % 2**64))

    def compute(like: Any, step: Any) -> Any:
        # The key is computed once, not for every element.
        key = te.compute((1,), lambda _: _tir_hash(_constant(start) + step().astype("uint64")), name="dropout_key")

        def element(*place: Any) -> Any:
            number: Any = tvm.tirx.IntImm("int64", 0)
            for index, extent in zip(place, like.shape, strict=True):
                number = number * tvm.tirx.Cast("int64", extent) + tvm.tirx.Cast("int64", index)
            bits = _tir_hash(key[0] + number.astype("uint64") * _constant(_GAMMA))
            kept = (bits >> _constant(64 - _BITS)) >= _constant(threshold)
            dtype = like.dtype
            return tvm.tirx.Select(kept, tvm.tirx.const(1, dtype), tvm.tirx.const(0, dtype))

        return te.compute(like.shape, element, name="dropout_mask")

    return block_builder.call_te(compute, *call.args, primfunc_name_hint="dropout_mask")


def _hash_int(value: int) -> int:
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        value = ((value ^ (value >> shift)) * factor) % 2**64
    return value ^ (value >> 31)


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
