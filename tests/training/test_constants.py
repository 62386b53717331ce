# SPDX-License-Identifier: Apache-2.0
"""Calls of constants are folded by one compilation: the values, what stays, and what is too large to be kept."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.compat import Constant, array_of
from relax_ops.single_run import quick_machine
from tvm_convgrad.training.ir.graph import operator_name
from tvm_convgrad.training.passes.constants import CREATED, FoldConstants

TABLE = np.arange(12, dtype="float32").reshape(3, 4)


def program() -> tvm.IRModule:
    """Constants that are combined, and read by what depends on the input and by the function's result."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((3, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            table = builder.emit(relax.const(TABLE))
            doubled = builder.emit(op.permute_dims(builder.emit(op.multiply(table, relax.const(2.0, "float32")))))
            half = builder.emit(op.astype(doubled, "bfloat16"))
            ones, many = (builder.emit(op.full([extent], relax.const(3.0), "float32")) for extent in (4, CREATED + 1))
            result = builder.emit(op.add(op.add(x, ones), op.permute_dims(op.astype(half, "float32"))))
            unread = builder.emit(op.exp(doubled))
            builder.emit(op.exp(unread))
            outputs = builder.emit_output(relax.Tuple([result, doubled, many]))
        builder.emit_func_output(outputs)
    return relax.transform.LegalizeOps()(builder.get())


def test_values_are_folded() -> None:
    folded = FoldConstants()(program())
    bindings = folded["main"].body.blocks[0].bindings
    constants = [array_of(each.value) for each in bindings if isinstance(each.value, Constant)]
    assert {each.shape for each in constants} == {(3, 4), (4, 3), (4,)}
    calls = [each.value for each in bindings if isinstance(each.value, tvm.ir.Call)]
    calls = [call for call in calls if operator_name(call) == "relax.call_tir"]
    called = [str(call.args[0].name_hint) for call in calls]
    assert sorted(called) == ["add", "add1", "full1"], "exp is not read, and the larger tensor is not kept"
    x = np.ones((3, 4), "float32")
    for module in (program(), folded):
        result, doubled, many = quick_machine(module)["main"](tvm.runtime.tensor(x))
        np.testing.assert_array_equal(result.numpy(), x + 3 + 2 * TABLE)
        np.testing.assert_array_equal(doubled.numpy(), 2 * TABLE.T)
        np.testing.assert_array_equal(many.numpy(), np.full(CREATED + 1, 3, "float32"))


def test_a_program_without_constants_stays_as_it_is() -> None:
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorType((3,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(op.exp(x)))
        builder.emit_func_output(result)
    module = relax.transform.LegalizeOps()(builder.get())
    tvm.ir.assert_structural_equal(FoldConstants()(module), module)
