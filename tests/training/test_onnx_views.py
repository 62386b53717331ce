# SPDX-License-Identifier: Apache-2.0
"""Gathers that torch.onnx.export writes for views by strides become reshapes where they are, with a free batch, too."""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.frontends.onnx.views import with_reshapes  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402


def view(batch, strides, pixels=1, note=True):
    """The mean of (batch, 4, 6, pixels) over axis 2, as aten.as_strided of size (batch, 4, 1, 1) with some strides."""
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
    net (float[{batch},4,6,{pixels}] x) => (float[{batch},4,1,1] y) <float[{batch},4,1,{pixels}] mean>
    {{
        scaled = Mul(x, scale)
        mean = ReduceMean<keepdims=1>(scaled, axis)
        line = Reshape(mean, flat)
        all = Shape(x)
        n = Gather(all, zero)
        range = Range(zero, n, one)
        starts = Mul(range, rows)
        column = Unsqueeze(starts, last)
        matrix = Add(column, channels)
        places = Reshape(matrix, shape)
        y = Gather(line, places)
    }}"""
    proto = onnx.parser.parse_model(text)
    values = {"axis": [2], "flat": [-1], "zero": 0, "one": 1, "rows": strides[0], "last": [1], "shape": [-1, 4, 1, 1]}
    values["channels"] = [strides[1] * channel for channel in range(4)]
    tensors = [onnx.numpy_helper.from_array(np.array(value, "int64"), name) for name, value in values.items()]
    scale = onnx.numpy_helper.from_array(np.full((4, 1, 1), 0.5, "float32"), "scale")
    proto.graph.initializer.extend([*tensors, scale])
    found = proto.graph.node[-1]
    if note:
        size = "%n" if isinstance(batch, str) else str(batch)
        value = (
            f"%y : [...] = call_function[target=torch.ops.aten.as_strided.default](args = (%mean, [{size}, 4, 1, 1], "
        )
        value += f"[{', '.join(map(str, strides))}]), kwargs = {{}})"
        found.metadata_props.add(key="pkg.torch.onnx.fx_node", value=value)
    return proto


@pytest.mark.parametrize("batch", ["n", 3])
@pytest.mark.parametrize("strides", [(4, 1, 4, 4), (4, 1, 1, 1), (4, 1, 0, 7)], ids=str)
def test_a_contiguous_view_is_a_reshape(batch, strides) -> None:
    proto = view(batch, strides)
    found = with_reshapes(proto)
    assert [node.op_type for node in found.graph.node] == ["Mul", "ReduceMean", "Reshape"]
    onnx.checker.check_model(found, full_check=True)
    x = np.random.default_rng(0).standard_normal((3, 4, 6, 1)).astype("float32")
    before, after = (ReferenceEvaluator(each).run(None, {"x": x})[0] for each in (proto, found))
    np.testing.assert_array_equal(after, before)
    from_onnx(proto)


@pytest.mark.parametrize(
    "proto",
    [
        view("n", (4, 1, 4, 4), note=False),
        view("n", (2, 1, 1, 1)),  # rows overlap
        view("n", (1, 3, 1, 1)),  # transposed
        view("n", (4, 1, 1, 1), pixels=2),  # half of the elements
    ],
    ids=["without a note", "overlapping", "transposed", "a part"],
)
def test_other_gathers_stay(proto) -> None:
    assert with_reshapes(proto) is proto
    with pytest.raises(ModelError, match="Range"):
        from_onnx(proto)


def test_nodes_with_graphs_inside_keep_what_they_read() -> None:
    """The branches of an If read values of the graph around it by name."""
    proto = view("n", (4, 1, 4, 4))
    value = helper.make_tensor_value_info("z", onnx.TensorProto.FLOAT, None)
    branch = helper.make_graph([helper.make_node("Identity", ["line"], ["z"])], "branch", [], [value])
    condition = onnx.numpy_helper.from_array(np.array(True), "condition")
    proto.graph.initializer.append(condition)
    proto.graph.node.append(helper.make_node("If", ["condition"], ["w"], then_branch=branch, else_branch=branch))
    proto.graph.output.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, [None]))
    found = with_reshapes(proto)
    assert [node.op_type for node in found.graph.node].count("Reshape") == 3
    x = np.ones((3, 4, 6, 1), "float32")
    for before, after in zip(*(ReferenceEvaluator(each).run(None, {"x": x}) for each in (proto, found)), strict=True):
        np.testing.assert_array_equal(after, before)


SIZES = {
    "shape": "first = Shape<start=0, end=1>(x)  sizes = Concat<axis=0>(first, rest)",
    "gather": "all = Shape(x)  n = Gather(all, zero)  first = Unsqueeze(n, axis)  sizes = Concat<axis=0>(first, rest)",
    "slice": "all = Shape(x)  first = Slice(all, begin, end)  sizes = Concat<axis=0>(first, rest)",
    "whole": "first = Shape<start=0, end=2>(x)  last = Shape<start=2>(x)  sizes = Concat<axis=0>(first, last)",
}


def resize(sizes):
    """x pooled by 2 and resized to the extents of x, times a scale."""
    text = f"""<ir_version: 9, opset_import: ["" : 20]>
    net (float[n,2,8,6] x) => (float[n,2,8,6] y) {{
        small = AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)
        {sizes}
        large = Resize<mode="linear">(small, , , sizes)
        y = Mul(large, scale)
    }}"""
    proto = onnx.parser.parse_model(text)
    values = {"zero": 0, "axis": [0], "begin": [0], "end": [1], "rest": [2, 8, 6]}
    tensors = [onnx.numpy_helper.from_array(np.array(value, "int64"), name) for name, value in values.items()]
    scale = onnx.numpy_helper.from_array(np.full((2, 1, 1), 0.5, "float32"), "scale")
    proto.graph.initializer.extend([*tensors, scale])
    return proto


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_sizes_with_a_free_batch(sizes: str) -> None:
    """F.interpolate(size=y.shape[-2:]) exports sizes that begin with the batch."""
    proto = resize(sizes)
    x = np.random.default_rng(0).standard_normal((3, 2, 8, 6), dtype="float32")
    found = Runner(build_step(from_onnx(proto), loss="mse")).predict(x)
    np.testing.assert_allclose(found, ReferenceEvaluator(proto).run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_slices_of_shapes_by_attributes():
    """F.interpolate(y, x.shape[2:]) and x.view(x.shape[0], -1) at opset 9, where Slice has attributes."""
    proto = onnx.parser.parse_model("""<ir_version: 4, opset_import: ["" : 9]>
    net (float[n,2,8,6] x) => (float[n,96] y) {
        small = AveragePool<kernel_shape=[4,2], strides=[4,2]>(x)
        all = Shape(x)
        wanted = Slice<axes=[0], starts=[2], ends=[9223372036854775807]>(all)
        whole = Cast<to=1>(wanted)
        few = Shape(small)
        given = Slice<axes=[0], starts=[-2], ends=[4]>(few)
        parts = Cast<to=1>(given)
        factors = Div(whole, parts)
        ones = Constant<value = float[2] {1.0, 1.0}>()
        scales = Concat<axis=0>(ones, factors)
        large = Upsample<mode="nearest">(small, scales)
        zero = Constant<value = int64 {0}>()
        n = Gather(all, zero)
        first = Unsqueeze<axes=[0]>(n)
        sizes = Concat<axis=0>(first, rest)
        flat = Reshape(large, sizes)
        y = Mul(flat, scale)
    }""")
    values = {"rest": np.array([-1]), "scale": np.full(96, 0.5, "float32")}
    proto.graph.initializer.extend([onnx.numpy_helper.from_array(value, name) for name, value in values.items()])
    x = np.random.default_rng(0).standard_normal((3, 2, 8, 6), dtype="float32")
    found = Runner(build_step(from_onnx(proto), loss="mse")).predict(x)
    np.testing.assert_allclose(found, ReferenceEvaluator(proto).run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_sizes_of_a_sum_with_a_resized_tensor():
    """The batch passes through one resize to the sizes of the next: as in LR-ASPP."""
    proto = resize("first = Shape<start=0, end=1>(x)  sizes = Concat<axis=0>(first, half)")
    more = onnx.parser.parse_graph("""net (float[n,2,8,6] large) => (float[n,2,8,6] y) {
        sum = Add(large, small)
        n2 = Shape<start=0, end=2>(sum)
        whole = Concat<axis=0>(n2, last)
        larger = Resize<mode="linear">(sum, , , whole)
        y = Mul(larger, scale)
    }""")
    del proto.graph.node[-1]
    proto.graph.node.extend(more.node)
    for name, value in (("half", [2, 4, 3]), ("last", [8, 6])):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value, "int64"), name))
    x = np.random.default_rng(0).standard_normal((3, 2, 8, 6), dtype="float32")
    found = Runner(build_step(from_onnx(proto), loss="mse")).predict(x)
    np.testing.assert_allclose(found, ReferenceEvaluator(proto).run(None, {"x": x})[0], rtol=1e-5, atol=1e-6)


def test_resized_tensors_joined_with_others():
    """A decoder (U-Net's): each resize reads the batch of what is joined to the one before."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
    net (float[n,2,8,4] x) => (float[n,4,8,4] y) {
        half = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)
        least = MaxPool<kernel_shape=[2,2], strides=[2,2]>(half)
        n2 = Shape<start=0, end=2>(least)
        sizes = Concat<axis=0>(n2, middle)
        larger = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">
            (least, , , sizes)
        view = Reshape(larger, free)
        joined = Concat<axis=1>(view, half)
        both = Reshape(joined, wide)
        m2 = Shape<start=0, end=2>(both)
        whole = Concat<axis=0>(m2, full)
        largest = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">
            (both, , , whole)
        y = Mul(largest, scale)
    }""")
    scale = np.array([[[1]], [[2]], [[3]], [[-1]]], "float32")
    views = {"free": np.array([-1, 2, 4, 2]), "wide": np.array([-1, 4, 4, 2])}
    for name, value in {"middle": np.array([4, 2]), "full": np.array([8, 4]), "scale": scale, **views}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    x = np.random.default_rng(0).integers(-4, 5, (3, 2, 8, 4)).astype("float32")
    found = Runner(build_step(from_onnx(proto), loss="mse")).predict(x)
    np.testing.assert_array_equal(found, ReferenceEvaluator(proto).run(None, {"x": x})[0])


def test_tables_repeated_for_each_sample():
    """x.repeat(batch, 1, 1, 1) with a free batch; 128 elements, so that the mean of their squares is exact."""
    proto = onnx.parser.parse_model("""<ir_version: 9, opset_import: ["" : 20]>
    net (float[n,2,4,4] x) => (float[n,2,4,4] y) {
        first = Shape<start=0, end=1>(x)
        repeats = Concat<axis=0>(first, one, one, one)
        table = Tile(weight, repeats)
        y = Add(x, table)
    }""")
    weight = np.arange(32, dtype="float32").reshape(1, 2, 4, 4)
    for name, value in (("weight", weight), ("one", np.array([1], "int64"))):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(value, name))
    x = np.random.default_rng(0).integers(-4, 5, (4, 2, 4, 4)).astype("float32")
    runner = Runner(build_step(from_onnx(proto), loss="mse", lr=1.0))
    np.testing.assert_array_equal(runner.predict(x), x + weight)
    runner.step(x, x, lr=float(x.size))
    np.testing.assert_array_equal(runner.named("parameter")["weight"], weight - 2 * 4 * weight)


PLACES = {
    "gather": "all = Shape(x)  extent = Gather(all, one)",
    "slice": "all = Shape(x)  row = Slice(all, axis, end)  extent = Squeeze(row)",
    "end": "row = Shape<start=1, end=2>(x)  extent = Squeeze(row)",
}


@pytest.mark.parametrize("extent", PLACES.values(), ids=PLACES)
def test_places_from_one_extent_of_a_tensor_with_a_free_batch(extent: str) -> None:
    """`out[:, 1:] = y` of torch.onnx.export: the places are a slice of the range of one extent, which is known.

    128 elements, so that the mean of their squares is exact.
    """
    proto = onnx.parser.parse_model(f"""<ir_version: 9, opset_import: ["" : 20]>
    net (float[n,4,4] x) => (float[n,4,4] y) {{
        {extent}
        range = Range(zero, extent, one)
        later = Slice(range, axis, last)
        places = Unsqueeze(later, axis)
        twice = Mul(x, weight)
        data = Transpose<perm=[1,0,2]>(twice)
        before = Transpose<perm=[1,0,2]>(x)
        begin = Slice(before, first, three)
        scaled = Mul(begin, weight)
        written = ScatterND(data, places, scaled)
        y = Transpose<perm=[1,0,2]>(written)
    }}""")
    values = {"zero": 0, "one": 1, "axis": [1], "end": [2], "last": [9], "first": [0], "three": [3]}
    tensors = [onnx.numpy_helper.from_array(np.array(value, "int64"), name) for name, value in values.items()]
    weight = np.array([1, -2, 3, 2], "float32")
    proto.graph.initializer.extend([*tensors, onnx.numpy_helper.from_array(weight, "weight")])
    x = np.random.default_rng(0).integers(-4, 5, (8, 4, 4)).astype("float32")
    runner = Runner(build_step(from_onnx(proto), loss="mse", lr=1.0))
    expected = np.concatenate([x[:, :1] * weight, x[:, :-1] * weight], 1)
    np.testing.assert_array_equal(runner.predict(x), expected)
    runner.step(x, expected, lr=1.0)
    np.testing.assert_array_equal(runner.named("parameter")["weight"], weight)
    runner.step(x, expected - np.eye(4, dtype="float32")[0], lr=float(x.size))
    np.testing.assert_array_equal(
        runner.named("parameter")["weight"],
        weight - 2 * np.array([x[:, :-1, 0].sum() + x[:, 0, 0].sum(), 0, 0, 0], "float32"),
    )
