# SPDX-License-Identifier: Apache-2.0
"""Whole training graphs in NHWC: transposes stand at the borders only, are counted, and the numbers stay right."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.compat import Constant
from relax_ops.passes.layout import ConvertLayout
from tests.layout.models import (
    Net,
    arguments,
    calls,
    mixed,
    mobilenet_v2,
    resnet18,
    resnet18_large,
    run,
    torch_gradients,
    training_module,
    transforms,
)
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step

MODELS = {
    "resnet18": (resnet18, (4, 3, 16, 16)),
    "resnet18_large": (resnet18_large, (4, 3, 64, 64)),
    "mobilenet_v2": (mobilenet_v2, (4, 3, 32, 32)),
    "mixed": (mixed, (2, 3, 16, 16)),
}
OWN = {"mixed": 1}
"""Transposes that a model has itself (a channel shuffle), which its backward pass has as well."""


def desired(kernel):
    return {f"relax.nn.conv2d{suffix}": ["NHWC", kernel] for suffix in ("", "_backward_weight", "_backward_data")}


@pytest.fixture(scope="module", params=MODELS)
def graph(request):
    module, net = training_module(*MODELS[request.param])
    return module, net, OWN.get(request.param, 0)


@pytest.mark.parametrize("kernel", ["OHWI", "HWIO"])
def test_stock_pass_leaves_transposes_at_the_borders(graph, kernel):
    """ConvertLayout transposes at each use, so a weight twice, and constants; still never between convolutions."""
    module, net, own = graph
    module = relax.transform.CanonicalizeBindings()(module)
    module = relax.transform.ConvertLayout(desired(kernel))(module)
    forward, both = transforms(module, "main"), transforms(module, "main_adjoint")
    assert forward == 1 + net.convolutions + own  # the input, each weight
    constants = sum(isinstance(c.args[0], Constant) for c in calls(module, "main_adjoint", "permute_dims"))
    assert both - constants <= forward + len(net.params)
    assert inner_transposes(module, "main_adjoint") == 2 * own + constants


@pytest.mark.parametrize("kernel", ["OHWI", "HWIO"])
def test_one_transpose_more_for_each_weight_gradient(graph, kernel):
    module, net, own = graph
    module = ConvertLayout(desired(kernel))(module)
    forward, both = transforms(module, "main"), transforms(module, "main_adjoint")
    if kernel == "HWIO":
        assert forward == 1 + net.convolutions + own
        assert both == forward + net.convolutions + own
    else:  # OIHW to OHWI is a reshape for 1x1 and depthwise kernels
        reshaped = sum(param.ty.ndim == 4 and (1 in (net.shape(param)[1], net.shape(param)[2])) for param in net.params)
        assert forward == 1 + net.convolutions - reshaped + own
        assert both == forward + net.convolutions - reshaped + own
    assert inner_transposes(module, "main_adjoint") == 2 * own


@pytest.mark.parametrize("kernel", ["OHWI", "HWIO"])
def test_every_convolution_is_converted(graph, kernel):
    module, net, _ = graph
    module = ConvertLayout(desired(kernel))(module)
    for direction, count in (("", net.convolutions), ("_backward_weight", net.convolutions)):
        found = calls(module, "main_adjoint", f"nn.conv2d{direction}")
        assert len(found) == count
        assert {(str(c.attrs.data_layout), str(c.attrs.kernel_layout)) for c in found} == {("NHWC", kernel)}
    assert len(calls(module, "main_adjoint", "nn.conv2d_backward_data")) == net.convolutions - 1


@pytest.mark.parametrize(
    ("name", "kernel"),
    [
        ("resnet18", "OHWI"),
        ("resnet18_large", "HWIO"),
        ("mobilenet_v2", "OHWI"),
        ("mixed", "HWIO"),
    ],
)
def test_gradients_match_torch_in_float64(name, kernel):
    torch = pytest.importorskip("torch")
    model, shape = MODELS[name]
    module, net = training_module(model, shape)
    arrays = arguments(net, shape)
    compare(
        run(ConvertLayout(desired(kernel))(module), "main_adjoint", arrays),
        torch_gradients(model, torch, arrays),
        1e-12,
    )


def test_gradients_match_the_unconverted_graph_in_float32():
    module, net = training_module(*MODELS["mixed"], dtype="float32")
    arrays = arguments(net, MODELS["mixed"][1])
    want = run(module, "main_adjoint", arrays)
    compare(run(ConvertLayout(desired("OHWI"))(module), "main_adjoint", arrays), want, 1e-5)


def compare(have, want, bound):
    """Largest difference relative to the largest gradient: some gradients, such as a bias's before a norm, are 0."""
    scale = max(np.abs(w).max() for w in want)
    assert len(have) == len(want)
    assert max(np.abs(h - w).max() for h, w in zip(have, want, strict=True)) <= bound * scale


def inner_transposes(module, function):
    """Transposes of what is not a parameter into what is not a result."""
    parameters = set(module[function].params)
    bindings = [b for block in module[function].body.blocks for b in block.bindings]
    results = {b.var for b in bindings if not isinstance(b.var, relax.DataflowVar)}
    return sum(
        isinstance(b.value, relax.Call)
        and str(b.value.op.name) == "relax.permute_dims"
        and b.value.args[0].ty.ndim > 2
        and b.value.args[0] not in parameters
        and b.var not in results
        for b in bindings
    )


def step_of(model, shape, **options):
    x, net = relax.Var("x", relax.TensorType(shape, "float32")), Net("float32")
    with net.builder.function("main"):
        with net.builder.dataflow():
            output = net.builder.emit_output(model(net, x))
        net.builder.emit_func_output(output, [x, *net.params])
    return build_step(from_module(net.builder.get()), **options), net


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(resnet18, {"momentum": 0.9, "weight_decay": 1e-4}), (mixed, {"optimizer": "adamw"})],
    ids=["resnet18-sgd", "mixed-adamw"],
)
def test_training_step_has_transposes_at_the_borders(model, optimizer):
    step, net = step_of(model, (4, 3, 16, 16), layout="NHWC", **optimizer)
    predict, whole = transforms(step.module, "predict"), transforms(step.module, "step")
    own = int(model is mixed)  # the channel shuffle
    assert predict <= 1 + net.convolutions + own
    # AdamW reads each gradient twice, as itself and squared.
    assert whole <= predict + own + net.convolutions * (2 if "optimizer" in optimizer else 1)


def test_training_step_computes_the_same():
    results = []
    for layout in ("NCHW", "NHWC", "NHWC:OHWI"):
        step, _ = step_of(mixed, (2, 3, 16, 16), layout=layout, momentum=0.9)
        rng = np.random.default_rng(5)
        x, labels = rng.standard_normal((2, 3, 16, 16)).astype("float32"), rng.integers(0, 10, 2)
        state = tuple(tvm.runtime.tensor(value) for value in step.initial_state)
        results.append(run(step.module, "step", [x, labels, np.float32(0.1), state]))
    for have, also, want in zip(*results, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(also, want, rtol=1e-4, atol=1e-5)
