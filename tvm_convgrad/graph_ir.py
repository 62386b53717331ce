# SPDX-License-Identifier: Apache-2.0
"""Which of TVM's two graph IRs is in use, Relax or Relay, and whether operands are expressions of it."""

from __future__ import annotations

import tvm

from tvm_convgrad import register
from tvm_convgrad.core.errors import SetupError, UnsupportedError


def checked_ir(name: str, *operands: object) -> str:
    """ "Relay" or "Relax", whose expressions all operands are; registers the operators.

    Args:
        name: the function that messages name.

    Raises:
        SetupError: this TVM has neither.
        UnsupportedError: an operand is not an expression of its IR.
    """
    ir = "Relay" if hasattr(tvm, "relay") else "Relax"
    if not hasattr(tvm, ir.lower()):
        raise SetupError(f"{name}: TVM {tvm.__version__} has no Relax; install 'apache-tvm>=0.26,<0.28'")
    for operand in operands:
        if not isinstance(operand, getattr(tvm, ir.lower()).Expr):
            raise UnsupportedError(
                f"{name}: the operands must be {ir} expressions, not {type(operand).__name__}; for numpy arrays "
                f"there is tvm_convgrad.evaluate({name!r}, ...)"
            )
    register()
    return ir
