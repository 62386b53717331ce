# SPDX-License-Identifier: Apache-2.0
"""Models that fix a batch in one of their shapes: freed of it where that is certain, refused by name elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.training.harness import Runner
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

onnx = pytest.importorskip("onnx")
from tvm_convgrad.training.frontends.onnx.batch import fixed_shapes  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402

EXPORTED = 16
RNG = np.random.default_rng(0)
WEIGHT = RNG.standard_normal((8, 3, 3, 3)).astype("float32")


def proto(*nodes, batch=EXPORTED, inputs=(), **constants):
    """A convolution of x to `p`, [batch, 8, 1, 1], and the nodes behind it; the last one's result is the output."""
    helper, tensors = onnx.helper, onnx.numpy_helper
    made = [helper.make_node("Conv", ["x", "w"], ["c"]), helper.make_node("GlobalAveragePool", ["c"], ["p"])]
    for number, (kind, operands, attributes) in enumerate(nodes):
        operands = ["" if name == "_" else name for name in operands.split()]
        made.append(helper.make_node(kind, operands, [f"y{number}"], f"node{number}", **attributes))
    graph = helper.make_graph(
        made,
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [batch, 3, 5, 4])],
        [helper.make_tensor_value_info(made[-1].output[0], onnx.TensorProto.FLOAT, None)],
        [tensors.from_array(WEIGHT, "w"), *(tensors.from_array(np.array(v), n) for n, v in constants.items())],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


FLATTEN = ("Flatten", "p", {})
FREED = {
    "reshape": proto(("Reshape", "p s", {}), s=[16, 8]),
    "reshape with a free extent": proto(("Reshape", "p s", {}), s=[16, -1]),
    "reshape where zeros are extents": proto(("Reshape", "p s", {"allowzero": 1}), s=[16, 8]),
    "two reshapes": proto(("Reshape", "p s", {}), ("Reshape", "y0 t", {}), s=[16, 2, 4], t=[16, 8]),
    "reshape by joined numbers": proto(
        ("Concat", "b e", {"axis": 0}), ("Reshape", "p y0", {"allowzero": 1}), b=[16], e=[8]
    ),
    "batch of one": proto(("Reshape", "p s", {}), s=[1, 8], batch=1),
    "batch that is a number of channels, too": proto(("Reshape", "p s", {}), s=[8, 8], batch=8),
    "reshape and back": proto(
        ("Reshape", "p s", {}), ("Relu", "y0", {}), ("Reshape", "y1 t", {}), s=[16, -1], t=[-1, 8]
    ),
    "resize": proto(
        ("Resize", "c _ _ s", {}),
        ("GlobalAveragePool", "y0", {}),
        ("Flatten", "y1", {}),
        s=[16, 8, 6, 4],
    ),
}
LSTM = {name: RNG.standard_normal(shape).astype("float32") for name, shape in (("i", (1, 8, 2)), ("r", (1, 8, 2)))}


def merged(batch, heads=2):
    """Keys transposed as torch.onnx.export writes it, windows, and a recurrent layer; all with `batch` in constants."""
    rows = 4 // heads
    return {
        "heads": proto(
            ("Reshape", "p s", {}), ("Reshape", "y0 m", {}), ("Transpose", "y1", {"perm": [0, 2, 1]}),
            ("Reshape", "y2 t", {}), ("MatMul", "y0 y3", {}), ("MatMul", "y4 y0", {}), ("Reshape", "y5 e", {}),
            batch=batch, s=[batch, heads, rows, 2], m=[-1, rows, 2], t=[batch, heads, 2, rows], e=[batch, 8],
        ),
        "windows": proto(
            ("Reshape", "p s", {}), ("Transpose", "y0", {"perm": [0, 2, 1, 3]}), ("Reshape", "y1 m", {}),
            ("Softmax", "y2", {"axis": 1}), ("Reshape", "y3 t", {}), ("Flatten", "y4", {}),
            batch=batch, s=[batch, heads, 2, rows], m=[batch * 2, heads, rows], t=[batch, 2, heads * rows],
        ),
        "batch on axis 1": proto(
            ("Reshape", "p s", {}), ("Transpose", "y0", {"perm": [1, 0, 2]}),
            ("LSTM", "y1 i r _ _ h h", {"hidden_size": 2}), ("Transpose", "y2", {"perm": [0, 2, 1, 3]}),
            ("Reshape", "y3 t", {}), ("Transpose", "y4", {"perm": [1, 0, 2]}), ("Flatten", "y5", {}),
            batch=batch, s=[batch, 4, 2], t=[4, batch, 2], h=np.zeros((1, batch, 2), "float32"), **LSTM,
        ),
        "norm expanded": proto(
            FLATTEN, ("ReduceMean", "y0", {"axes": [1]}), ("Expand", "y1 e", {}), ("Mul", "y0 y2", {}),
            batch=batch, e=[batch, 8],
        ),
        "resize between": proto(
            ("Resize", "c _ s", {"mode": "nearest"}), ("GlobalAveragePool", "y0", {}), ("Reshape", "y1 t", {}),
            batch=batch, s=np.array([1, 1, 2, 2], "float32"), t=[batch, 8],
        ),
    }  # fmt: skip


