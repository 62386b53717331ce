# SPDX-License-Identifier: Apache-2.0
"""Simplification of transposes: fewer, never another value."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax import op

from relax_ops.passes.layout import ConvertLayout, SimplifyTransposes
from tests.layout.models import calls, run

CYCLE = [0, 2, 3, 1]
BACK = [0, 3, 1, 2]


def module_of(shape, make, dtype="float32"):
    x = relax.Var("x", relax.TensorType(shape, dtype))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            outputs = [builder.emit_output(output) for output in make(builder, x)]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get()


def permute(builder, x, axes=None):
    return builder.emit(op.permute_dims(x, axes))


CASES = {
    "identity": ((2, 3, 4, 5), lambda b, x: [permute(b, x, [0, 1, 2, 3])], 0),
    "pair": ((2, 3, 4, 5), lambda b, x: [permute(b, permute(b, x, CYCLE), BACK)], 0),
    "chain": ((2, 3, 4, 5), lambda b, x: [permute(b, permute(b, permute(b, x, CYCLE)), [1, 0, 2, -1])], 1),
    "twice": ((2, 3, 4, 5), lambda b, x: [op.add(permute(b, x, CYCLE), permute(b, x, CYCLE)), op.exp(x)], 1),
    "kept": ((2, 3, 4, 5), lambda b, x: [permute(b, x, CYCLE), permute(b, x, BACK)], 2),
    "ones": ((2, 1, 4, 1), lambda b, x: [permute(b, x, [1, 0, 3, 2])], 0),
    "swapped": ((2, 1, 4, 1), lambda b, x: [permute(b, x, [2, 1, 0, 3])], 1),
    "constant": ((3,), lambda b, x: [op.add(x, permute(b, relax.const(np.arange(6.0, dtype="f4").reshape(3, 2))))], 0),
    "zeros": ((2, 3), lambda b, x: [op.add(x, permute(b, b.emit(op.zeros((3, 2), "float32"))))], 0),
    "ones_made": ((2, 3), lambda b, x: [op.add(x, permute(b, b.emit(op.ones((3, 2), "float32"))))], 0),
    "spread": ((), lambda b, x: [permute(b, b.emit(op.broadcast_to(x, (2, 3))))], 0),
    "not_spread": ((3,), lambda b, x: [permute(b, b.emit(op.broadcast_to(x, (2, 3))))], 1),
}
FIXED_SHAPES = {"constant": (2, 3)}


@pytest.mark.parametrize("name", CASES)
def test_count_and_value(name):
    shape, make, count = CASES[name]
    module = module_of(FIXED_SHAPES.get(name, shape), make)
    simple = SimplifyTransposes()(module)
    assert len(calls(simple, "main", "permute_dims")) == count
    x = np.random.default_rng(0).integers(-5, 6, FIXED_SHAPES.get(name, shape)).astype("float32")
    for have, want in zip(run(simple, "main", [x]), run(module, "main", [x]), strict=True):
        np.testing.assert_array_equal(have, want)


def test_symbolic_extents_are_not_taken_for_one():
    n = tvm.tirx.Var("n", "int64")
    module = SimplifyTransposes()(
        module_of((n, 1, 3), lambda b, x: [permute(b, x, [1, 0, 2]), permute(b, x, [2, 1, 0])])
    )
    assert len(calls(module, "main", "permute_dims")) == 1
    assert len(calls(module, "main", "reshape")) == 1


def test_what_another_block_binds_is_left_alone():
    x = relax.Var("x", relax.TensorType((2, 3, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        with builder.dataflow():
            inner = builder.emit(op.exp(x))
            first = builder.emit_output(op.permute_dims(inner, [1, 2, 0]))
        size = builder.emit(op.tensor_to_shape(op.shape_to_tensor(relax.ShapeExpr([2, 3, 4]))))
        with builder.dataflow():
            second = builder.emit_output(op.permute_dims(first, [2, 0, 1]))
        builder.emit_func_output(relax.Tuple([second, size]))
    simple = SimplifyTransposes()(builder.get())
    relax.analysis.well_formed(simple)  # raises if it is not
    assert len(calls(simple, "main", "permute_dims")) == 2


def test_functions_without_transposes_stay():
    module = module_of((2, 3), lambda b, x: [op.exp(x)])
    tvm.ir.assert_structural_equal(SimplifyTransposes()(module), module)


def test_tuple_parameters_are_read_in_the_dataflow_block():
    """Conversion takes the fields out of the block meanwhile, as ConvertLayout is slow on them."""
    tensors = [relax.TensorType((2, 3, 4, 5), "float32"), relax.TensorType((6, 3, 1, 2), "float32")]
    state = relax.Var("state", relax.TupleType(tensors))
    builder = relax.BlockBuilder()
    with builder.function("main", [state]):
        with builder.dataflow():
            x, w = (builder.emit(relax.TupleGetItem(state, i)) for i in range(2))
            y = builder.emit(op.nn.conv2d(x, w))
            outputs = [builder.emit_output(y), builder.emit_output(op.negative(x))]
        builder.emit_func_output(relax.Tuple([*outputs, state]))
    module = ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]})(builder.get())
    relax.analysis.well_formed(module)
    (block,) = module["main"].body.blocks
    assert isinstance(block, relax.DataflowBlock)
    assert len(calls(module, "main", "permute_dims")) == 3
