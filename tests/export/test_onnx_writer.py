# SPDX-License-Identifier: Apache-2.0
"""Trained values in graphs whose exporter merged, transposed, removed or renamed parameters.

The graph that is trained computes with the values what the written file computes, exactly: the data are small integers.
"""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
helper = onnx.helper

from onnx import numpy_helper  # noqa: E402
from onnx.reference import ReferenceEvaluator  # noqa: E402

from tests.training.test_onnx_torch import graph, layer_norm, linear, node  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.export.onnx_writer import Written, with_trained  # noqa: E402
from tvm_convgrad.training.frontends.onnx.prepared import prepared  # noqa: E402

RNG = np.random.default_rng(0)
SQUARE, WIDE = (RNG.integers(-3, 4, shape).astype("float32") for shape in ((6, 6), (6, 4)))
ONES, ZEROS = np.ones(6, "float32"), np.zeros(6, "float32")


def trained_values(proto: onnx.ModelProto, seed: int = 0) -> dict[str, np.ndarray]:
    """Small integers for each float of the graph that is trained, all different from the file's."""
    stages, random = prepared(proto, "net.onnx"), np.random.default_rng(seed)
    constants = stages.exported.constants
    tensors = [tensor for tensor in stages.own.graph.initializer if tensor.data_type == onnx.TensorProto.FLOAT]
    return {
        stages.parameters[tensor.name]: random.integers(4, 9, list(tensor.dims)).astype("float32")
        for tensor in tensors
        if tensor.name not in constants
    }


def check(proto: onnx.ModelProto, values: dict[str, np.ndarray] | None = None) -> Written:
    """Write values into a graph; it computes what the graph that was trained computes with them."""
    values = trained_values(proto) if values is None else values
    before = proto.SerializeToString()
    written = with_trained(proto, values, "net.onnx")
    assert proto.SerializeToString() == before
    onnx.checker.check_model(written.proto, full_check=True)
    assert written.proto.opset_import == proto.opset_import
    stages = prepared(proto, "net.onnx")
    reference = onnx.ModelProto()
    reference.CopyFrom(stages.own)
    for tensor in reference.graph.initializer:
        if stages.parameters[tensor.name] in values:
            tensor.CopyFrom(numpy_helper.from_array(values[stages.parameters[tensor.name]], tensor.name))
    shape = [extent.dim_value for extent in proto.graph.input[0].type.tensor_type.shape.dim]
    x = RNG.integers(-3, 4, shape).astype("float32")
    expected, found = (ReferenceEvaluator(each).run(None, {"x": x})[0] for each in (reference, written.proto))
    np.testing.assert_array_equal(found, expected)
    (unchanged,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert not np.array_equal(found, unchanged)
    return written


def initializers(written: Written) -> dict[str, np.ndarray]:
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in written.proto.graph.initializer}


def identities() -> onnx.ModelProto:
    """What the TorchScript exporter makes of three equal biases."""
    nodes = [
        helper.make_node("Identity", ["a.bias"], ["b.bias"], "i1"),
        helper.make_node("Identity", ["a.bias"], ["c.bias"], "i2"),
        helper.make_node("Add", ["x", "a.bias"], ["y"], "a"),
        helper.make_node("Mul", ["y", "b.bias"], ["z"], "b"),
        helper.make_node("Add", ["z", "c.bias"], ["r"], "c"),
    ]
    return graph(nodes, {"a.bias": ONES})


def test_parameters_that_became_unequal_are_apart() -> None:
    written = check(identities())
    assert sorted(written.added) == ["b.bias", "c.bias"]
    assert written.changed == ["a.bias"]
    assert [each.op_type for each in written.proto.graph.node] == ["Add", "Mul", "Add"]


def test_parameters_that_stayed_equal_stay_merged() -> None:
    values = trained_values(identities())
    written = check(identities(), values | {"c.bias": values["a.bias"]})
    assert (written.changed, written.added) == (["a.bias"], ["b.bias"])
    assert [each.op_type for each in written.proto.graph.node] == ["Identity", "Add", "Mul", "Add"]


def test_only_the_one_that_did_not_move_keeps_the_merged_value() -> None:
    """Frozen a.bias, trained b.bias and c.bias."""
    values = trained_values(identities()) | {"a.bias": ONES}
    assert check(identities(), values).changed == []


