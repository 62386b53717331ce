# SPDX-License-Identifier: Apache-2.0
"""The larger or smaller one of two tensors: maximum and minimum.

Where the operands tie, each gets half of the gradient, as in PyTorch. TVM lowers them to instructions that lose NaN;
the legalization here keeps it. Integers, which have no NaN, go to TVM's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

from tvm import relax, tirx
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from relax_ops.gradients.common import FLOATS, dtype_of, fit, scalar
from relax_ops.rules.contract import GradientRule, Legalization, LegalizationRule
from relax_ops.rules.elementwise import broadcast_rules, emit_elementwise
from tvm_convgrad.codegen.extrema import at_least, at_most, maximum, minimum

Combine: TypeAlias = "Callable[[tirx.Expr, tirx.Expr], tirx.Expr]"
"""Combines two elements."""


def _gradient(worse: Callable[[Any, Any], Any]) -> GradientRule:
    def rule(
        _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        x, y = orig_call.args
        zero = scalar(0, dtype_of(x))
        tie = op.equal(x, y)
        share = ctx.emit(op.where(tie, op.multiply(output_grad, scalar(0.5, dtype_of(x))), output_grad))
        dx, dy = op.where(worse(x, y), zero, share), op.where(worse(y, x), zero, share)
        return [fit(ctx, dx, x), fit(ctx, dy, y)]

    rule.__doc__ = """z is x or y, whichever is not worse: the gradient goes to that one, half to each where they tie.

    Where one of them is NaN, so is z, and both get the gradient, as in PyTorch.
    """
    return rule


def _legalization(against: Combine, both: Combine) -> LegalizationRule:
    """Legalization of an elementwise choice: `against` a constant that is not NaN, or of `both` tensors."""

    def make(stock: Legalization) -> Legalization:
        def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            if dtype_of(call) not in FLOATS or getattr(call.ty.shape, "values", None) is None:
                return stock(block_builder, call)
            given = [_number(argument) for argument in call.args]
            tensors = [argument for argument, number in zip(call.args, given, strict=True) if number is None]
            if len(tensors) == 1:
                number = next(number for number in given if number is not None)
                return emit_elementwise(block_builder, call, tensors, lambda x: against(x, number))
            return emit_elementwise(block_builder, call, call.args, both)

        return legalize

    return make


def _number(argument: relax.Expr) -> relax.Expr:
    """A scalar constant that is not NaN, as a TIR constant; None for all other operands."""
    if isinstance(argument, Constant) and not array_of(argument).shape:
        value = float(array_of(argument))
        return None if math.isnan(value) else tirx.const(value, dtype_of(argument))
    return None


RULES = (
    broadcast_rules("maximum", gradient=_gradient(op.less), legalize=_legalization(at_least, maximum)),
    broadcast_rules("minimum", gradient=_gradient(op.greater), legalize=_legalization(at_most, minimum)),
)
