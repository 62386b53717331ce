# SPDX-License-Identifier: Apache-2.0
"""Registering an operator of our own with the TVM in use."""

from __future__ import annotations

from collections.abc import Callable

import tvm
import tvm_ffi
from tvm import relax

LEVEL = 11
"""Above the stock level of 10, so that what is registered here wins."""


def declare_operator(
    name: str, text: str, infer_type: Callable[[relax.Call, relax.BlockBuilder], relax.TensorType]
) -> None:
    """Register a pure operator; repeating is harmless.

    Args:
        name: such as "relax.nn.by_mode".
        text: what it is.
        infer_type: its FInferType.
    """
    if name in tvm.ir.Op.list_op_names():
        return
    tvm_ffi.get_global_func("ir.RegisterOp")(name, text)
    operator = tvm.ir.Op.get(name)
    operator.set_attr("FInferType", infer_type, LEVEL)
    operator.set_attr("FPurity", True, LEVEL)


__all__ = ["LEVEL", "declare_operator"]