def test_equal_scales_of_two_norms() -> None:
    nodes = [layer_norm("x", "y", "a.norm"), layer_norm("y", "z", "b.1.norm")]
    proto = graph(nodes, {"a.norm.weight": ONES, "a.norm.bias": ZEROS})
    values = trained_values(proto)
    written = with_trained(proto, values, "net.onnx")
    found = initializers(written)
    assert found.keys() == values.keys()
    assert all(np.array_equal(found[name], value) for name, value in values.items())


def test_transposed_weights_of_two_layers_in_one() -> None:
    """val_1 is the transposed weight of two layers, val_2 of another one."""
    nodes = [*linear("x", "val_1", "y", "a"), *linear("y", "val_1", "z", "b.fc"), *linear("z", "val_2", "r", "c")]
    stored = {"val_1": SQUARE, "val_2": WIDE, "a.bias": ZEROS, "b.fc.bias": ONES, "c.bias": WIDE[0].copy()}
    proto = graph(nodes, stored, shape=(2, 6), result=(2, 4))
    values = trained_values(proto)
    written = check(proto)
    found = initializers(written)
    np.testing.assert_array_equal(found["val_1"], values["a.weight"].T)
    np.testing.assert_array_equal(found["val_2"], values["c.weight"].T)
    assert len(written.added) == 1
    np.testing.assert_array_equal(found[written.added[0]], values["b.fc.weight"].T)
    assert [each.op_type for each in written.proto.graph.node] == [each.op_type for each in proto.graph.node]


def convolution_without_bias() -> onnx.ModelProto:
    call = "aten.conv1d.default(%x, %p_conv_weight, %p_conv_bias, [1], [1])"
    convolution = node("Conv", ["x", "conv.weight"], "y", call, ["conv"], "RemoveOptionalBiasFromConv", pads=[1, 1])
    weight = RNG.integers(-3, 4, (5, 5, 3)).astype("float32")
    return graph([convolution], {"conv.weight": weight})


def test_a_removed_bias_comes_back_once_it_is_not_zero() -> None:
    proto = convolution_without_bias()
    written = check(proto)
    assert written.added == ["conv.bias"]
    assert list(written.proto.graph.node[0].input) == ["x", "conv.weight", "conv.bias"]
    values = trained_values(proto) | {"conv.bias": np.zeros(5, "float32")}
    assert list(check(proto, values).proto.graph.node[0].input) == ["x", "conv.weight"]


@pytest.mark.parametrize("name", ["onnx::Conv_12", "noxon", "497"])
def test_names_that_the_importer_changes(name: str) -> None:
    proto = graph([helper.make_node("Add", ["x", name], ["y"], "y")], {name: ONES}, producer="other")
    written = check(proto)
    assert written.changed == [name]


def test_old_files_list_initializers_as_inputs() -> None:
    proto = identities()
    proto.ir_version = 3
    proto.graph.input.append(helper.make_tensor_value_info("a.bias", onnx.TensorProto.FLOAT, [6]))
    added = with_trained(proto, trained_values(proto), "net.onnx")
    onnx.checker.check_model(added.proto)
    assert [value.name for value in added.proto.graph.input] == ["x", "a.bias", *added.added]


def test_an_initializer_that_a_branch_reads() -> None:
    """The branch follows a condition that is known when the file is read."""
    branch = helper.make_graph(
        [helper.make_node("Add", ["x", "shift"], ["moved"], "moved")],
        "then",
        [],
        [helper.make_tensor_value_info("moved", onnx.TensorProto.FLOAT, (3, 5, 6))],
    )
    nodes = [
        helper.make_node("Constant", [], ["yes"], "yes", value=numpy_helper.from_array(np.array(True))),
        helper.make_node("If", ["yes"], ["y"], "if", then_branch=branch, else_branch=branch),
    ]
    assert check(graph(nodes, {"shift": ONES})).changed == ["shift"]


