# SPDX-License-Identifier: Apache-2.0
"""Initializers that torch.onnx.export's optimizer merged, transposed or computed become the model's parameters again.

The graphs are written as onnxscript's optimizer leaves them, with its notes; what they compute must stay the same.
"""

from __future__ import annotations

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")
helper = onnx.helper

from onnx.reference import ReferenceEvaluator  # noqa: E402

from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.frontends.onnx.prepared import prepared  # noqa: E402
from tvm_convgrad.training.frontends.onnx.torch_parameters import with_exported_parameters  # noqa: E402

RNG = np.random.default_rng(0)
SQUARE, WIDE = (RNG.standard_normal(shape).astype("float32") for shape in ((6, 6), (6, 4)))
ONES, ZEROS = np.ones(6, "float32"), np.zeros(6, "float32")


def node(operator, inputs, output, call="", modules=(), rule="", **attributes):
    """A node with the notes of the exporter; `call` is "target(arguments)"."""
    made = helper.make_node(operator, inputs, [output] if isinstance(output, str) else output, output[0], **attributes)
    notes = {}
    if call:
        target, _, arguments = call.partition("(")
        notes["pkg.torch.onnx.fx_node"] = f"%v : [...] = call_function[target=torch.ops.{target}](args = ({arguments}"
        notes["pkg.torch.onnx.name_scopes"] = str(["", *modules, "v"])
    if rule:
        notes["pkg.onnxscript.rewriter.rule_name"] = rule
    for key, value in notes.items():
        made.metadata_props.add(key=key, value=value)
    return made


def graph(nodes, initializers, shape=(3, 5, 6), result=None, producer="pytorch"):
    inputs = [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, shape)]
    outputs = [helper.make_tensor_value_info(nodes[-1].output[0], onnx.TensorProto.FLOAT, result or shape)]
    stored = [onnx.numpy_helper.from_array(value, name) for name, value in initializers.items()]
    made = helper.make_graph(nodes, "net", inputs, outputs, stored)
    opsets = [helper.make_opsetid("", 20)]
    return helper.make_model(made, producer_name=producer, opset_imports=opsets, ir_version=9)


def check(proto, want, constants=(), computed=()):
    """The initializers of floats by shape are `want`, and the graph computes what it did."""
    found = with_exported_parameters(proto)
    shapes = {t.name: tuple(t.dims) for t in found.proto.graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    assert shapes == want
    assert (found.constants, found.computed) == (frozenset(constants), tuple(computed))
    onnx.checker.check_model(found.proto, full_check=True)
    shape = [extent.dim_value for extent in proto.graph.input[0].type.tensor_type.shape.dim]
    x = RNG.standard_normal(shape).astype("float32")
    before, after = (ReferenceEvaluator(each).run(None, {"x": x})[0] for each in (proto, found.proto))
    np.testing.assert_array_equal(after, before)
    return found.proto


def layer_norm(source, output, module, scale="a.norm.weight", shift="a.norm.bias"):
    text = module.replace(".", "_")
    call = f"aten.layer_norm.default(%{source}, [6], %p_{text}_weight, %p_{text}_bias), kwargs"
    modules = [module.rpartition(".")[0], module]
    return node("LayerNormalization", [source, scale, shift], output, call, modules, epsilon=1e-5)


def test_merged_norms():
    nodes = [layer_norm("x", "y", "a.norm"), layer_norm("y", "z", "b.1.norm")]
    proto = graph(nodes, {"a.norm.weight": ONES, "a.norm.bias": ZEROS})
    check(proto, dict.fromkeys(("a.norm.weight", "a.norm.bias", "b.1.norm.weight", "b.1.norm.bias"), (6,)))


def test_scale_and_variance_of_one_tensor():
    """gamma and the running variance are both ones, beta and the running mean both zeros."""
    operands = "%x, %p_bn_weight, %p_bn_bias, %b_bn_running_mean, %b_bn_running_var"
    call = f"aten._native_batch_norm_legit_no_training.default({operands}, 0.1)"
    nodes = [node("BatchNormalization", ["x", "bn.weight", "bn.bias", "bn.bias", "bn.weight"], "y", call, ["bn"])]
    proto = graph(nodes, {"bn.weight": ONES, "bn.bias": ZEROS}, shape=(3, 6, 2, 2))
    names = ("bn.weight", "bn.bias", "bn.running_mean", "bn.running_var")
    check(proto, dict.fromkeys(names, (6,)))
    model = from_onnx(proto)
    assert list(model.parameters) == ["bn.weight", "bn.bias"]
    assert sorted(model.states) == ["bn.running_mean", "bn.running_var"]


def linear(source, weight, output, module):
    text = module.replace(".", "_")
    call = f"aten.linear.default(%{source}, %p_{text}_weight, %p_{text}_bias)"
    added = node("Add", [f"{output}_0", f"{module}.bias"], output, call, [module])
    return [node("MatMul", [source, weight], f"{output}_0", call, [module]), added]


def test_transposed_weights():
    """One tensor for the equal weights of two layers; a third of its own."""
    nodes = [*linear("x", "val_1", "y", "a"), *linear("y", "val_1", "z", "b.fc"), *linear("z", "val_2", "r", "c")]
    biases = {name: RNG.standard_normal(6).astype("float32") for name in ("a.bias", "b.fc.bias")}
    proto = graph(
        nodes, {"val_1": SQUARE, "val_2": WIDE, **biases, "c.bias": WIDE[0].copy()}, shape=(2, 6), result=(2, 4)
    )
    changed = check(
        proto,
        {
            "a.weight": (6, 6),
            "b.fc.weight": (6, 6),
            "c.weight": (4, 6),
            "a.bias": (6,),
            "b.fc.bias": (6,),
            "c.bias": (4,),
        },
    )
    found = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in changed.graph.initializer}
    np.testing.assert_array_equal(found["c.weight"], WIDE.T)
    assert list(from_onnx(proto).parameters) == list(from_onnx(changed).parameters)


