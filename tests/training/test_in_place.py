# SPDX-License-Identifier: Apache-2.0
"""The state of a step is updated where it lies, and `init` stays as it is."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax, te, topi

from tests.training.harness import Runner
from tests.training.small_models import data, relax_module, weights
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.passes.in_place import overwriting
from tvm_convgrad.training.step.build import build_step

OPAQUE = 8


@pytest.mark.parametrize("settings", [{"optimizer": "sgd", "momentum": 0.9}, {"optimizer": "adamw"}], ids=str)
def test_state_stays_where_it_is(settings):
    runner = Runner(build_step(from_module(relax_module(8), parameters=weights()), lr=0.1, **settings), "native")
    before = [tensor.numpy().copy() for tensor in runner.state]
    places = [np.from_dlpack(tensor).ctypes.data for tensor in runner.state]
    x, labels = data(8)
    first = runner.step(x, labels, lr=0.1)[0]
    for schema, place, tensor, old in zip(runner.step_module.state, places, runner.state, before, strict=True):
        # The small gradient of conv_bias is summed in the same kernel as its update, which is then no walk over lines.
        if schema.role in ("parameter", "optimizer") and len(schema.shape) > 1:
            assert np.from_dlpack(tensor).ctypes.data == place, schema
            assert not np.array_equal(tensor.numpy(), old), schema
    runner.reset()
    for tensor, old in zip(runner.state, before, strict=True):
        np.testing.assert_array_equal(tensor.numpy(), old)
    assert runner.step(x, labels, lr=0.1)[0] == first


def test_lines_in_place_are_not_fused():
    """A small sum in lines looks elementwise to TVM's FuseOps, whose merged functions FuseTIR cannot make."""
    x, y = (te.placeholder((24, 16), "float32", name=name) for name in "xy")
    function = te.create_prim_func([x, y, topi.add(x, y)]).with_attr("op_pattern", OPAQUE)
    builder = relax.BlockBuilder()
    operands = [relax.Var(name, relax.TensorType((24, 16), "float32")) for name in "xy"]
    with builder.function("main", operands):
        with native_target():
            call = overwriting(builder, function, "sum", 1).call(operands, operands[1].ty)
        builder.emit_func_output(builder.emit(call))
    module = relax.transform.AnnotateTIROpPattern()(builder.get())
    assert module["sum_in_place"].attrs["op_pattern"] == OPAQUE
