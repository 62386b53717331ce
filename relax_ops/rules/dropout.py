# SPDX-License-Identifier: Apache-2.0
"""nn.dropout_mask, and a refusal of gradients for nn.dropout, which TVM lowers to the identity."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx

from relax_ops import dropout
from relax_ops.dropout import BITS, WORD, philox, seed_words, threshold
from relax_ops.gpu.scheduled import lowers_for_gpu, one_thread_each
from relax_ops.gradients.common import no_grads
from relax_ops.rules.contract import Legalization
from relax_ops.rules.elementwise import unary_rules
from tvm_convgrad.core.errors import UnsupportedError


def bare(
    _orig_var: relax.Var, _orig_call: relax.Call, _output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """A gradient of nn.dropout would be that of the identity, as TVM drops nothing.

    Raises:
        UnsupportedError: always.
    """
    raise UnsupportedError(
        "relax.nn.dropout: TVM lowers it to the identity, so a gradient would train without dropout; make it real with "
        "relax_ops.passes.dropout.seed_dropouts(module, seed=...) before differentiating, or remove it"
    )


def mask(
    _orig_var: relax.Var, orig_call: relax.Call, _output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Nothing flows into a mask's shape and seed."""
    return no_grads(orig_call.args)


def legalize_mask(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """FLegalize: one tensor expression, for any target."""
    attrs = call.attrs
    least = threshold(float(attrs.rate))
    first, second = seed_words(int(attrs.seed), int(attrs.stream))

    def key_words(step: te.Tensor) -> te.Tensor:
        def key_word(word: tirx.Expr) -> tirx.Expr:
            number = step().astype("uint64")
            words = philox(
                (number & _constant(WORD)) ^ _constant(second), number >> _constant(32), _constant(first), _constant
            )
            return tirx.Select(word == 0, *words)

        return te.compute((2,), key_word, name="dropout_key")

    def elements(like: te.Tensor, key: te.Tensor) -> te.Tensor:
        def element(*place: tirx.Expr) -> tirx.Expr:
            number: Any = tirx.IntImm("int64", 0)
            for index, extent in zip(place, like.shape, strict=True):
                number = number * tirx.Cast("int64", extent) + tirx.Cast("int64", index)
            number = number.astype("uint64")
            bits, _ = philox(number & _constant(WORD), (number >> _constant(32)) ^ key[1], key[0], _constant)
            kept = (bits >> _constant(32 - BITS)) >= _constant(least)
            dtype = like.dtype
            return tirx.Select(kept, tirx.const(1, dtype), tirx.const(0, dtype))

        return te.compute(like.shape, element, name="dropout_mask")

    like, step = call.args
    # The key is computed once, not for every element. A GPU's schedule would inline it where it is read, which is in
    # each round of every element (megabytes of source), unless it is a function of its own that nothing is fused with.
    if not lowers_for_gpu():
        return block_builder.call_te(
            lambda like, step: elements(like, key_words(step)), like, step, primfunc_name_hint="dropout_mask"
        )
    found = block_builder.call_te(key_words, step, primfunc_name_hint="dropout_key")
    key = block_builder.emit(one_thread_each(block_builder, found))
    return block_builder.call_te(elements, like, key, primfunc_name_hint="dropout_mask")


def _constant(value: int) -> tirx.Expr:
    return tirx.IntImm("uint64", value)


def _legalization(_stock: Legalization) -> Legalization:
    return legalize_mask


RULES = (
    unary_rules("nn.dropout", gradient=bare),
    unary_rules("nn.dropout_mask", gradient=mask, legalize=_legalization, declare=dropout.declare),
)
