# SPDX-License-Identifier: Apache-2.0
"""Puts everything of this package into a TVM that has Relay."""

from __future__ import annotations

from tvm_convgrad.core import errors

_done = False


def register_all() -> None:
    """Register once; further calls do nothing.

    Raises:
        SetupError: this TVM has no Relay.
    """
    global _done
    if _done:
        return
    import tvm

    if not hasattr(tvm, "relay"):
        raise errors.SetupError(f"TVM {tvm.__version__} has no Relay; versions up to 0.19 do")
    from relay_ops.ops import LEVEL, register_ops

    for error in errors.FAMILY:
        tvm.error.register_error(error.__name__, error)
    register_ops()

    from relay_ops import cpu_kernels
    from relay_ops.cutlass import register_cutlass
    from relay_ops.fusion import register_fused
    from relay_ops.gradients import GRADIENTS
    from relay_ops.layout import convert_rules, infer_rules
    from relay_ops.layout_stock import stock_convert_rules, stock_infer_rules
    from relay_ops.lowering import legalizations, shape_functions, strategies
    from relay_ops.precision import conversion_rules
    from relay_ops.symbolic import STOCK_SHAPES

    op = tvm.relay.op.op
    tables = (
        (op.register_gradient, GRADIENTS),
        (op.register_legalize, legalizations() | cpu_kernels.legalizations()),
        (op.register_strategy, strategies() | cpu_kernels.strategies()),
        (op.register_infer_correct_layout, infer_rules() | stock_infer_rules()),
        (op.register_convert_op_layout, convert_rules() | stock_convert_rules()),
        (op.register_mixed_precision_conversion, conversion_rules()),
    )
    for register, table in tables:
        for name, value in table.items():
            register(name, value, LEVEL)
    for name, function in (STOCK_SHAPES | shape_functions()).items():
        op.register_shape_func(name, False, function, LEVEL)
    for name in legalizations():
        op.register_pattern(name, op.OpPattern.OUT_ELEMWISE_FUSABLE, LEVEL)
    from relay_ops.partition import register_codegen

    register_codegen()
    register_cutlass()
    register_fused()

    _done = True
