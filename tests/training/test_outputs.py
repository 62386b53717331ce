# SPDX-License-Identifier: Apache-2.0
"""Models with several outputs: the choice, what is removed with the others, and the sum of several losses."""

from __future__ import annotations

import numpy as np
import pytest
from tvm import relax

from tests.training.harness import Runner, relative_error
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.per_sample import per_sample_module

BATCH, FEATURES, CLASSES = 4, 6, 3
RNG = np.random.default_rng(3)
VALUES = {
    "trunk": RNG.standard_normal((FEATURES, 5)).astype("float32"),
    "logits_weight": RNG.standard_normal((5, CLASSES)).astype("float32"),
    "aux_weight": RNG.standard_normal((5, CLASSES)).astype("float32"),
    "wide_weight": RNG.standard_normal((5, 2)).astype("float32"),
}
X = RNG.standard_normal((BATCH, FEATURES)).astype("float32")
Y = np.array([0, 2, 1, 1])


def heads(nested=False, bound=False):
    """relu(x @ trunk), and a linear head each: logits and aux with 3 classes, wide with 2, classes as integers."""
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((BATCH, FEATURES), "float32"))
    params = {name: relax.Var(name, relax.TensorType(value.shape, "float32")) for name, value in VALUES.items()}
    with builder.function("main", [x, *params.values()]):
        with builder.dataflow():
            trunk = builder.emit(relax.op.nn.relu(builder.emit(relax.op.matmul(x, params["trunk"]))))
            results = [
                builder.emit_output(relax.op.matmul(trunk, params[f"{name}_weight"]), name)
                for name in ("logits", "aux", "wide")
            ]
            results.append(builder.emit_output(relax.op.argmax(results[0], 1), "label"))
            result = relax.Tuple([results[0], relax.Tuple(results[1:])] if nested else results)
            if bound:
                result = builder.emit_output(result)
        builder.emit_func_output(result)
    return builder.get()


def model(outputs=None, **how):
    return from_module(heads(**how), parameters=VALUES, outputs=outputs, source="heads")


@pytest.mark.parametrize("how", [{}, {"nested": True}, {"bound": True}, {"nested": True, "bound": True}])
def test_outputs_are_listed_and_one_is_chosen(how):
    with pytest.raises(ModelError) as caught:
        model(**how)
    listed = "logits float32[4, 3], aux float32[4, 3], wide float32[4, 2], label int64[4]"
    assert f"heads has 4 outputs: {listed}" in str(caught.value)
    assert "--model-output NAME" in str(caught.value)
    for chosen in ("wide", "2"):
        found = model({chosen: 1.0}, **how)
        assert set(found.parameters) == {"trunk", "wide_weight"}
        assert found.outputs == {"wide": 1.0}
        assert [list(map(int, type_.shape.values)) for type_ in found.relax_function.ret_ty.fields] == [[4, 2]]


@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ({"nothing": 1.0}, "has no output 'nothing'; it has logits float32[4, 3]"),
        ({"7": 1.0}, "has no output '7'"),
        ({}, "no output is chosen"),
        ({"logits": 1.0, "0": 1.0}, "output 'logits' is chosen twice"),
        ({"logits": 0.0}, "weight of output 'logits' is 0"),
        ({"logits": float("nan")}, "weight of output 'logits' is nan"),
    ],
)
def test_wrong_choices(outputs, sentence):
    with pytest.raises(ModelError) as caught:
        model(outputs)
    assert sentence in str(caught.value)


@pytest.mark.parametrize("build", [build_step, per_sample_module])
@pytest.mark.parametrize(
    ("outputs", "sentence"),
    [
        ({"logits": 1.0, "wide": 0.5}, "'logits' is float32[4, 3], but output 'wide' is float32[4, 2]"),
        ({"label": 1.0, "logits": 1.0}, "'label' is int64[4], but a loss needs floating-point numbers"),
    ],
)
def test_outputs_that_have_no_loss_in_common(build, outputs, sentence):
    with pytest.raises(ModelError) as caught:
        build(model(outputs))
    assert sentence in str(caught.value)


def stepped(outputs):
    """The loss, the predictions and the change of each parameter in a step with learning rate 1."""
    runner = Runner(build_step(model(outputs)))
    before = runner.named("parameter")
    loss, predictions = runner.step(X, Y, lr=1.0)
    change = {name: value - before[name] for name, value in runner.named("parameter").items()}
    return loss, predictions, change, runner