def test_constants_are_no_parameters():
    """A group norm has ones and zeros of its own, attention a scale; neither is in the model."""
    call = "aten.group_norm.default(%x, 2, %p_gn_weight, %p_gn_bias)"
    nodes = [
        node("Reshape", ["x", "val_0"], "r0", call, ["gn"]),
        node("InstanceNormalization", ["r0", "val_1", "val_2"], "r1", call, ["gn"]),
        node("Reshape", ["r1", "val_3"], "r2", call, ["gn"]),
        node("Mul", ["r2", "val_4"], "r3", call, ["gn"]),
        node("Add", ["r3", "val_5"], "r4", call, ["gn"]),
        node("Mul", ["r4", "val_6"], "r5", "aten.scaled_dot_product_attention.default(%r4, %r4)", ["att"]),
    ]
    scale, shift = (RNG.standard_normal((6, 1, 1)).astype("float32") for _ in range(2))
    two = np.ones(2, "float32")
    shapes = {"val_0": np.array([0, 2, -1]), "val_3": np.array([3, 6, 2, 2])}
    values = {"val_1": two, "val_2": 0 * two, "val_4": scale, "val_5": shift, "val_6": two[:1] / 3}
    proto = graph(nodes, {**shapes, **values}, shape=(3, 6, 2, 2))
    want = {"gn.weight": (6,), "gn.bias": (6,), "val_1": (2,), "val_2": (2,), "val_6": (1,)}
    check(proto, want, constants=("val_1", "val_2", "val_6"))
    assert list(from_onnx(proto).parameters) == ["gn.weight", "gn.bias"]


