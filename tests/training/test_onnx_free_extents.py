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
    "max_pool_ceil": lambda x: F.max_pool2d(x, 3, 2, 0, ceil_mode=True),
    "slice": lambda x: x[:, :, 1:-1],
    "slice_of_both": lambda x: x[:, :, 1:-1, :5],
    "slice_from_the_end": lambda x: x[:, :, -7:-2, 1:],
    "slice_beyond": lambda x: x[:, :, :11, 2:],
    "enlarged": lambda x: F.interpolate(x, scale_factor=2.0),
    "enlarged_linearly": lambda x: F.interpolate(x, scale_factor=3.0, mode="bilinear"),
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
    "operation",
    [
        lambda x: F.interpolate(x, scale_factor=1.5),
        lambda x: x + torch.arange(x.shape[3]).to(x.dtype),
        lambda x: x / (x.shape[2] + 1),
    ],
    ids=["resize", "range", "formula"],
)
def test_a_refusal_says_how_to_fix_the_extents(tmp_path, operation):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(CHANNELS, 2, 1)

        def forward(self, x):
            return operation(self.layer(x))

    proto = exported(Model(), tmp_path / "model.onnx", {0: "n", 2: "the height", 3: "width"})
    with pytest.raises(
        ModelError, match=r"the batch \(the height, width\).*make_dynamic_shape_fixed --dim_param 'the height' --"
    ):
        from_onnx(proto)


def graph_of(nodes, shapes, results, weights=()):
    """A model of nodes with inputs of these shapes."""
    from onnx import TensorProto, helper

    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in results.items()]
    graph = helper.make_graph(
        nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(value, name) for name, value in weights]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])


def test_padding_that_follows_from_a_free_extent_is_refused():
    from onnx import helper

    node = helper.make_node("Conv", ["x", "w"], ["y"], "first", auto_pad="SAME_UPPER", strides=[2, 2])
    weights = [("w", np.ones((2, 3, 3, 3), "float32"))]
    with pytest.raises(ModelError, match=r"Conv 'first': auto_pad=SAME_UPPER .* --input_name x --input_shape"):
        from_onnx(graph_of([node], {"x": ["n", 3, None, 8]}, {"y": ["n", 2, None, 4]}, weights))


@pytest.mark.parametrize("height", [7, "height"])
@pytest.mark.parametrize("scale", [0.6, 1.5])
def test_scales_of_a_resize_may_be_an_initializer(height, scale):
    """They are constants, whatever else is a parameter; TVM's importer gave other numbers for such files."""
    from onnx import helper
    from onnx.reference import ReferenceEvaluator

    nodes = [
        helper.make_node("Mul", ["x", "w"], ["a"]),
        helper.make_node(
            "Resize", ["a", "", "scales"], ["y"], mode="linear", coordinate_transformation_mode="half_pixel"
        ),
    ]
    weights = [("w", np.full((1, 2, 1, 1), 1.5, "float32")), ("scales", np.array([1, 1, scale, 1], "float32"))]
    proto = graph_of(nodes, {"x": ["n", 2, height, 5]}, {"y": ["n", 2, None, 5]}, weights)
    if height == "height":
        with pytest.raises(ModelError, match="by a whole factor only"):
            from_onnx(proto)
        return
    x = np.random.default_rng(0).standard_normal((3, 2, height, 5)).astype("float32")
    found = Runner(build_step(from_onnx(proto), loss="mse")).predict(x)
    (wanted,) = ReferenceEvaluator(proto).run(None, {"x": x})
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() < 1e-5


@pytest.mark.parametrize(
    ("shapes", "names"),
    [
        ({"x": ["batch", "n", 3], "y": ["batch", "n", 3]}, [["n_1", "n", "3"], ["n_1", "n", "3"]]),
        ({"x": ["N", "batch", 3], "y": ["N", "n", 3]}, [["n_1", "batch", "3"], ["n_1", "n", "3"]]),
        ({"x": ["N", "h w", 3], "y": ["N", "h_w", 3]}, [["n", "h_w", "3"], ["n", "h_w_1", "3"]]),
        ({"x": ["N", None, 3], "y": ["N", "x_1", 3]}, [["n", "x_1", "3"], ["n", "x_1_1", "3"]]),
        ({"x": ["N", "N", 3], "y": ["N", "2*k", "T"]}, [["n", "n", "3"], ["n", "_2_k", "_T"]]),
    ],
)
def test_names_of_extents(shapes, names):
    """Axes with one name have one extent, two names are never one; an axis named as the batch has the batch's."""
    from onnx import helper

    nodes = [helper.make_node("ReduceMean", [name], [f"{name}1"], axes=[1, 2], keepdims=1) for name in shapes]
    nodes += [helper.make_node("Add", ["x1", "y1"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["b"])]
    weights = [("w", np.ones((1, 2), "float32"))]
    model = from_onnx(graph_of(nodes, shapes, {"b": [None, 1, 2]}, weights))
    assert [[str(extent) for extent in each.shape] for each in model.inputs] == names


def test_a_batch_of_one_input_that_is_an_axis_of_another_is_refused():
    from onnx import helper

    nodes = [helper.make_node("Add", ["x", "y"], ["a"]), helper.make_node("MatMul", ["a", "w"], ["b"])]
    proto = graph_of(
        nodes, {"x": ["N", "seq", 3], "y": ["seq", 3]}, {"b": ["N", "seq", 2]}, [("w", np.ones((3, 2), "float32"))]
    )
    with pytest.raises(ModelError, match="batches N, seq, one of which names another axis"):
        from_onnx(proto)
