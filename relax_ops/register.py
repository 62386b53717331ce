# SPDX-License-Identifier: Apache-2.0
"""Puts everything of this package into the TVM in use: operators, gradients, legalizations, layout rules, errors."""

from __future__ import annotations

import tvm_ffi

from tvm_convgrad import errors

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
    # Python exceptions keep their class through TVM's C++ only if it knows their names.
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, errors.ConvGradError):
            tvm_ffi.register_error(value.__name__, value)
    import tvm

    from relax_ops.gradients import register_gradients
    from relax_ops.lowering import LEGALIZATIONS
    from relax_ops.ops import LEVEL, register_ops

    register_ops()
    register_gradients()

    from relax_ops.layout import LAYOUT_RULES  # looks up operators that the lines above declare
    from relax_ops.layouts.site import RULE
    from relax_ops.lowering_extrema import LEGALIZATIONS as EXTREMA_LEGALIZATIONS
    from relax_ops.lowering_pool import legalizations as pool_legalizations
    from relax_ops.lowering_stock import LEGALIZATIONS as STOCK_LEGALIZATIONS

    for name, function in LAYOUT_RULES.items():
        tvm.ir.register_op_attr(name, RULE, function, LEVEL)
    for name, function in {**LEGALIZATIONS, **STOCK_LEGALIZATIONS, **EXTREMA_LEGALIZATIONS}.items():
        tvm.ir.register_op_attr(name, "FLegalize", function, LEVEL)
    for name, pool_legalization in pool_legalizations().items():
        tvm.ir.register_op_attr(name, "FLegalize", pool_legalization, LEVEL + 1)
    _done = True


def _check_tvm() -> None:
    import tvm

    if not hasattr(tvm, "relax") or not hasattr(tvm.relax, "TensorType"):
        raise errors.SetupError(
            f"tvm-convgrad needs apache-tvm 0.26 or 0.27; TVM {tvm.__version__} has another Relax vocabulary: "
            f"pip install 'apache-tvm>=0.26,<0.28' 'apache-tvm-ffi>=0.1.13.post2,<0.1.15'"
        )
