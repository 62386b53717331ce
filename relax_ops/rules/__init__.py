# SPDX-License-Identifier: Apache-2.0
"""All rules of Relax operators: one file for an operator, or for a few that share their rules.

Each file has gradient, layout, vmap, per-sample rule and legalization beside each other, in a tuple `RULES` of
`OperatorRules` (see relax_ops.rules.contract). Adding an operator is adding one file here; nothing else names it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType

import tvm
from tvm import relax

from relax_ops.rules.contract import OperatorRules
from relax_ops.vmap.mapped_axis import Axes, MappedAxis, Unknown
from tvm_convgrad.core.errors import SetupError

_CONTRACT = "contract"


@cache
def operator_rules() -> Mapping[str, OperatorRules]:
    """The rules of every operator by its name, of the files in the order of their names.

    Raises:
        SetupError: a file has no RULES, or two claim one operator.
    """
    names = sorted(module.name for module in pkgutil.iter_modules(__path__) if module.name != _CONTRACT)
    return merged([importlib.import_module(f"{__name__}.{name}") for name in names])


def missing_operators() -> list[str]:
    """Operators with rules that the TVM in use does not have; nothing is registered for them."""
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    return [name for name in operator_rules() if name not in known]


def rules_of(call: relax.Call) -> OperatorRules | None:
    """The rules of the operator that is called; None if there are none, or if a function is called."""
    return operator_rules().get(str(call.op.name)) if isinstance(call.op, tvm.ir.Op) else None


def mapped_axis(call: relax.Call, axes: Axes) -> MappedAxis | str:
    """Where the mapped axis is in the value of a call, or why it is nowhere."""
    rules = rules_of(call)
    if rules is None or rules.mapped_axis is None:
        return Unknown("what it does to the samples is not known")
    found = rules.mapped_axis(call, axes)
    return axes.at(found) if isinstance(found, int) else found


def merged(modules: Sequence[ModuleType]) -> dict[str, OperatorRules]:
    """The tables of these files as one, by operator.

    Raises:
        SetupError: a file has no RULES, or two claim one operator.
    """
    found: dict[str, OperatorRules] = {}
    owner: dict[str, str] = {}
    for module in modules:
        if not hasattr(module, "RULES"):
            raise SetupError(
                f"{module.__name__} has no RULES; every file of relax_ops/rules defines a tuple RULES of OperatorRules"
            )
        for rules in module.RULES:
            for name in rules.names:
                if name in found:
                    raise SetupError(
                        f"RULES of {module.__name__} and of {owner[name]} both claim {name}; "
                        "an operator has its rules in one file: remove one of the two."
                    )
                found[name], owner[name] = rules, module.__name__
    return found