def test_group_norms_of_one_group_beside_parameters_of_one_number():
    """The one and the zero of the group are merged with an activation's scale and bias (PoolFormer's StarReLU)."""
    call, activation = "aten.group_norm.default(%x, 1, %p_gn_weight, None)", "aten.mul.Tensor(%r3, %p_act_scale)"
    nodes = [
        node("Reshape", ["x", "val_0"], "r0", call, ["gn"]),
        node("InstanceNormalization", ["r0", "act.scale", "act.bias"], "r1", call, ["gn"]),
        node("Reshape", ["r1", "val_3"], "r2", call, ["gn"]),
        node("Mul", ["r2", "val_4"], "r3", call, ["gn"]),
        node("Mul", ["r3", "act.scale"], "r4", activation, ["act"]),
        node("Add", ["r4", "act.bias"], "r5", "aten.add.Tensor(%r4, %p_act_bias)", ["act"]),
    ]
    shapes = {"val_0": np.array([0, 1, -1]), "val_3": np.array([3, 6, 2, 2])}
    values = {"act.scale": ONES[:1], "act.bias": ZEROS[:1], "val_4": ONES.reshape(6, 1, 1)}
    proto = graph(nodes, {**shapes, **values}, shape=(3, 6, 2, 2))
    want = {"act.scale": (1,), "act.bias": (1,), "r1_ones": (1,), "r1_zeros": (1,), "gn.weight": (6,)}
    check(proto, want, constants=("r1_ones", "r1_zeros"))
    assert set(from_onnx(proto).parameters) == {"act.scale", "act.bias", "gn.weight"}


def test_class_token_of_all_samples():
    """Expanded to the batch in advance, it would become a token of its own for each sample."""
    token = np.repeat(RNG.standard_normal((1, 1, 6)).astype("float32"), 3, 0)
    nodes = [
        node("Concat", ["expand", "x"], "y", "aten.cat.default([%expand, %x], 1)", axis=1),
        node("Add", ["y", "position"], "z", "aten.add.Tensor(%y, %p_position)"),
    ]
    position = RNG.standard_normal((1, 6, 6)).astype("float32")
    proto = graph(nodes, {"expand": token, "position": position}, result=(3, 6, 6))
    want = {"expand.sample": (1, 1, 6), "position": (1, 6, 6)}
    check(proto, want, computed=["expand.sample"])
    assert "1 tensor is a result of the exporter (expand.sample)" in from_onnx(proto).warnings[0]


@pytest.mark.parametrize(
    ("operator", "attributes", "shape", "channels"),
    [
        ("Conv", {"group": 2}, (4, 3, 3, 3), 4),
        ("ConvTranspose", {}, (6, 4, 3, 3), 4),
    ],
)
def test_removed_biases(operator, attributes, shape, channels):
    """They were zero, but would not stay so."""
    call = "aten.convolution.default(%x, %p_body_0_weight, %p_body_0_bias, [1, 1])"
    rule = f"RemoveOptionalBiasFrom{operator}"
    made = node(operator, ["x", "body.0.weight"], "y", call, ["body", "body.0"], rule, **attributes)
    weight = RNG.standard_normal(shape).astype("float32")
    extent = 6 if operator == "Conv" else 10
    proto = graph([made], {"body.0.weight": weight}, shape=(2, 6, 8, 8), result=(2, channels, extent, extent))
    check(proto, {"body.0.weight": shape, "body.0.bias": (channels,)})
    assert not from_onnx(proto).warnings


def test_splits_without_notes():
    """The projections of two attention layers; equal ones are one tensor and one Split."""

    def gemm(source, part, output, module):
        call = f"aten.linear.default(%{source}, %getitem, %getitem_1)"
        return node("Add", [source, part], output, call, [module.rpartition(".")[0], module])

    nodes = [
        node("Split", ["a.att.in_proj_bias"], ["p", "q", "r"], num_outputs=3, axis=0),
        *(
            gemm(s, p, o, m)
            for s, p, o, m in (("x", "p", "u", "a.att"), ("u", "q", "v", "b.att"), ("v", "r", "w", "b.att"))
        ),
    ]
    proto = graph(nodes, {"a.att.in_proj_bias": np.zeros(18, "float32")})
    check(proto, {"a.att.in_proj_bias": (18,), "b.att.in_proj_bias": (18,)})


def test_what_notes_do_not_tell_stays():
    fused = node("Conv", ["x", "c.weight", "c.bias"], "y", "aten.batch_norm.default(%c, %p_bn_weight, %p_bn_bias)",
                 ["bn"], "FuseBatchNormIntoConv")  # fmt: skip
    weight = RNG.standard_normal((6, 6, 1, 1)).astype("float32")
    check(
        graph([fused], {"c.weight": weight, "c.bias": ONES}, (3, 6, 2, 2)), {"c.weight": (6, 6, 1, 1), "c.bias": (6,)}
    )
    one_name = [layer_norm("x", "y", "a.norm"), layer_norm("y", "z", "a.norm", scale="other")]
    values = {"a.norm.weight": ONES, "a.norm.bias": ZEROS, "other": 2 * ONES}
    check(graph(one_name, values), dict.fromkeys(values, (6,)))
    others = graph([layer_norm("x", "y", "a.norm")], {"a.norm.weight": ONES, "a.norm.bias": ZEROS}, producer="tf2onnx")
    assert with_exported_parameters(others).proto is others


