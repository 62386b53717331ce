# SPDX-License-Identifier: Apache-2.0
"""Models that return their loss themselves (build --loss model): against PyTorch, from .pt2 and ONNX, and refusals."""

from __future__ import annotations

import re

import numpy as np
import pytest
import tvm
from tvm import relax

from tests.training.harness import Runner, relative_error
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.ensemble import ensemble
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.model.own_loss import OwnLoss
from tvm_convgrad.training.model.trained_part import train_only
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.per_sample import per_sample_module
from tvm_convgrad.training.step.predictor import build_predictor

BATCH, FEATURES, CLASSES, RATE = 4, 6, 3, 0.1
RNG = np.random.default_rng(5)
X = RNG.standard_normal((BATCH, 2, 5, 4)).astype("float32")
LABELS = np.array([0, 2, 1, 2])
PIXELS = RNG.integers(0, CLASSES, (BATCH, 5, 4))
VALUES = RNG.standard_normal((BATCH, CLASSES)).astype("float32")
VOID = 255


def heads(torch):
    """Losses of a network's scores z (n, classes, h, w) and a target, as a model might return them, and a target."""
    functional = torch.nn.functional

    def scores_too(z, y):
        z = z.mean((2, 3))
        return functional.cross_entropy(z, y), z

    def loss_alone(z, y):
        return functional.cross_entropy(z.mean((2, 3)), y, label_smoothing=0.1)

    def dice(z, y):
        p, t = z.softmax(1), functional.one_hot(y, CLASSES).permute(0, 3, 1, 2).to(z.dtype)
        union = p.sum((0, 2, 3)) + t.sum((0, 2, 3))
        return {"scores": z, "loss": (1 - (2 * (p * t).sum((0, 2, 3)) + 1) / (union + 1)).mean()}

    def void(z, y):
        return functional.cross_entropy(z, y, ignore_index=VOID), z

    def values(z, y):
        z = z.mean((2, 3))
        return functional.smooth_l1_loss(z, y), z

    def focal(z, y):
        each = functional.cross_entropy(z.mean((2, 3)), y, reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    def divergence(z, y):
        z = z.mean((2, 3))
        return functional.kl_div(z.log_softmax(1), y.softmax(1), reduction="batchmean"), z

    partly = PIXELS.copy()
    partly[1] = VOID
    return {
        "scores too": (scores_too, LABELS),
        "loss alone": (loss_alone, LABELS),
        "dice": (dice, PIXELS),
        "void": (void, partly),
        "values": (values, VALUES),
        "focal": (focal, LABELS),
        "divergence": (divergence, VALUES),
    }


def network(torch, head, dropout=0.0):
    nn = torch.nn

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.last = nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, CLASSES, 1)

        def forward(self, x, y):
            x = nn.functional.relu(self.norm(self.conv(x)))
            return head(self.last(nn.functional.dropout(x, dropout, self.training)), y)

    torch.manual_seed(1)
    return Network().train()


def exported(torch, net, target, free=False):
    shapes = ({0: torch.export.Dim("n")},) * 2 if free else None
    return torch.export.export(net, (torch.tensor(X), torch.tensor(target)), dynamic_shapes=shapes)


def stepped(torch, net, batches):
    """The losses and the parameters of PyTorch in float64; the loss of a step is the mean of those of its batches."""
    net = net.double()
    optimizer, losses = torch.optim.SGD(net.parameters(), RATE), []
    for parts in batches:
        optimizer.zero_grad()
        total = 0.0
        for x, y in parts:
            y = torch.tensor(y.astype("float64") if y.dtype.kind == "f" else y)
            result = net(torch.tensor(x.astype("float64")), y)
            loss = result["loss"] if isinstance(result, dict) else result[0] if isinstance(result, tuple) else result
            (loss / len(parts)).backward()
            total += loss.item() / len(parts)
        optimizer.step()
        losses.append(total)
    return losses, {name: value.detach().numpy() for name, value in net.named_parameters()}


@pytest.mark.parametrize(
    ("name", "free"),
    [
        ("scores too", True),
        ("loss alone", False),
        ("dice", True),
        ("void", False),
        ("values", True),
        ("focal", False),
        ("divergence", True),
    ],
)
def test_three_steps_are_those_of_pytorch(name, free):
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    head, target = heads(torch)[name]
    net = network(torch, head)
    model = from_exported_program(exported(torch, net, target, free), outputs=OwnLoss())
    assert bool(model.predicted) == (name not in ("loss alone", "focal"))
    runner = Runner(build_step(model, loss="model"))
    losses = [runner.step(X, target, lr=RATE)[0] for _ in range(3)]
    wanted, parameters = stepped(torch, net, [[(X, target)]] * 3)
    assert losses == pytest.approx(wanted, rel=1e-6)
    for key, value in runner.named("parameter").items():
        assert relative_error(value, parameters[key]) < 2e-6
    schema = runner.step_module
    assert (schema.target.dtype, schema.target.shape[1:]) == (str(target.dtype), target.shape[1:])
    if model.predicted:
        found = runner.predict(X)
        y = torch.tensor(target.astype("float64") if target.dtype.kind == "f" else target)
        with torch.no_grad():
            result = net.eval()(torch.tensor(X.astype("float64")), y)
        expected = result["scores"] if isinstance(result, dict) else result[1]
        assert relative_error(found, expected.numpy()) < 2e-6
    else:
        assert schema.prediction.shape == ()