def test_unequal_parameters_inside_of_a_function_are_refused() -> None:
    """The two layer norms of a function are one call in the file, whose two equal operands are one initializer."""
    call = "aten.layer_norm.default(%x, [6], %p_b_norm_weight, %p_b_norm_bias), kwargs"
    proto = graph([layer_norm("x", "y", "a.norm")], {"a.norm.weight": ONES, "a.norm.bias": ZEROS})
    inner = node("LayerNormalization", ["given", "scale", "shift"], "normed", call, ["b", "b.norm"], epsilon=1e-5)
    function = helper.make_function(
        "local", "Normed", ["given", "scale", "shift"], ["normed"], [inner], proto.opset_import
    )
    proto.functions.append(function)
    proto.opset_import.append(helper.make_opsetid("local", 1))
    proto.graph.node.append(
        helper.make_node("Normed", ["y", "a.norm.weight", "a.norm.bias"], ["z"], "call", domain="local")
    )
    proto.graph.output[0].name = "z"
    values = trained_values(proto)
    assert values.keys() == {"a.norm.weight", "a.norm.bias", "b.norm.weight", "b.norm.bias"}
    with pytest.raises(ModelError, match=r"net.onnx: 'b.norm.weight' shares .* inside of a function"):
        with_trained(proto, values, "net.onnx")
    tied = {name: values[f"a.{name[2:]}"] for name in values}
    assert sorted(with_trained(proto, tied, "net.onnx").changed) == ["a.norm.bias", "a.norm.weight"]


def test_a_parameter_without_a_place_is_refused_by_name() -> None:
    values = trained_values(identities()) | {"batch_norm0_running_mean": ONES}
    with pytest.raises(ModelError, match=r"net.onnx has no initializer for batch_norm0_running_mean of the step"):
        with_trained(identities(), values, "net.onnx")


def test_another_shape_is_refused() -> None:
    with pytest.raises(ModelError, match=r"'a.bias' is float32\[5\] in the step, but float32\[6\] in the file"):
        with_trained(identities(), trained_values(identities()) | {"a.bias": ONES[:5]}, "net.onnx")


def test_random_masks_and_training_modes() -> None:
    """A file that draws masks is written with Dropout that does nothing, and its batch norm takes its statistics."""
    one = helper.make_node("Constant", [], ["keep"], "keep", value=numpy_helper.from_array(np.float32(0.5)))
    nodes = [
        helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["n", "m2", "v2"], "n", training_mode=1),
        one,
        helper.make_node("RandomUniformLike", ["n"], ["u"], "u"),
        helper.make_node("Less", ["u", "keep"], ["c"], "c"),
        helper.make_node("Cast", ["c"], ["mask"], "mask", to=1),
        helper.make_node("Div", ["mask", "keep"], ["scaled"], "scaled"),
        helper.make_node("Mul", ["n", "scaled"], ["y"], "y"),
    ]
    names = ("g", "b", "m", "v")
    proto = graph(nodes, dict.fromkeys(names, np.ones(5, "float32")))
    values = {name: np.full(5, 2 + place, "float32") for place, name in enumerate(names)}
    written = with_trained(proto, values, "net.onnx")
    onnx.checker.check_model(written.proto, full_check=True)
    assert len(written.notes) == 2
    x = RNG.integers(-3, 4, (3, 5, 6)).astype("float32")
    (found,) = ReferenceEvaluator(written.proto).run(None, {"x": x})
    expected = (x.astype("float64") - 4) / np.sqrt(5 + 1e-5) * 2 + 3
    unit = 2.0**-24
    np.testing.assert_allclose(found, expected, rtol=0, atol=12 * unit * ((3 + 4) / np.sqrt(5) * 2 + 3))


def test_statistics_that_the_graph_reads_are_refused() -> None:
    nodes = [
        helper.make_node("BatchNormalization", ["x", "g", "b", "m", "v"], ["n", "m2", "v2"], "n", training_mode=1),
        helper.make_node("ReduceSum", ["m2"], ["s"], "s", keepdims=0),
        helper.make_node("Add", ["n", "s"], ["y"], "y"),
    ]
    proto = graph(nodes, dict.fromkeys(("g", "b", "m", "v"), np.ones(5, "float32")))
    with pytest.raises(ModelError, match=r"reads the statistics that 'n' computes in training mode \(m2\)"):
        with_trained(proto, {}, "net.onnx")