@pytest.mark.parametrize(("kind", "gates"), [("LSTM", 4), ("GRU", 3)])
def test_recurrent_weights_with_the_gates_of_pytorch(kind, gates):
    """Two layers of one call, the first in both directions; one operand is left as the exporter's nodes."""
    size, first = 2, ("p_r_weight_ih_l0", "p_r_weight_hh_l0", "p_r_bias_ih_l0", "p_r_bias_hh_l0")
    names = [*first, *(f"{name}_reverse" for name in first), *(name.replace("_l0", "_l1") for name in first)]
    call = f"aten.{kind.lower()}.input(%x, [%zeros], [{', '.join('%' + name for name in names)}], True), kwargs"
    rows = gates * size
    values = {
        "val_1": RNG.standard_normal((2, rows, 6)),
        "val_2": RNG.standard_normal((2, rows, size)),
        "val_3": RNG.standard_normal((2, 2 * rows)),
        "val_4": np.zeros((2, 5, size)),
        "r.weight_ih_l1": RNG.standard_normal((rows, 4)),
        "val_6": RNG.standard_normal((1, rows, size)),
        "val_7": RNG.standard_normal((1, 2 * rows)),
    }
    layers = {"hidden_size": size}
    nodes = [
        node(
            kind, ["x", "val_1", "val_2", "val_3", "", "val_4"], "y", call, ["r"], direction="bidirectional", **layers
        ),
        node("Transpose", ["y"], "turned", perm=[0, 2, 1, 3]),
        helper.make_node("Constant", [], ["shape"], value_ints=[3, 5, 4]),
        node("Reshape", ["turned", "shape"], "flat"),
        helper.make_node("Constant", [], ["axis"], value_ints=[0]),
        node("Unsqueeze", ["r.weight_ih_l1", "axis"], "whole", call, ["r"]),
        node(kind, ["flat", "whole", "val_6", "val_7"], "z", call, ["r"], **layers),
    ]
    proto = graph(nodes, {name: value.astype("float32") for name, value in values.items()}, result=(3, 1, 5, size))
    want = {"val_4": (2, 5, size)}
    for layer, width in (("l0", 6), ("l0_reverse", 6), ("l1", 4)):
        want |= {f"r.weight_ih_{layer}": (rows, width), f"r.weight_hh_{layer}": (rows, size)}
        want |= {f"r.bias_ih_{layer}": (rows,), f"r.bias_hh_{layer}": (rows,)}
    found = check(proto, want, constants={"val_4"})
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in found.graph.initializer}
    order = {"LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}[kind]
    turned = stored["r.weight_hh_l1"].reshape(gates, size, size)[order].reshape(rows, size)
    np.testing.assert_array_equal(turned, values["val_6"][0].astype("float32"))


def test_tables_that_are_indexed():
    """The optimizer gives a table a name of its own; one indexed along another axis was transposed before."""
    places = helper.make_node("Constant", [], ["places"], value_ints=[3, 0, 3, 5, 1])
    for first, name in (("[%b_places]", "a.table"), ("[None, %b_places]", "val_1")):
        call = f"aten.index.Tensor(%p_a_table, {first}), kwargs"
        added = node("Add", ["x", "rows"], "y", "aten.add.Tensor(%x, %index)")
        proto = graph([places, node("Gather", ["val_1", "places"], "rows", call, ["a"]), added], {"val_1": SQUARE})
        check(proto, {name: (6, 6)}, computed=[] if name == "a.table" else ["val_1"])


def test_computed_constants_are_no_parameters():
    """The graph's signature has all parameters, and all of them are there: what else was computed is a constant."""
    first = node("Mul", ["x", "unsqueeze_1"], "y", "aten.mul.Tensor(%x, %unsqueeze_1), kwargs")
    nodes = [first, *linear("y", "net.weight", "z", "net")]
    for expected, names in ((("unsqueeze_1",), ("net.weight",)), ((), ("net.weight", "rates"))):
        proto = graph(nodes, {"unsqueeze_1": ONES * 2, "net.weight": SQUARE, "net.bias": ZEROS})
        lines = "".join(f"p_{name.replace('.', '_')}: PARAMETER target='{name}'\n" for name in names)
        entry = proto.graph.metadata_props.add()
        entry.key, entry.value = "pkg.torch.export.ExportedProgram.graph_signature", lines
        found = with_exported_parameters(proto)
        assert (found.kept, found.constants) == (expected, frozenset(expected))
        assert set(found.computed) == {"unsqueeze_1"} - set(expected)


def signed(proto, *names):
    """The graph with the exporter's list of the model's parameters."""
    lines = [f"p_{name.replace('.', '_')}: PARAMETER target='{name}'" for name in names]
    proto.graph.metadata_props.add(key="pkg.torch.export.ExportedProgram.graph_signature", value="\n".join(lines))
    return proto


@pytest.mark.parametrize("is_read", [False, True])
def test_weights_of_classes_are_no_parameters(is_read):
    """Also where the signature has a parameter that the graph has not; not if something else reads the tensor, too."""
    call = "aten.cross_entropy_loss.default(%y, %labels, %clone)"
    loss = node("SoftmaxCrossEntropyLoss", ["y", "labels", "clone"], "loss", call)
    scaled = node("Mul", ["x", "clone" if is_read else "net.scale"], "y", "aten.mul.Tensor(%x, %p_net_scale)", ["net"])
    labels = np.array([0, 3, 5], "int64")
    proto = graph([scaled, loss], {"clone": ONES * 2, "net.scale": ONES, "labels": labels}, (3, 6), result=())
    found = prepared(signed(proto, "net.scale", "net.unread"), "net.onnx").exported
    assert found.kept == (() if is_read else ("clone",))


def test_scales_in_another_shape():
    """A scale of shape (C) that layers read as (1, C, 1, 1): one initializer of both, whose views no node computes."""
    scale = ONES.reshape(1, 6, 1, 1) / 4
    nodes = [
        node("Mul", ["x", "view"], "y", "aten.mul.Tensor(%x, %view)", ["blocks", "blocks.0"]),
        node("Mul", ["y", "view"], "z", "aten.mul.Tensor(%y, %view_1)", ["blocks", "blocks.1"]),
    ]
    proto = signed(graph(nodes, {"view": scale}, shape=(3, 6, 2, 2)), "blocks.0.gamma", "blocks.1.gamma")
    check(proto, {"blocks.0.gamma": (6,), "blocks.1.gamma": (6,)})
    assert list(from_onnx(proto).parameters) == ["blocks.0.gamma", "blocks.1.gamma"]


@pytest.mark.parametrize("names", [("a.gamma", "a.delta"), ("b.gamma",), ()])
def test_scales_that_are_not_told_stay(names):
    """Two parameters of the module, or none, may be the reshaped one: it keeps the exporter's name, and is said."""
    nodes = [node("Mul", ["x", "view"], "y", "aten.mul.Tensor(%x, %view)", ["a"])]
    proto = signed(graph(nodes, {"view": ONES.reshape(1, 6, 1, 1)}, shape=(3, 6, 2, 2)), *names)
    check(proto, {"view": (1, 6, 1, 1)}, computed=("view",))


def test_counts_and_masks_are_no_parameters():
    """An adaptive pool divides by how many elements each window has, integers that the exporter has converted."""
    name = "convert_element_type_default_1"
    nodes = [
        node("Div", ["x", name], "y", f"aten.div.Tensor(%x, %{name})"),
        node("Mul", ["y", "index"], "z", "aten.mul.Tensor(%y, %index)"),
    ]
    proto = graph(nodes, {name: 2 * ONES, "index": ONES.copy()})
    check(proto, {name: (6,), "index": (6,)}, constants=[name], computed=["index"])
    assert list(from_onnx(proto).parameters) == ["index"]
