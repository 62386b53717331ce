# SPDX-License-Identifier: Apache-2.0
"""Parameters without an axis in ONNX files of PyTorch: trained, or constants with a warning, never silently fixed."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")

from tests.training.beside_torch import train_beside  # noqa: E402
from tests.training.harness import Runner, relative_error  # noqa: E402
from tvm_convgrad.training.frontends.onnx.model import from_onnx  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402


class Gated(torch.nn.Module):
    """`region` ends with letters that TVM's importer strips, `merged` equals a constant of the same graph."""

    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 4, 3)
        self.region = torch.nn.Parameter(torch.tensor(0.75))
        self.merged = torch.nn.Parameter(torch.tensor(3.0))
        self.register_buffer("offset", torch.tensor(0.25))

    def forward(self, x):
        h = self.convolution(x).mean((2, 3)) + self.offset
        return h * self.region + h.sigmoid() * 3.0 * self.merged


def exported(model, x, path, **options):
    torch.onnx.export(copy.deepcopy(model), (x,), path, **options)
    return from_onnx(onnx.load(path))


def test_a_listed_parameter_is_trained_unless_a_constant_shares_it(tmp_path):
    torch.manual_seed(0)
    model = Gated().train()
    reference = copy.deepcopy(model).double()
    reference.merged.requires_grad_(False)
    x, labels = torch.randn(3, 4, 2, 5, 5), torch.randint(0, 4, (3, 4))
    found = exported(model, x[0], tmp_path / "model.onnx", dynamo=True)
    (warning,) = found.warnings
    assert "1 number of the model is not trained (merged)" in warning
    runner = Runner(build_step(found, lr=0.1))
    train_beside(runner, reference, zip(x, labels, strict=True), 0.1)
    state = runner.named("parameter")
    assert set(state) == {"convolution.weight", "convolution.bias", "region"}
    for name, value in state.items():
        assert relative_error(value, reference.state_dict()[name].numpy()) < 1e-5, name
    assert abs(state["region"] - 0.75) > 1e-3


def test_a_file_without_a_list_warns(tmp_path):
    options = {"dynamo": False, "training": torch.onnx.TrainingMode.TRAINING, "do_constant_folding": False}
    found = exported(Gated().train(), torch.randn(4, 2, 5, 5), tmp_path / "model.onnx", **options)
    (warning,) = found.warnings
    assert "3 numbers are not trained (" in warning
    assert all(name in warning for name in ("region", "merged", "offset", "give them the shape (1,)"))
    assert set(found.parameters) == {"convolution.weight", "convolution.bias"}


class Scaled(torch.nn.Module):
    """The exporter computes 1 + p and p / 2, of which the file does not say that they follow from a parameter."""

    def __init__(self):
        super().__init__()
        self.p = torch.nn.Parameter(torch.tensor(0.25))
        self.linear = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.linear(x * (1 + self.p) - self.p * 0.5)


def test_numbers_that_the_exporter_computes_are_constants_with_a_warning(tmp_path):
    found = exported(Scaled().train(), torch.randn(4, 8), tmp_path / "model.onnx", dynamo=True)
    (warning,) = found.warnings
    assert "2 numbers are not trained (" in warning
    assert "give them the shape (1,)" in warning
    assert set(found.parameters) == {"linear.weight", "linear.bias"}