def test_both_ways_to_step_give_the_same_bits():
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    head, _ = heads(torch)["scores too"]
    model = from_exported_program(exported(torch, network(torch, head), LABELS), outputs=OwnLoss())
    options = {"loss": "model", "accumulate": 2, "split": True, "clip_norm": 0.5, "ema": 0.9, "optimizer": "adam"}
    x, y = np.concatenate([X, -X]), np.concatenate([LABELS, LABELS[::-1]])
    whole, split = Runner(build_step(model, **options)), Runner(build_step(model, **options))
    for _ in range(2):
        loss, predictions = whole.step(x, y, lr=0.01)
        given = [tvm.runtime.tensor(array) for array in (x, y)]
        other, _, flat, moved = split.machine["gradients"](*given, split.state)
        state = list(split.state)
        schemas = split.step_module.state
        places = [place for place, schema in enumerate(schemas) if schema.role == "running_stat"]
        for place, value in zip(places, moved, strict=True):
            state[place] = value
        split.state = split.machine["apply"](flat, tvm.runtime.tensor(np.float32(0.01)), tuple(state))
        assert float(other.numpy()) == loss
    for name, value in whole.named().items():
        np.testing.assert_array_equal(value, split.named()[name])
    assert predictions.shape == (2 * BATCH, CLASSES)


def test_the_loss_is_the_mean_of_the_losses_of_micro_batches():
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    head, _ = heads(torch)["loss alone"]
    net = network(torch, head)
    fresh = Runner(
        build_step(from_exported_program(exported(torch, net, LABELS), outputs=OwnLoss()), loss="model", accumulate=2)
    )
    loss, again = fresh.step(np.concatenate([X, -X]), np.concatenate([LABELS, LABELS[::-1]]), lr=RATE)
    assert loss == again
    wanted, parameters = stepped(torch, net, [[(X, LABELS), (-X, LABELS[::-1].copy())]])
    assert [loss] == pytest.approx(wanted, rel=1e-6)
    for key, value in fresh.named("parameter").items():
        assert relative_error(value, parameters[key]) < 2e-6


def test_dropout_is_drawn_in_steps_alone():
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    head, _ = heads(torch)["scores too"]
    net = network(torch, head, dropout=0.5)
    model = train_only(from_exported_program(exported(torch, net, LABELS), outputs=OwnLoss()), ["last"])
    runner = Runner(build_step(model, loss="model"))
    losses = {runner.step(X, LABELS, lr=0.0)[0] for _ in range(3)}
    assert len(losses) == 3
    loss, _ = runner.machine["evaluate"](*map(tvm.runtime.tensor, (X, LABELS)), runner.state)
    with torch.no_grad():
        wanted, _ = net.eval()(torch.tensor(X), torch.tensor(LABELS))
    assert float(loss.numpy()) == pytest.approx(wanted.item(), rel=1e-5)


