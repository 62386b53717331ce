# SPDX-License-Identifier: Apache-2.0
"""Puts everything of this package into the TVM in use: errors, operators, and the rules of all operators."""

from __future__ import annotations

import tvm_ffi

from tvm_convgrad.core import errors

_done = False


def register_all() -> None:
    """Register once; further calls do nothing.

    Raises:
        SetupError: this TVM has no Relax, or one of another vocabulary.
    """
    global _done
    if _done:
        return
    _check_tvm()
    if _done:  # importing TVM has just called this function, through the entry point
        return
    for error in errors.FAMILY:
        tvm_ffi.register_error(error.__name__, error)
    _register_rules()
    _done = True


def _register_rules() -> None:
    """Register the rules of all operators that this TVM has, above TVM's own."""
    import tvm  # here, as all modules below need a TVM that `_check_tvm` has accepted

    from relax_ops.declaration import LEVEL
    from relax_ops.dispatch import registrations
    from relax_ops.rules import missing_operators, operator_rules

    table = operator_rules()
    for declare in dict.fromkeys(rules.declare for rules in table.values() if rules.declare is not None):
        declare()
    missing = missing_operators()
    for name, rules in table.items():
        if name in missing:
            continue
        for found in registrations(name, rules):
            tvm.ir.register_op_attr(name, found.attribute, found.function, LEVEL)


def _check_tvm() -> None:
    import tvm

    if not hasattr(tvm, "relax") or not hasattr(tvm.relax, "TensorType"):
        raise errors.SetupError(
            f"tvm-convgrad needs apache-tvm 0.26 or 0.27; TVM {tvm.__version__} has another Relax vocabulary: "
            f"pip install 'apache-tvm>=0.26,<0.28' 'apache-tvm-ffi>=0.1.13.post2,<0.1.15'"
        )
