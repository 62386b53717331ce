# SPDX-License-Identifier: Apache-2.0
"""Gradient rules for Relax operators: convolutions first, then what else a CNN's training step needs.

One file for each family; each exposes `GRADIENTS`, a table from operator name to rule.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from tvm_convgrad.errors import SetupError

Rule = Callable[..., Any]
LEVEL = 11  # stock rules sit at 10; the higher level wins
_registered: set[str] = set()


def _families() -> list[Any]:
    """The modules of this package, in the order of their names."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return [importlib.import_module(f"{__name__}.{name}") for name in names]


def all_gradients() -> dict[str, Rule]:
    """Operator name → gradient rule `(orig_var, orig_call, output_grad, builder) -> list of partials`, all families.

    Raises:
        SetupError: two families claim one operator.
    """
    merged: dict[str, Rule] = {}
    owner: dict[str, str] = {}
    for family in _families():
        for name, rule in getattr(family, "GRADIENTS", {}).items():
            if name in merged:
                raise SetupError(
                    f"GRADIENTS of {family.__name__} and of {owner[name]} both claim {name}; "
                    "an operator has one rule: remove one of the two."
                )
            merged[name] = rule
            owner[name] = family.__name__
    return merged


def register_gradients() -> list[str]:
    """Register every rule whose operator this TVM has, above the stock level; repeating is harmless.

    Operators that families add themselves are declared first. Returns the names skipped, as this TVM lacks them.
    """
    for family in _families():
        declare = getattr(family, "declare_ops", None)
        if declare is not None:
            declare()
    from tvm.ir import Op, register_op_attr

    known = {str(name) for name in Op.list_op_names()}
    skipped = []
    for name, rule in all_gradients().items():
        if name not in known:
            skipped.append(name)
        elif name not in _registered:
            register_op_attr(name, "FPrimalGradient", rule, LEVEL)
            _registered.add(name)
    return skipped
