# SPDX-License-Identifier: Apache-2.0
"""What is registered for an operator: its rule, or a dispatcher between it and the rule that TVM has.

`registrations` gives the functions to register; `overridden` is what `convgrad env` shows of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import tvm
from tvm import relax

from relax_ops.active import rules_active
from relax_ops.layouts.site import LayoutFunction, layout_rule, stored_as_written
from relax_ops.rules.contract import GradientRule, Legalization, OperatorRules
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.switches import GRADIENTS, VARIABLE, disabled

GRADIENT, LAYOUT, LEGALIZE = "FPrimalGradient", "FRelaxInferLayout", "FLegalize"

INSTALLED, WHERE_STOCK_FAILS, INSIDE_RULES = "installed", "where TVM's own fails", "inside tvm_convgrad.rules()"
"""When a rule of this package is in force."""


@dataclass(frozen=True)
class Registration:
    """One attribute of one operator.

    Attributes:
        operator, attribute: where it is registered.
        function: what is registered.
        over_stock: whether TVM has such a rule.
        in_force: INSTALLED, WHERE_STOCK_FAILS or INSIDE_RULES.
    """

    operator: str
    attribute: str
    function: Callable[..., object]
    over_stock: bool
    in_force: str


_registered: list[Registration] = []


def registrations(name: str, rules: OperatorRules) -> list[Registration]:
    """What is to be registered for an operator; remembered for `overridden`."""
    operator = tvm.ir.Op.get(name)
    found = []
    if rules.gradient is not None:
        found.append(_gradient(name, rules, rules.gradient, operator.get_attr(GRADIENT)))
    if rules.layout is not None:
        found.append(_layout(name, rules, operator.get_attr(LAYOUT)))
    if rules.legalize is not None:
        found.append(_legalize(name, rules, operator.get_attr(LEGALIZE)))
    _registered.extend(found)
    return found


def overridden() -> list[Registration]:
    """What this package has registered in TVM, in the order of the rules' files; empty before it is registered."""
    return list(_registered)


def _gradient(name: str, rules: OperatorRules, own: GradientRule, stock: GradientRule | None) -> Registration:
    """The operators of this package are its own matter; of TVM's it serves what TVM refuses or gets wrong."""
    if rules.declare is not None:
        return Registration(name, GRADIENT, own, False, INSTALLED)
    off, fails = disabled(GRADIENTS), rules.stock_fails

    def gradient(
        orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
    ) -> list[relax.Expr]:
        chosen = own
        if not rules_active():
            if stock is None and off:
                raise UnsupportedError(
                    f"{name}: TVM has no gradient of it, and {VARIABLE} turns that of tvm-convgrad off; unset it, or "
                    "differentiate inside tvm_convgrad.rules()."
                )
            if stock is not None and (off or fails is None or not fails(orig_call)):
                chosen = stock
        return chosen(orig_var, orig_call, output_grad, ctx)

    if stock is None:
        return Registration(name, GRADIENT, gradient, False, INSIDE_RULES if off else INSTALLED)
    return Registration(name, GRADIENT, gradient, True, INSIDE_RULES if off or not fails else WHERE_STOCK_FAILS)


def _layout(name: str, rules: OperatorRules, stock: LayoutFunction | None) -> Registration:
    """Outside of `rules()` a program is converted as TVM converts it: where it has no rule, calls stay as written."""
    assert rules.layout is not None
    own = layout_rule(rules.layout, stock)
    if rules.declare is not None or rules.always:
        return Registration(name, LAYOUT, own, stock is not None, INSTALLED)
    otherwise = stock or stored_as_written

    def infer_layout(call: relax.Call, desired: object, layouts: object) -> object:
        return (own if rules_active() else otherwise)(call, desired, layouts)

    return Registration(name, LAYOUT, infer_layout, stock is not None, INSIDE_RULES)


def _legalize(name: str, rules: OperatorRules, stock: Legalization | None) -> Registration:
    assert rules.legalize is not None
    own = rules.legalize(cast(Legalization, stock))  # a rule of an operator that TVM does not lower takes None
    if stock is None or rules.always:
        return Registration(name, LEGALIZE, own, stock is not None, INSTALLED)

    def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
        return (own if rules_active() else stock)(builder, call)

    return Registration(name, LEGALIZE, legalize, True, INSIDE_RULES)
