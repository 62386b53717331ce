# SPDX-License-Identifier: Apache-2.0
"""The contract of an operator's file: `OperatorRules`, and the signatures of the rules that it holds.

A file of this folder defines `RULES`, a tuple of OperatorRules. Nothing else names the file: relax_ops.rules finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from tvm import relax

from relax_ops.gpu.scheduled import lowers_for_gpu
from relax_ops.layouts.site import Decision, Site
from relax_ops.per_sample.states import Summed
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, MappedAxis

GradientRule: TypeAlias = Callable[[relax.Var, relax.Call, relax.Expr, relax.BlockBuilder], list[relax.Expr]]
"""rule(orig_var, orig_call, output_grad, ctx) -> partials, one for each argument of the call, of that argument's type.

`ctx` is the block builder of the backward pass, with a dataflow block open. It is TVM's FPrimalGradient.
"""

LayoutRule: TypeAlias = Callable[[Site], Decision]
"""rule(site) -> layouts of operands and result, and changed attributes. See relax_ops.layouts.site."""

AxisRule: TypeAlias = Callable[[relax.Call, Axes], "int | MappedAxis | str"]
"""rule(call, axes) -> where the mapped axis is in the call's value (the same for all fields of a tuple).

Where the call mixes indices, it is a clause with the reason. An int stands for an axis of as many entries an index
as the arguments have.
"""

VmapRule: TypeAlias = Callable[[Vmap, relax.Call, list[relax.Expr], list[bool]], relax.Expr]
"""rule(vmap, call for one index, arguments for all, which of them are mapped) -> the expression for all indices.

A call that is not bound yet (`vmap.call`) is checked by the axis rule of its operator, and bound then. What is bound
already, or a literal tuple of that, must have the mapped axis in front.
"""

SumRule: TypeAlias = Callable[[relax.Call, Axes], "Summed | None"]
"""rule(call, axes) -> the terms of a call that sums over the mapped axis; None if it does not."""

Legalization: TypeAlias = Callable[[relax.BlockBuilder, relax.Call], relax.Expr]
"""TVM's FLegalize."""

LegalizationRule: TypeAlias = Callable[[Legalization], Legalization]
"""rule(stock) -> legalization; `stock` is what TVM has registered (None for an operator of ours), for other calls."""


StockFails: TypeAlias = Callable[[relax.Call], str]
"""reason(call) -> why TVM's own gradient of this call raises or is wrong; "" where it is right."""


@dataclass(frozen=True)
class OperatorRules:
    """All rules of one operator, or of several that share them. A rule that is None is TVM's own, or there is none.

    Where TVM has a rule of its own, the one here is in force inside `tvm_convgrad.rules()` only. Outside, it takes the
    place of a gradient that `stock_fails` finds wrong, and the lowering of convolutions; see relax_ops.dispatch.

    Attributes:
        names: of the operators, as TVM has them: "relax.reshape".
        gradient: reverse-mode differentiation.
        layout: how layouts pass through the operator (ConvertLayout).
        mapped_axis: where the axis of a vmap, or of the samples of a batch, is in the result.
        vmap: the call for all indices of a vmap.
        sums: the terms, where the operator sums over the samples.
        linear: sets of arguments in which it is linear together, the other ones being fixed: sums over the samples in
            these arguments go through it term by term, by the rule `vmap`.
        linear_if: for which calls `linear` holds; None for all.
        isometric: whether it leaves the sum of squares of its argument as it is.
        legalize: lowering to TIR functions or other operators.
        stock_fails: for which calls TVM's own gradient raises or is wrong, with the reason.
        always: whether layout and legalization here replace TVM's outside of `tvm_convgrad.rules()`, too.
        declare: registers the operator itself, where it is not TVM's; called before anything is registered for it.
    """

    names: tuple[str, ...]
    gradient: GradientRule | None = None
    layout: LayoutRule | None = None
    mapped_axis: AxisRule | None = None
    vmap: VmapRule | None = None
    sums: SumRule | None = None
    linear: tuple[tuple[int, ...], ...] = ()
    linear_if: Callable[[relax.Call], bool] | None = None
    isometric: bool = False
    legalize: LegalizationRule | None = None
    stock_fails: StockFails | None = None
    always: bool = False
    declare: Callable[[], None] | None = None


def named(*names: str) -> tuple[str, ...]:
    """Names of Relax operators from what stands behind `relax.`."""
    return tuple(f"relax.{name}" for name in names)


def on_gpus(own: Legalization, covers: Callable[[relax.Call], bool]) -> LegalizationRule:
    """The rule `legalize` of a lowering that is `own` for what it covers on GPUs, and the stock one elsewhere."""

    def wrapped(stock: Legalization) -> Legalization:
        def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
            return (own if lowers_for_gpu() and covers(call) else stock)(block_builder, call)

        legalize.__doc__ = own.__doc__
        return legalize

    return wrapped