def test_losses_are_summed_by_weight():
    main, main_predictions, main_change, _ = stepped({"logits": 1.0})
    aux, _, aux_change, _ = stepped({"aux": 1.0})
    both, predictions, change, runner = stepped({"logits": 1.0, "aux": 0.4})
    assert both == pytest.approx(main + 0.4 * aux, rel=1e-6)
    np.testing.assert_array_equal(predictions, main_predictions)
    assert relative_error(change["trunk"], main_change["trunk"] + 0.4 * aux_change["trunk"]) < 1e-5
    assert relative_error(change["logits_weight"], main_change["logits_weight"]) < 1e-5
    assert relative_error(change["aux_weight"], 0.4 * aux_change["aux_weight"]) < 1e-5
    assert runner.step_module.options["outputs"] == {"logits": 1.0, "aux": 0.4}
    assert runner.step_module.prediction.shape == (BATCH, CLASSES)
    assert "aux_weight" not in _used(runner.step_module.module["predict"])


def _used(function):
    """The names of the state's tensors that a function reads."""
    schemas = [*VALUES]
    del schemas[3]
    read = {
        int(binding.value.index)
        for block in function.body.blocks
        for binding in block.bindings
        if isinstance(getattr(binding, "value", None), relax.TupleGetItem)
    }
    return {name for place, name in enumerate(schemas) if place in read}


def test_members_of_an_ensemble_have_all_losses():
    outputs = {"logits": 1.0, "aux": 0.4}
    alone = stepped(outputs)
    runner = Runner(build_step(ensemble([model(outputs), model(outputs)])))
    before = runner.named("parameter")
    loss, predictions = runner.step(X, Y, lr=1.0)
    assert loss == pytest.approx(2 * alone[0], rel=1e-5)
    assert predictions.shape == (BATCH, 2, CLASSES)
    for name, value in runner.named("parameter").items():
        for member in range(2):
            assert relative_error((value - before[name])[member], alone[2][name]) < 1e-5
    with pytest.raises(ModelError, match="another architecture"):
        ensemble([model(outputs), model({"logits": 1.0, "aux": 0.5})])


def test_pt2_heads(tmp_path):
    torch = pytest.importorskip("torch")

    class Heads(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.norm = torch.nn.Linear(6, 5), torch.nn.BatchNorm1d(5)
            self.main, self.aux, self.aux_norm = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)

        def forward(self, x):
            x = self.norm(self.trunk(x))
            return {"out": self.main(x), "aux": self.aux_norm(self.aux(x))}

    path = tmp_path / "heads.pt2"
    torch.export.save(torch.export.export(Heads().train(), (torch.from_numpy(X),)), path)
    with pytest.raises(ModelError, match=r"has 2 outputs: out float32\[4, 3\], aux float32\[4, 3\]"):
        load_model(path)
    alone, both = load_model(path, outputs={"out": 1.0}), load_model(path, outputs={"out": 1.0, "aux": 0.4})
    assert not [name for name in (*alone.parameters, *alone.states) if name in ("aux.weight", "aux_norm.running_mean")]
    assert {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"} <= set(alone.states)
    assert {"aux.weight", "aux_norm.weight"} <= set(both.parameters)
    assert "aux_norm.running_mean" in both.states
    predictions = Runner(build_step(alone)).step(X, Y, lr=0.1)[1]
    assert relative_error(Runner(build_step(both)).step(X, Y, lr=0.1)[1], predictions) < 1e-5


def test_onnx_heads():
    onnx = pytest.importorskip("onnx")
    from tvm_convgrad.training.frontends.onnx.model import from_onnx

    helper, tensors = onnx.helper, onnx.numpy_helper
    names = ("trunk", "logits_weight", "wide_weight")
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "trunk"], ["h"]),
            helper.make_node("MatMul", ["h", "logits_weight"], ["logits"]),
            helper.make_node("MatMul", ["h", "wide_weight"], ["boxes"]),
        ],
        "heads",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [BATCH, FEATURES])],
        [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("logits", "boxes")],
        [tensors.from_array(VALUES[name], name) for name in names],
    )
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    with pytest.raises(ModelError, match=r"has 2 outputs: logits float32\[4, 3\], boxes float32\[4, 2\]"):
        from_onnx(proto)
    assert set(from_onnx(proto, outputs={"boxes": 1.0}).parameters) == {"trunk", "wide_weight"}
