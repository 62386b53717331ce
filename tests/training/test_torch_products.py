# SPDX-License-Identifier: Apache-2.0
"""Linear layers of tensors of three and more axes: one product of all rows, where the file has a batch of products."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.training.frontends import load_model  # noqa: E402
from tvm_convgrad.training.ir.graph import bindings_of, operator_name  # noqa: E402
from tvm_convgrad.training.model.model import Model  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

WIDTH, CLASSES, BATCH = 6, 5, 2
VIEWS = {
    "rows": lambda x: x.flatten(2).transpose(1, 2),
    "windows": lambda x: x.permute(0, 2, 3, 1).reshape(x.shape[0], 2, 2, 3, 2, WIDTH).transpose(2, 3),
    "heads": lambda x: x.reshape(x.shape[0], WIDTH, 4, 6).permute(0, 2, 3, 1),
    "one": lambda x: x[:1].flatten(2).transpose(1, 2).expand(BATCH, -1, -1),
}


class Network(nn.Module):
    """A linear layer, with and without a bias, of a view of a tensor of four axes."""

    def __init__(self, view: Callable[[Any], Any]) -> None:
        super().__init__()
        self.view = view
        self.first, self.second = nn.Linear(WIDTH, 7), nn.Linear(WIDTH, CLASSES, bias=False)
        self.last = nn.Linear(7, CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.view(x)
        y = self.last(self.first(x)) + self.second(x)
        return y.reshape(x.shape[0], -1, CLASSES).mean(1)


def model_of(network: nn.Module, x: Any, form: str, batch: str, folder: Path) -> Model:
    """The network, from a file of the form, with a batch that is fixed or not."""
    path, is_free = folder / f"network.{form}", batch == "dynamic"
    if form == "pt2":
        shapes = {"x": {0: torch.export.Dim("n")}} if is_free else None
        torch.export.save(torch.export.export(network, (x,), dynamic_shapes=shapes), path)
        return load_model(path)
    pytest.importorskip("onnx")
    axes = {"x": {0: "n"}} if is_free else None
    torch.onnx.export(network, (x,), path, dynamo=False, input_names=["x"], dynamic_axes=axes)
    return load_model(path, batch=batch if is_free else None)


def matrices(step: Any) -> Iterator[Any]:
    """The second operand of each matrix product of a step."""
    for function in step.module.functions.values():
        if isinstance(function, tvm.relax.Function):
            for binding in bindings_of(function):
                if isinstance(binding.value, tvm.ir.Call) and operator_name(binding.value) == "relax.matmul":
                    yield binding.value.args[1]


@pytest.mark.parametrize("batch", ["fixed", "dynamic"])
@pytest.mark.parametrize("form", ["pt2", "onnx"])
@pytest.mark.parametrize("view", VIEWS)
def test_one_product_of_all_rows(view: str, form: str, batch: str, tmp_path: Path) -> None:
    """As PyTorch in float64, to the rounding of sums of at most 48 terms; no product has a batch of weights."""
    if (view, batch) == ("one", "dynamic"):
        pytest.skip("this view takes the first of two samples, so that its batch is fixed")
    torch.manual_seed(0)
    network = Network(VIEWS[view])
    x, y = torch.randn(BATCH, WIDTH, 4, 6), torch.tensor([1, 3])
    step = build_step(model_of(network, x, form, batch, tmp_path), lr=1.0)
    products = list(matrices(step))
    assert products
    assert {len(right.ty.shape) for right in products} == {2}
    reference = copy.deepcopy(network).double()
    loss = nn.functional.cross_entropy(reference(x.double()), y)
    loss.backward()
    runner = Runner(step)
    found, _ = runner.step(x.numpy(), y.numpy(), lr=1.0)
    bound = 48 * np.finfo("float32").eps
    assert abs(float(found) - loss.item()) <= bound * max(abs(loss.item()), 1)
    for name, value in reference.named_parameters():
        wanted = (value - value.grad).detach().numpy()
        np.testing.assert_allclose(runner.named()[name], wanted, rtol=0, atol=bound * max(np.abs(wanted).max(), 1))
