# SPDX-License-Identifier: Apache-2.0
"""Operators that onnx's reference lacks or computes in float32, as torch.onnx.export writes them, against PyTorch.

One graph and one compiled step for each exporter; that of torch.export needs the package onnxscript.
"""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")

import torch.nn.functional as F  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tests.training.torch_operators import TOPICS, _grid  # noqa: E402
from tests.training.torch_topics import SHAPE, Topic, volume  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

UNIT = 2.0**-24
SHARED = {
    "selection": ("index_list", "fill_slice", "add_in_place", "index_put", "diagonal"),
    "joining": ("fold", "fold_overlapping", "einsum", "unfold_image"),
    "resizing": ("nearest_1d", "trilinear", "bicubic", "grid_sample", "affine_grid"),
    "activations": ("gelu", "gelu_tanh", "glu"),
    "layers": (
        "group_norm",
        "attention_causal",
        "conv_same",
        "conv_transpose_3d_grouped",
        "lstm",
        "transformer",
    ),
}
"""By topic: functions of tests.training.torch_operators."""
OWN = {
    "grid_cubic": lambda x: F.grid_sample(x, _grid(x), mode="bicubic", align_corners=False),
    "grid_reflection": lambda x: F.grid_sample(x, _grid(x), "bilinear", "reflection", align_corners=False),
    "grid_nearest": lambda x: F.grid_sample(x, _grid(x).detach() * 1.3, "nearest", "border", align_corners=False),
    "grid_volume": lambda x: F.grid_sample(
        volume(x), torch.tanh(x[:, :, :3, :6].reshape(-1, 2, 3, 4, 3)), align_corners=False
    ),
    "max_pool_places": lambda x: F.max_pool2d(x, 3, 2, 1, return_indices=True)[0],
}
FUNCTIONS = OWN | {name: TOPICS[topic][name] for topic, names in SHARED.items() for name in names}
EXPORTERS = {"TorchScript": {"dynamo": False}, "torch.export": {}, "torch.export, not optimised": {"optimize": False}}


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_gradients_are_those_of_pytorch(exporter):
    """The loss is a sum of squares, and the learning rate 1, so that a parameter's change is its gradient."""
    if EXPORTERS[exporter].get("dynamo", True):
        pytest.importorskip("onnxscript")
    torch.manual_seed(0)
    network = Topic(FUNCTIONS).eval()
    for offsets in network.offsets.values():  # equal ones would be merged, and then the sums with the input
        torch.nn.init.normal_(offsets, std=0.01)
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    outputs, target, wanted = reference(network, x)
    stream = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network, (x,), stream, **EXPORTERS[exporter])
    runner = Runner(build_step(from_onnx(onnx.load_from_string(stream.getvalue())), loss="mse", lr=1.0))
    before = runner.named("parameter")
    np.testing.assert_allclose(runner.predict(x.numpy()), outputs, rtol=0, atol=200 * UNIT * np.abs(outputs).max())
    runner.step(x.numpy(), target, lr=float(target.size))
    after = runner.named("parameter")
    wrong = {}
    for name, gradient in wanted.items():
        if name.startswith("offsets."):
            found = before[name].astype("float64") - after[name]
            difference = float(np.abs(found - gradient).max() / max(np.abs(gradient).max(), 1.0) / UNIT)
            if not difference <= 400:
                wrong[name] = difference
    assert wrong == {}


def reference(network, x):
    """Outputs, a target, and gradients by name, in float64."""
    network = copy.deepcopy(network).double()
    torch.set_default_dtype(torch.float64)
    try:
        outputs = network(x.double())
        target = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64).float()
        ((outputs - target) ** 2).sum().backward()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = {name: value.grad.numpy() for name, value in network.named_parameters() if value.grad is not None}
    return outputs.detach().numpy(), target.numpy(), gradients
