# SPDX-License-Identifier: Apache-2.0
"""ONNX files of which several axes are free, stepped with several extents: results and gradients are PyTorch's."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.training.harness import Runner, relative_error  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

CHANNELS, RATE = 4, 1.0
EXTENTS = ((2, 8, 10), (3, 6, 9), (1, 13, 12))


def kernel(x):
    return torch.arange(9.0 * CHANNELS**2).sin().view(CHANNELS, CHANNELS, 3, 3).to(x.dtype)


OPERATIONS = {
    "avg_pool": lambda x: F.avg_pool2d(x, 3, 2, 1),
    "avg_pool_of_pixels": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False),
    "avg_pool_ceil": lambda x: F.avg_pool2d(x, 3, 2, 0, ceil_mode=True),
    "max_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "slice": lambda x: x[:, :, 1:-1],
    "slice_beyond": lambda x: x[:, :, :11, 2:],
    "slice_by_steps": lambda x: x[:, :, ::2, 1::2],
    "last": lambda x: x[:, :, -1],
    "flip": lambda x: x.flip(2) * x,
    "flip_of_two": lambda x: x.flip(2, 3) * x,
    "pad_reflect": lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect"),
    "softmax": lambda x: x.softmax(-1),
    "centred": lambda x: x - x.mean((2, 3), keepdim=True),
    "group_norm": lambda x: F.group_norm(x * x, 2),
    "layer_norm": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (CHANNELS,)) * x.permute(0, 3, 2, 1).mean((1, 2), True),
    "largest": lambda x: x.amax((2, 3)),
    "tokens": lambda x: (x.flatten(2).transpose(1, 2) @ x.flatten(2) * 0.1).softmax(-1) @ x.flatten(2).transpose(1, 2),
    "joined": lambda x: torch.cat([x, x * x], 3),
    "shuffled": lambda x: F.pixel_shuffle(x, 2),
    "running_sum": lambda x: x.cumsum(2),
    "divided": lambda x: x.sum((2, 3)) / x.shape[2],
    "expanded": lambda x: x.mean(2, keepdim=True).expand(-1, -1, x.shape[2], -1) * x,
    "split": lambda x: x.reshape(x.shape[0], 2, 2, x.shape[2], x.shape[3]).sum(2),
    "product": lambda x: x @ x.transpose(2, 3),
    "transposed_convolution": lambda x: F.conv_transpose2d(x, kernel(x), None, 2, 1),
    "strided_convolution": lambda x: F.conv2d(x, kernel(x), None, 2, 1),
}


class Operations(nn.Module):
    """The mean square of each operation's result, of an image scaled by parameters of the operation's own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterDict(
            {name: nn.Parameter(torch.linspace(0.5, 1.5, CHANNELS)[:, None, None]) for name in OPERATIONS}
        )

    def forward(self, x):
        results = [OPERATIONS[name](x * scale) for name, scale in self.scales.items()]
        return torch.stack([(each * each).mean(tuple(range(1, each.ndim))) for each in results], 1)


def exported(model, path, free):
    """The ONNX file of a model whose axes 0, 2 and 3 are free, by the older exporter, which leaves all to the graph."""
    torch.onnx.export(
        model,
        (torch.randn(2, CHANNELS, 8, 10),),
        path,
        input_names=["x"],
        dynamic_axes={"x": free},
        dynamo=False,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
    )
    return onnx.load(path)


@pytest.mark.filterwarnings("ignore")
def test_steps_of_several_extents_are_those_of_pytorch(tmp_path):
    torch.manual_seed(0)
    model = Operations().train()
    proto = exported(model, tmp_path / "model.onnx", {0: "samples", 2: "n", 3: "width"})
    runner = Runner(build_step(from_onnx(proto), loss="mse", lr=RATE))
    initial = {name: value.copy() for name, value in runner.named("parameter").items()}
    for extents in EXTENTS:
        x = torch.randn(extents[0], CHANNELS, *extents[1:])
        target = torch.randn(extents[0], len(OPERATIONS))
        reference = copy.deepcopy(model).double()
        wanted = reference(x.double())
        F.mse_loss(wanted, target.double()).backward()
        runner.reset()
        _, predictions = runner.step(x.numpy(), target.numpy(), lr=RATE)
        bound = 8 * 2.0**-24 * math.sqrt(CHANNELS * 4 * extents[1] * extents[2])
        for number, name in enumerate(OPERATIONS):
            column = wanted[:, number].detach()
            assert relative_error(predictions[:, number], column) < bound, (name, extents)
            moved = initial[f"scales.{name}"] - runner.named("parameter")[f"scales.{name}"]
            gradient = reference.scales[name].grad
            assert np.abs(moved - gradient.numpy()).max() < bound * max(1.0, float(gradient.abs().max())), (
                name,
                extents,
            )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "operation", [lambda x: F.interpolate(x, scale_factor=2.0), lambda x: x + torch.arange(x.shape[3]).to(x.dtype)]
)
def test_a_refusal_says_how_to_fix_the_extents(tmp_path, operation):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(CHANNELS, 2, 1)

        def forward(self, x):
            return operation(self.layer(x))

    proto = exported(Model(), tmp_path / "model.onnx", {0: "n", 2: "height", 3: "width"})
    with pytest.raises(ModelError, match=r"extents height, width of the inputs are free.*make_dynamic_shape_fixed"):
        from_onnx(proto)


def test_names_of_extents_are_shared_between_inputs():
    """Axes with one name have one extent; an axis named as the batch has the batch's, one without a name its own."""
    from onnx import TensorProto, helper

    shapes = {"x": ["batch", "n", 3], "y": ["batch", "n", 3], "z": ["batch", "batch", None]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    nodes = [
        helper.make_node("Add", ["x", "y"], ["a"]),
        helper.make_node("ReduceMean", ["a"], ["b"], axes=[1], keepdims=0),
        helper.make_node("ReduceMean", ["z"], ["c"], axes=[1, 2], keepdims=0),
        helper.make_node("Unsqueeze", ["c", "one"], ["d"]),
        helper.make_node("Add", ["b", "d"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["f"]),
    ]
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, [3, 2], np.ones(6, "float32")),
        helper.make_tensor("one", TensorProto.INT64, [1], [1]),
    ]
    output = helper.make_tensor_value_info("f", TensorProto.FLOAT, ["batch", 2])
    graph = helper.make_graph(nodes, "g", inputs, [output], weights)
    model = from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))
    x, y, z = ([str(extent) for extent in each.shape] for each in model.inputs)
    assert x == y == ["batch", "n", "3"]
    assert z == ["batch", "batch", "z_2"]