MERGED = {
    f"{name}, batch {batch}, {heads} heads": model
    for batch, heads in ((2, 2), (4, 2), (3, 1))
    for name, model in merged(batch, heads).items()
}
FIXED = {
    "Reshape 'node0' has the constant shape [32, 4]": proto(("Reshape", "p s", {}), s=[32, 4]),
    "Reshape 'node1' has the constant shape [8, 16]": proto(
        ("Transpose", "p", {"perm": [1, 0, 2, 3]}), ("Reshape", "y0 s", {}), s=[8, 16]
    ),
    "ConstantOfShape 'node1' has the constant shape [16, 8]": proto(
        FLATTEN, ("ConstantOfShape", "s", {}), ("Add", "y0 y1", {}), s=[16, 8]
    ),
    "Add 'node1' has the operand 't' of the constant shape [16, 8]": proto(
        FLATTEN, ("Add", "y0 t", {}), t=np.ones((16, 8), "float32")
    ),
    "Concat 'node1' has the operand 't' of the constant shape [16, 2]": proto(
        FLATTEN, ("Concat", "t y0", {"axis": 1}), t=np.ones((16, 2), "float32")
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FREED)
@pytest.mark.parametrize(("batch", "extent"), [("dynamic", "n"), (5, 5), (None, None)])
def test_reshapes_are_freed(name, batch, extent):
    model = from_onnx(FREED[name], batch=batch)
    stored = FREED[name].graph.input[0].type.tensor_type.shape.dim[0].dim_value
    assert build_step(model).prediction.shape == (extent or stored, 8)


def test_freed_reshapes_compute_the_same():
    x = RNG.standard_normal((EXPORTED, 3, 5, 4)).astype("float32")
    free = Runner(build_step(from_onnx(FREED["two reshapes"], batch="dynamic")))
    whole = Runner(build_step(from_onnx(FREED["two reshapes"]))).predict(x)
    for rows in (1, 5, 16):
        assert free.predict(x[:rows]).shape == (rows, 8)
        np.testing.assert_allclose(free.predict(x[:rows]), whole[:rows], rtol=1e-5, atol=1e-6)
    assert free.predict(np.concatenate([x, x])).shape == (32, 8)


@pytest.mark.parametrize("name", MERGED)
def test_axes_merged_with_the_batch_are_freed(name):
    """Also where the batch is equal to other extents; sums of at most some hundred terms, so that ten bits are rest."""
    stored = MERGED[name].graph.input[0].type.tensor_type.shape.dim[0].dim_value
    x = RNG.standard_normal((stored, 3, 5, 4)).astype("float32")
    whole = Runner(build_step(from_onnx(MERGED[name]))).predict(x)
    free = Runner(build_step(from_onnx(MERGED[name], batch="dynamic")))
    np.testing.assert_allclose(free.predict(x), whole, rtol=2.0**-14, atol=2.0**-14)
    many = free.predict(np.concatenate([x[::-1], x, x[:1]]))
    np.testing.assert_allclose(many, [*whole[::-1], *whole, whole[0]], rtol=2.0**-14, atol=2.0**-14)


TOKEN = {"t": np.array([[0.5, 2]], "float32"), "e": [2, 2]}


def test_rows_expanded_to_the_batch_are_freed():
    for join in (("Concat", "y1 y0", {"axis": 1}), ("Concat", "y0 y1", {"axis": -1})):
        token = proto(FLATTEN, ("Expand", "t e", {}), join, batch=2, **TOKEN)
        free = Runner(build_step(from_onnx(token, batch="dynamic")))
        x = RNG.standard_normal((5, 3, 5, 4)).astype("float32")
        found = free.predict(x)[:, :2] if join[1] == "y1 y0" else free.predict(x)[:, 8:]
        np.testing.assert_array_equal(found, np.repeat(TOKEN["t"], 5, 0))


def test_rows_expanded_to_what_may_be_no_batch_stay():
    """Two directions, of which the sum is taken, are as many as samples."""
    nodes = [FLATTEN, ("Expand", "t e", {}), ("ReduceSum", "y1 a", {}), ("Concat", "y0 y2", {"axis": 0})]
    token = proto(*nodes, batch=2, **{**TOKEN, "t": np.ones((1, 8), "float32"), "e": [2, 8]}, a=[0])
    with pytest.raises(ModelError, match=r"Expand 'node1' has the constant shape \[2, 8\]"):
        from_onnx(token, batch="dynamic")


def test_of_one_sample_axes_are_not_taken_for_its_batch():
    """[1, 8, 1, 1] to [8, 1] may leave the sample away, or take its channels as samples."""
    model = proto(
        ("Reshape", "p s", {}), ("Softmax", "y0", {"axis": 0}), ("Reshape", "y1 t", {}), s=[8, 1], t=[1, 8], batch=1
    )
    with pytest.raises(ModelError, match=r"Reshape 'node0' has the constant shape \[8, 1\]"):
        from_onnx(model, batch="dynamic")


def test_resizes_to_sizes_with_the_batch():
    """TVM's importer reads all sizes as numbers; the batch among them counts nowhere."""
    for batch in ("N", EXPORTED):
        sized = proto(
            ("Shape", "c", {"start": 0, "end": 2}), ("Concat", "y0 t", {"axis": 0}), ("Resize", "c _ _ y1", {}),
            ("GlobalAveragePool", "y2", {}), ("Flatten", "y3", {}), t=[6, 4], batch=batch,
        )  # fmt: skip
        assert build_step(from_onnx(sized, batch="dynamic")).prediction.shape[1:] == (8,)
        assert build_step(from_onnx(sized, batch=3)).prediction.shape == (3, 8)


def test_shapes_that_are_computed_from_a_constant():
    """As of x.expand(16, -1) from PyTorch: Where(shape == -1, 1, shape)."""
    constants = [
        ("Constant", "", {"value": onnx.numpy_helper.from_array(np.array(value), "c")})
        for value in ([16, -1], [-1, -1], [1, 1])
    ]
    computed = [("Equal", "y0 y1", {}), ("Where", "y3 y2 y0", {}), ("Expand", "t y4", {})]
    last = [FLATTEN, ("Concat", "y6 y5", {"axis": 1})]
    token = proto(*constants, *computed, *last, t=np.ones((1, 2), "float32"))
    for batch in ("dynamic", 5):
        with pytest.raises(ModelError) as caught:
            from_onnx(token, batch=batch)
        assert "reads the constant shape [16, -1]" in str(caught.value)
    assert build_step(from_onnx(token)).prediction.shape == (16, 10)


@pytest.mark.parametrize("node", FIXED)
@pytest.mark.parametrize(("batch", "shown"), [("dynamic", "any batch"), (7, "batch 7")])
def test_other_nodes_are_refused_by_name(node, batch, shown):
    with pytest.raises(ModelError) as caught:
        from_onnx(FIXED[node], batch=batch, source="net.onnx")
    message = str(caught.value)
    assert node in message
    assert f"net.onnx cannot be built for {shown}, since its graph fixes the batch" in message
    assert "dynamic_axes={'x': {0: 'n'}}" in message


def test_predictions_without_elements_are_refused():
    empty = proto(FLATTEN, ("Slice", "y0 b e a", {}), b=[8], e=[9], a=[1])
    with pytest.raises(ModelError, match=r"its predictions are \[16, 0\] and have no elements"):
        from_onnx(empty)


def test_what_is_fixed_is_no_fault_at_the_batch_of_the_export():
    for node in ("Add 'node1' has the operand 't' of the constant shape [16, 8]", next(reversed(FIXED))):
        for batch in (None, EXPORTED):
            assert from_onnx(FIXED[node], batch=batch).inputs[0].shape[0] == EXPORTED


@pytest.mark.parametrize("batch", [None, "dynamic", 5])
def test_other_failures_are_not_put_down_to_the_batch(batch):
    """Scales and sizes at once are wrong at any batch."""
    wrong = proto(("Resize", "c _ e s", {}), s=[16, 8, 6, 4], e=np.ones(4, "float32"))
    with pytest.raises(ModelError, match=r"Resize .'node0'.: both its scales and its sizes are given"):
        from_onnx(wrong, batch=batch)


def test_slices_of_the_batch():
    sliced = proto(FLATTEN, ("Slice", "y0 b e a", {}), b=[0], e=[16], a=[0])
    with pytest.raises(ModelError, match="Slice 'node1' has the constant end 16 on axis 0"):
        from_onnx(sliced, batch="dynamic")
    added = proto(FLATTEN, ("Slice", "y0 b e a", {}), ("Add", "y0 y1", {}), b=[0], e=[16], a=[0])
    with pytest.raises(ModelError, match="Slice 'node1' has the constant end 16 on axis 0"):
        from_onnx(added, batch="dynamic")


@pytest.mark.parametrize("batch", [None, "dynamic", 5])
def test_fixed_shapes_behind_a_symbolic_batch(batch):
    """Such as those of an exporter that was told of the dynamic axis, and traced a number."""
    with pytest.raises(ModelError, match=r"Reshape 'node0' has the constant shape \[16, 8\]"):
        from_onnx(proto(("Reshape", "p s", {}), s=[16, 8], batch="N"), batch=batch)
    mixed = proto(("Reshape", "p s", {}), ("Relu", "y0", {}), ("Reshape", "y1 t", {}), s=[16, 8], t=[-1, 8], batch="N")
    with pytest.raises(ModelError, match=r"Reshape 'node0' has the constant shape \[16, 8\]"):
        from_onnx(mixed, batch=batch)


def test_a_free_reshape_is_not_named_for_what_fails_behind_it():
    """[1, -1, 4] merges the batch with an axis, as PyTorch's instance norm does, and takes any."""
    other = proto(("Reshape", "p s", {}), ("Tile", "y0 t", {}), s=[1, -1, 4], t=[1, 2, 1], batch="N")
    assert fixed_shapes(other) == []
    assert "[1, -1, 4]" in fixed_shapes(proto(("Reshape", "p s", {}), s=[1, -1, 4]))[0]


def relax_model(body, batch="n"):
    extent = tvm.tirx.Var(batch, "int64") if isinstance(batch, str) else batch
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((extent, 8), "float32"))
    weight = relax.Var("weight", relax.TensorType((8, 3), "float32"))
    with builder.function("main", [x, weight]):
        with builder.dataflow():
            output = builder.emit_output(body(builder, builder.emit(relax.op.matmul(x, weight)), extent))
        builder.emit_func_output(output)
    return builder.get()