def onnx_model(path):
    """Scores of a linear layer, their squared distance from a target as [1, 1], and the sum of the scores."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    values = [helper.make_tensor_value_info("loss", TensorProto.FLOAT, [1, 1])]
    values += [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", CLASSES])]
    values += [helper.make_tensor_value_info("total", TensorProto.FLOAT, [])]
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "w"], ["scores"]),
            helper.make_node("Sub", ["scores", "wanted"], ["d"]),
            helper.make_node("Mul", ["d", "d"], ["square"]),
            helper.make_node("ReduceMean", ["square"], ["loss"], keepdims=1),
            helper.make_node("ReduceSum", ["scores"], ["total"], keepdims=0),
        ],
        "own",
        [
            helper.make_tensor_value_info("wanted", TensorProto.FLOAT, ["n", CLASSES]),
            helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", FEATURES]),
        ],
        values,
        [numpy_helper.from_array(np.full((FEATURES, CLASSES), 0.25, "float32"), "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_onnx_with_chosen_names(tmp_path):
    """The target is the first input, there are two scalars of which both are wanted, and the numbers are exact."""
    pytest.importorskip("onnx")
    path = onnx_model(tmp_path / "own.onnx")
    with pytest.raises(ModelError, match=r"2 scalar outputs: loss float32\[1, 1\], total float32\[\]"):
        load_model(path, outputs=OwnLoss(target="wanted"))
    choice = OwnLoss({"loss": 12.0, "scores": 1.0, "total": 0.5}, "wanted")
    model = load_model(path, batch=2, outputs=choice)
    assert (model.outputs, model.predicted) == ({"loss": 12.0, "total": 0.5}, "scores")
    assert [schema.name for schema in model.inputs] == ["x"]
    x = RNG.integers(-3, 4, (2, FEATURES)).astype("float32")
    target = RNG.integers(-3, 4, (2, CLASSES)).astype("float32")
    runner = Runner(build_step(model, loss="model"))
    loss, scores = runner.step(x, target, lr=1.0)
    w = np.full((FEATURES, CLASSES), 0.25)
    assert loss == 12 * ((x @ w - target) ** 2).sum() / 6 + 0.5 * (x @ w).sum()
    np.testing.assert_array_equal(scores, x @ w)
    gradient = x.T @ (4 * (x @ w - target) + 0.5)
    np.testing.assert_array_equal(runner.named("parameter")["w"], w - gradient)


def relax_model(batch=BATCH, dtype="int64", own_scores=True, outputs=None):
    """Negative log-likelihoods, looked up by label, of a linear layer; the target is the last of two inputs."""
    builder, op = relax.BlockBuilder(), relax.op
    tensor = relax.TensorType
    x, y = relax.Var("x", tensor((batch, FEATURES), "float32")), relax.Var("y", tensor((batch,), dtype))
    w = relax.Var("w", tensor((FEATURES, CLASSES), "float32"))
    with builder.function("main", [x, y, w], {"num_input": 2}):
        with builder.dataflow():
            scores = builder.emit(op.matmul(x, w))
            found = builder.emit(op.nn.log_softmax(scores))
            picked = builder.emit(op.gather_elements(found, builder.emit(op.expand_dims(y, 1)), 1))
            loss = builder.emit_output(op.negative(builder.emit(op.mean(picked))))
            known = builder.emit_output(op.add(scores, picked))
            results = [loss, *([builder.emit_output(scores)] if own_scores else []), known]
        builder.emit_func_output(relax.Tuple(results))
    values = {"w": RNG.integers(-2, 3, (FEATURES, CLASSES)).astype("float32")}
    names = ["loss", *(["scores"] if own_scores else []), "known"]
    return from_module(builder.get(), parameters=values, output_names=names, outputs=outputs or OwnLoss(), source="own")


def test_labels_out_of_range_make_the_loss_nan():
    """And read nothing there: TVM's own lookup crashes."""
    runner = Runner(build_step(relax_model(), loss="model"))
    x = X.reshape(BATCH, -1)[:, :FEATURES]
    for label in (CLASSES, 10**9, -CLASSES - 1, -(10**9)):
        labels = LABELS.copy()
        labels[2] = label
        assert np.isnan(runner.step(x, labels, lr=0.0)[0])
    assert np.isfinite(runner.step(x, LABELS, lr=0.0)[0])


@pytest.mark.parametrize(
    ("choice", "sentence"),
    [
        ({}, "own returns no loss"),
        ({"target": "z"}, "own has no input 'z' (--model-target); it has x, y."),
        ({"outputs": {"known": 1.0}}, "own returns no loss: of its outputs loss float32[], scores float32[4, 3]"),
        ({"outputs": {"loss": 1.0, "known": 1.0}}, "output 'known' depends on 'y', the target, so it cannot be pred"),
        ({"outputs": {"loss": 1.0, "other": 1.0}}, "own has no output 'other'; it has loss float32[], scores"),
        ({"outputs": {"loss": -1.0}}, "the weight of output 'loss' is -1; give a positive number."),
    ],
)
def test_what_is_no_such_model_is_refused(choice, sentence):
    if not choice:
        builder = relax.BlockBuilder()
        x, y = (relax.Var(name, relax.TensorType((BATCH, 2), "float32")) for name in "xy")
        w = relax.Var("w", relax.TensorType((2,), "float32"))
        with builder.function("main", [x, y, w], {"num_input": 2}):
            with builder.dataflow():
                found = builder.emit_output(relax.op.multiply(relax.op.add(x, y), w))
            builder.emit_func_output(found)
        with pytest.raises(ModelError, match=re.escape(sentence)):
            from_module(builder.get(), outputs=OwnLoss(), source="own")
        return
    with pytest.raises(ModelError, match=re.escape(sentence)):
        relax_model(outputs=OwnLoss(**choice))


def test_a_model_without_a_target_is_refused():
    from tests.training.small_models import relax_module

    with pytest.raises(ModelError, match="has the input x alone, but a model that returns its loss takes its target"):
        from_module(relax_module(4), outputs=OwnLoss())


def test_what_needs_losses_of_samples_is_refused():
    own, plain = relax_model(), relax_model(outputs={"scores": 1.0})
    with pytest.raises(UnsupportedError, match="returns its loss itself, which would be one loss of all members"):
        ensemble([own, own])
    with pytest.raises(UnsupportedError, match="has no gradients of single samples"):
        per_sample_module(own)
    with pytest.raises(UnsupportedError, match="loss = 'cross_entropy', but own was loaded as a model that returns it"):
        build_step(own)
    with pytest.raises(UnsupportedError, match="loss = 'model', but own was loaded as a model that returns predict"):
        build_step(plain, loss="model")
    with pytest.raises(UnsupportedError, match="model has no setting 'label_smoothing'"):
        build_step(own, loss="model", label_smoothing=0.1)
    alone = relax_model(own_scores=False)
    with pytest.raises(ModelError, match="returns its loss alone, and an inference library predicts"):
        build_predictor(alone, alone.parameters)
    assert build_predictor(own, own.parameters).prediction.shape == (BATCH, CLASSES)
