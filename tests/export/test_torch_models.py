# SPDX-License-Identifier: Apache-2.0
"""State dicts of steps that come from PyTorch: `load_state_dict(strict=True)` takes them, and predictions are ours."""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from tests.cli.command import Command  # noqa: E402
from tests.export import models  # noqa: E402
from tvm_convgrad.training.runtime.checkpoint import Progress, save  # noqa: E402
from tvm_convgrad.training.runtime.session import Session  # noqa: E402


class Net(torch.nn.Module):
    """Two batch norms, of which one may be frozen; tied linear layers, an index, a narrow and an unread tensor."""

    def __init__(self, extras: bool) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 6, 3, stride=2, padding=1, bias=False)
        self.bn1, self.bn2 = torch.nn.BatchNorm2d(6), torch.nn.BatchNorm2d(6)
        self.a, self.b = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.fc = torch.nn.Linear(6, models.CLASSES)
        self.extras = extras
        if extras:
            self.b.weight = self.a.weight
            self.register_buffer("order", torch.tensor([5, 4, 3, 2, 1, 0]))
            self.register_buffer("scratch", torch.ones(6), persistent=False)
            self.register_buffer("gain", torch.tensor([1.0, 0.5, 2.0, 1.5, 1.25, 0.75], dtype=torch.bfloat16))
            self.unused = torch.nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn2(self.bn1(self.conv(x)).relu()).mean((2, 3))
        if self.extras:
            x = x[:, self.order] * self.scratch * self.gain.float()
        return self.fc(self.b(self.a(x).relu()).relu())


def write(network: torch.nn.Module, path: Path, exporter: str) -> None:
    example = torch.zeros(models.BATCH, 1, 6, 6)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "torch.export":
            torch.export.save(torch.export.export(network, (example,)), path)
        elif exporter == "dynamo":
            pytest.importorskip("onnxscript")
            torch.onnx.export(
                network, (example,), path, dynamo=True, optimize=False, external_data=False, verbose=False
            )
        else:
            mode = torch.onnx.TrainingMode.TRAINING
            stream = io.BytesIO()
            torch.onnx.export(network, (example,), stream, dynamo=False, training=mode, do_constant_folding=False)
            path.write_bytes(stream.getvalue())


def trained(folder: Path, model: Path, steps: int, **options: object) -> tuple[Path, Path, Session]:
    """A step of a model, a checkpoint after some steps, and the session."""
    step = models.build(model, folder / "step.so", lr=0.1, momentum=0.9, **options)
    session, losses = Session(step), []
    for number in range(steps):
        x, _, y = models.batch_of(number)
        losses.append(session.step(x, y)[0])
    progress = Progress(session.artifact.id, "0" * 64, 0, models.BATCH, 0.1, losses=losses)
    return step, save(folder, progress, session.state), session


@pytest.mark.parametrize(
    ("exporter", "extras", "mode", "options"),
    [
        ("torch.export", True, True, {}),
        ("torch.export", True, False, {"bn": "frozen"}),
        ("torch.export", False, True, {"trained": ("bn2", "fc", "a")}),
        ("TorchScript", False, True, {}),
        ("TorchScript", False, True, {"trained": ("bn2", "fc")}),
        ("dynamo", False, True, {"bn": "frozen"}),
        ("dynamo", False, True, {}),
    ],
)
def test_strict_loading(
    convgrad: Command, tmp_path: Path, exporter: str, extras: bool, mode: bool, options: dict[str, object]
) -> None:
    torch.manual_seed(0)
    network = Net(extras).train(mode)
    model = tmp_path / ("net.pt2" if exporter == "torch.export" else "net.onnx")
    write(network, model, exporter)
    step, checkpoint, session = trained(tmp_path, model, 3, **options)
    output = tmp_path / "trained.safetensors"
    done = convgrad("export", step, "--checkpoint", checkpoint, "--model", model, "-o", output)
    assert done.code == 0, done.err

    state = load_file(output)
    fresh = Net(extras)
    fresh.load_state_dict(state, strict=True)
    moved = options.get("bn") != "frozen"
    frozen_norm = "bn2" in options.get("trained", ())
    assert int(fresh.bn1.num_batches_tracked) == (3 if moved and not frozen_norm else 0)
    assert int(fresh.bn2.num_batches_tracked) == (3 if moved else 0)
    if extras:
        assert torch.equal(fresh.unused, network.unused)
        assert torch.equal(fresh.a.weight, fresh.b.weight)
        assert not torch.equal(fresh.a.weight, network.a.weight)
    x, _, _ = models.batch_of(9)
    with torch.no_grad():
        expected = fresh.eval()(torch.from_numpy(x)).numpy()
    found = session.predict(x)
    # 9 + 1 terms in the convolution, 8 roundings in each batch norm, 10 in the mean, 7 in each linear layer.
    unit, bound = 2.0**-24, _largest(fresh, x)
    assert (np.abs(found - expected) <= 2 * 60 * unit * bound).all()
    assert 2 * 60 * unit * bound.max() < 1e-3


class Filtered(torch.nn.Module):
    """A complex weight and a complex buffer in the spectrum of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.register_buffer("shift", torch.randn(4, dtype=torch.complex64))
        self.fc = torch.nn.Linear(36, models.CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.fft.rfft2(x, norm="ortho") * self.weight + self.shift
        return self.fc(torch.fft.irfft2(z, s=(6, 6), norm="ortho").flatten(1))


def test_complex_weights_are_complex_again(convgrad: Command, tmp_path: Path) -> None:
    torch.manual_seed(0)
    network, model, output = Filtered(), tmp_path / "net.pt2", tmp_path / "trained.safetensors"
    write(network, model, "torch.export")
    step, checkpoint, session = trained(tmp_path, model, 2)
    done = convgrad("export", step, "--checkpoint", checkpoint, "--model", model, "-o", output)
    assert done.code == 0, done.err
    fresh = Filtered()
    fresh.load_state_dict(load_file(output), strict=True)
    assert fresh.weight.is_complex()
    assert not torch.equal(fresh.weight, network.weight)
    assert torch.equal(fresh.shift, network.shift)
    x, _, _ = models.batch_of(9)
    with torch.no_grad():
        expected = fresh(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(session.predict(x), expected, rtol=0, atol=1e-5 * max(np.abs(expected).max(), 1))


def _largest(network: Net, x: np.ndarray) -> np.ndarray:
    """The network of absolute values: what a rounding error of one unit is relative to, at the most."""
    copy = Net(network.extras).double().eval()
    copy.load_state_dict(network.state_dict())
    with torch.no_grad():
        for name, value in [*copy.named_parameters(), *copy.named_buffers()]:
            if value.is_floating_point():
                value.copy_(-value.abs() if name.endswith("running_mean") else value.abs())
        return copy(torch.from_numpy(np.abs(x)).double()).numpy()


def test_a_pt2_file_is_no_onnx_model(convgrad: Command, tmp_path: Path) -> None:
    model = tmp_path / "net.pt2"
    write(Net(False), model, "torch.export")
    step, checkpoint, _ = trained(tmp_path, model, 1)
    arguments = ["export", step, "--checkpoint", checkpoint, "--model", model]
    convgrad(*arguments, "-o", tmp_path / "trained.onnx").assert_sentence("built from net.pt2, not from an ONNX file")
    assert not (tmp_path / "trained.onnx").exists()