ONES = relax.const(np.ones((16, 3), "float32"))
BODIES = {
    "reshape": lambda b, y, n: relax.op.reshape(y, (16, 3)),
    "reshape and back": lambda b, y, n: relax.op.reshape(b.emit(relax.op.reshape(y, (16, 3))), (n, 3)),
    "broadcast": lambda b, y, n: relax.op.broadcast_to(b.emit(relax.op.mean(y, [0], keepdims=True)), (16, 3)),
    "slice": lambda b, y, n: relax.op.strided_slice(y, [0], [0], [16]),
    "rows by two": lambda b, y, n: relax.op.reshape(b.emit(relax.op.concat([y, y], 1)), (n * 2, 3)),
}


@pytest.mark.parametrize("name", BODIES)
def test_relax_modules_with_a_fixed_batch(name, capfd):
    with pytest.raises(ModelError, match="batch"):
        from_module(relax_model(BODIES[name]))
    assert capfd.readouterr().err == ""


def test_relax_modules_without_a_batch():
    with pytest.raises(ModelError, match="its predictions are a scalar"):
        from_module(relax_model(lambda b, y, n: relax.op.mean(y)))
    with pytest.raises(ModelError, match=r"batch of its inputs is 4, but its predictions are \[3, 4\]"):
        from_module(relax_model(lambda b, y, n: relax.op.permute_dims(y), batch=4))


def test_pt2_with_a_fixed_batch():
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.fc(x).reshape(x.shape[0], 3)

    program = torch.export.export(Net(), (torch.zeros(16, 8),))
    for batch in ("dynamic", 8):
        with pytest.raises(ModelError, match="fixed batch 16"):
            from_exported_program(program, batch=batch)
    free = torch.export.export(Net(), (torch.zeros(16, 8),), dynamic_shapes=({0: torch.export.Dim("n")},))
    step = build_step(from_exported_program(free, batch="dynamic"))
    assert step.prediction.shape == (step.inputs[0].shape[0], 3)
    assert isinstance(step.inputs[0].shape[0], str)
