# SPDX-License-Identifier: Apache-2.0
"""What PyTorch's exporters change in ONNX files: folded batch norms are said, merged parameters are separate again."""

from __future__ import annotations

import io
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.frontends.onnx.rewrites import rewritten_layers  # noqa: E402
from tvm_convgrad.training.frontends.onnx.torch_parameters import with_exported_parameters  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

TRAINING = {"training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
X = torch.zeros(4, 3, 6, 6)


class Residual(torch.nn.Module):
    """Three convolutions with batch norm, if `norm`, and a shortcut."""

    def __init__(self, norm=True, bias=False):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = (
            torch.nn.Conv2d(channels, 4, 3, padding=1, bias=bias) for channels in (3, 4, 4)
        )
        self.bn1, self.bn2, self.bn3 = (torch.nn.BatchNorm2d(4) if norm else torch.nn.Identity() for _ in range(3))
        self.fc = torch.nn.Linear(4, 2)

    def forward(self, x):
        x = self.bn1(self.conv1(x)).relu()
        x = (self.bn3(self.conv3(self.bn2(self.conv2(x)).relu())) + x).relu()
        return self.fc(x.mean((2, 3)))


def plain():
    """Convolutions with biases of their own, as in VGG and AlexNet."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Conv2d(4, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )


def pre_activated():
    """A batch norm behind a convolution is folded, the one in front of it stays."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.BatchNorm2d(4),
        torch.nn.Conv2d(4, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(16, 2),
    )


def exported(network, train=False, **options):
    """The ONNX model that the TorchScript exporter makes; the other one needs the package onnxscript."""
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network.train(train), (X,), stream, dynamo=False, **options)
    return onnx.load_from_string(stream.getvalue())


def randomised(network):
    """The network with statistics and factors that differ, as after some training."""
    torch.manual_seed(0)
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.weight.data.uniform_(0.5, 2)
            module.bias.data.normal_()
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return network


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("prepare", [lambda network: network, randomised])
def test_folded_batch_norms_are_said(bias, prepare):
    network = prepare(Residual(bias=bias))
    (said,) = from_onnx(exported(network), source="net.onnx").warnings
    assert "net.onnx: the exporter has folded batch norms into 3 of 3 convolutions" in said
    assert "which leaves the model no normalisation" in said
    assert "training=torch.onnx.TrainingMode.TRAINING, do_constant_folding=False" in said
    assert "torch.export.export(model.train(), ...)" in said
    for options in (TRAINING, {"do_constant_folding": False, "training": torch.onnx.TrainingMode.PRESERVE}):
        model = from_onnx(exported(network, train=True, **options))
        assert model.warnings == ()
        assert len(model.states) == 6


@pytest.mark.parametrize("opset", [9, 11, 13])
def test_batch_norms_of_five_results(opset):
    """Files for training had them before opset 14."""

    def made(number):
        torch.manual_seed(1)
        return exported(randomised(Residual()), train=True, opset_version=number, **TRAINING)

    proto, newer = made(opset), made(17)  # of two networks, since an export moves the statistics
    assert any(node.op_type == "BatchNormalization" and len(node.output) == 5 for node in proto.graph.node)
    losses = []
    for each in (proto, newer):
        runner = Runner(build_step(from_onnx(each)))
        x, labels = np.random.default_rng(0).standard_normal(X.shape).astype("float32"), np.array([0, 1, 1, 0])
        losses.append([runner.step(x, labels, lr=0.1)[0] for _ in range(3)])
        losses[-1].extend(runner.named()["bn2.running_var"])
    assert losses[0] == losses[1]


def test_batch_norms_whose_last_results_have_no_names():
    """Beside a node that leaves an operand out, whose name is empty, too."""
    torch.manual_seed(1)
    proto = exported(randomised(Residual()), train=True, opset_version=13, **TRAINING)
    for node in proto.graph.node:
        if node.op_type == "BatchNormalization":
            del node.output[3:]
            node.output.extend(["", ""])
        if node.op_type == "Relu":
            node.op_type = "Clip"
            node.input.extend(["zero", ""])
    proto.graph.initializer.append(onnx.helper.make_tensor("zero", onnx.TensorProto.FLOAT, [], [0.0]))
    assert from_onnx(proto).parameters


def test_batch_norms_that_stay_are_not_denied():
    (said,) = from_onnx(exported(randomised(pre_activated()))).warnings
    assert "into 1 of 2 convolutions; the step trains" in said


@pytest.mark.parametrize("network", [plain(), Residual(norm=False), Residual(norm=False, bias=True)])
@pytest.mark.parametrize("options", [{}, TRAINING, {"do_constant_folding": False}])
def test_nothing_is_said_of_networks_without_batch_norm(network, options):
    assert from_onnx(exported(network, train=bool(options), **options)).warnings == ()


def test_merged_parameters_are_separate():
    """New batch norms have equal statistics and factors, of which the exporter keeps one each in eval mode."""
    proto = exported(Residual(), do_constant_folding=False, training=torch.onnx.TrainingMode.EVAL)
    kept = {tensor.name for tensor in proto.graph.initializer}
    assert not {"bn2.weight", "bn3.bias", "bn1.running_mean"} & kept
    model = from_onnx(proto)
    norms = [f"bn{number}.{name}" for number in (1, 2, 3) for name in ("weight", "bias")]
    convolutions = [f"conv{number}.weight" for number in (1, 2, 3)]
    assert set(model.parameters) == {*norms, *convolutions, "fc.weight", "fc.bias"}
    assert set(model.states) == {f"bn{n}.running_{what}" for n in (1, 2, 3) for what in ("mean", "var")}
    assert all((model.parameters[name] == (1 if "weight" in name else 0)).all() for name in norms)


def test_tied_parameters_stay_tied():
    network = torch.nn.Sequential(
        torch.nn.Conv2d(3, 3, 3), torch.nn.Conv2d(3, 3, 3), torch.nn.Flatten(), torch.nn.Linear(12, 2)
    )
    network[1].weight = network[0].weight
    torch.nn.init.zeros_(network[0].bias)
    torch.nn.init.zeros_(network[1].bias)
    model = from_onnx(exported(network))
    assert set(model.parameters) == {"0.weight", "0.bias", "1.bias", "3.weight", "3.bias"}
    np.testing.assert_array_equal(model.parameters["0.weight"], network[0].weight.detach().numpy())


def optimised(rules, names, producer="pytorch"):
    """A graph as onnxscript's optimizer leaves it: a convolution with notes of its rules, and initializers so named."""
    helper = onnx.helper
    weight, *bias = names
    node = helper.make_node("Conv", ["x", *names], ["y"], "conv")
    if rules:
        entry = node.metadata_props.add()
        entry.key, entry.value = "pkg.onnxscript.rewriter.rule_name", rules
    shapes = {weight: (4, 3, 3, 3)} | dict.fromkeys(bias, (4,))
    graph = helper.make_graph(
        [node],
        "net",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1, 3, 6, 6])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1, 4, 4, 4])],
        [onnx.numpy_helper.from_array(np.ones(shape, "float32"), name) for name, shape in shapes.items()],
    )
    return helper.make_model(graph, producer_name=producer)


@pytest.mark.parametrize(
    ("rules", "names", "sentences"),
    [
        ("FuseBatchNormIntoConv", ["conv1.weight", "conv1.bias"], ["folded batch norms into 1 of 1"]),
        ("RemoveOptionalBiasFromConv, FuseBatchNormIntoConv", ["conv1.weight"], ["folded batch norms into 1 of 1"]),
        ("", ["conv1.weight", "conv1.weight_bias"], ["folded batch norms into 1 of 1"]),
        ("", ["onnx::Conv_12", "onnx::Conv_13"], ["folded batch norms into 1 of 1"]),
        ("", ["497", "498"], ["folded batch norms into 1 of 1"]),
        ("", ["conv/weights_fused_bn", "conv/bias_fused_bn"], ["folded batch norms into 1 of 1"]),
        ("RemoveOptionalBiasFromConv", ["conv1.weight"], ["removed the bias of 1 layer"]),
        ("", ["val_3", "conv1.bias"], ["1 tensor is a result of the exporter (val_3)"]),
        ("", ["onnx::Conv_12", "conv1.bias"], []),
        ("", ["features.0.weight", "features.0.bias"], []),
        ("", ["conv1.weight"], []),
    ],
)
def test_signs_of_an_exporter(rules, names, sentences):
    found = rewritten_layers(with_exported_parameters(optimised(rules, names)), "net.onnx")
    assert len(found) == len(sentences)
    assert all(sentence in said for sentence, said in zip(sentences, found, strict=True))


def test_opset_that_onnx_does_not_know(tmp_path):
    from tvm_convgrad.core.errors import ModelError
    from tvm_convgrad.training.frontends import load_model

    proto = optimised("", ["conv1.weight", "conv1.bias"])
    newest = onnx.defs.onnx_opset_version()
    proto.opset_import[0].version = newest + 1
    onnx.save(proto, tmp_path / "net.onnx")
    with pytest.raises(ModelError, match=f"uses opset {newest + 1}, but onnx .* supports opsets up to {newest}"):
        load_model(tmp_path / "net.onnx")
