# SPDX-License-Identifier: Apache-2.0
"""The models that are trained and the layers that are differentiated, as files for each contender."""

from __future__ import annotations

import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.architectures import Architecture
from tvm_convgrad.core.problem import ConvProblem

OPSET = 17
"""Of the ONNX files: one that onnxruntime-training 1.19 has gradients for."""

LAYERS = {
    "3x3, 64 channels, 56²": "mb1ic64ih56oc64oh56kh3ph1",
    "1x1, 256 to 64, 56²": "mb1ic256ih56oc64oh56kh1",
    "3x3 stride 2, 128 to 256, 28²": "mb1ic128ih28oc256oh14kh3sh2ph1",
    "depthwise 3x3, 96 channels, 56²": "g96mb1ic96ih56oc96oh56kh3ph1",
}
"""Convolutions of ResNet-50 and MobileNetV2, by their problem."""


@dataclass(frozen=True)
class Trained:
    """A model that is trained.

    Attributes:
        title: of its row.
        name: of the model, a key of `_made`.
        batch, size: samples, and the extent of their images.
        contenders: who trains it beside us.
        frozen: batch norms keep their running statistics, but learn their scale and shift.
    """

    title: str
    name: str
    batch: int
    size: int
    contenders: tuple[str, ...] = ("onnxruntime",)
    frozen: bool = False


EXECUTORCH = ("executorch",)
MODELS = (
    Trained("digits CNN", "digits", 16, 8),
    Trained("MobileNetV2", "mobilenet_v2", 8, 224),
    Trained("MobileNetV3-small", "mobilenet_v3_small", 8, 224),
    Trained("digits CNN, frozen statistics", "digits", 16, 8, EXECUTORCH, frozen=True),
    Trained("MobileNetV3-small, frozen statistics", "mobilenet_v3_small", 1, 224, EXECUTORCH, frozen=True),
    Trained("MobileNetV2, frozen statistics", "mobilenet_v2", 1, 224, EXECUTORCH, frozen=True),
)


class DigitsCnn(nn.Module):
    """The network of examples/digits_cnn.py; `means` in the place of its pool, whose gradient ExecuTorch lacks."""

    def __init__(self, means: bool) -> None:
        super().__init__()
        self.means = means
        self.stem = _normed(1, 16)
        self.first, self.dilated = _normed(16, 16), _normed(16, 16, dilation=2, padding=2)
        self.strided = _normed(16, 32, stride=2)
        self.depthwise, self.pointwise = _normed(32, 32, groups=32), _normed(32, 32, kernel_size=1, padding=0)
        self.scores = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of images [n, 1, 8, 8]."""
        x = F.relu(self.stem(x))
        x = F.relu(x + self.dilated(F.relu(self.first(x))))
        x = F.relu(self.strided(x))
        x = F.relu(x + self.pointwise(F.relu(self.depthwise(x))))
        x = x.view(-1, 32, 2, 2, 2, 2).mean((3, 5)) if self.means else F.avg_pool2d(x, 2)
        return self.scores(x.flatten(1))


def _normed(into: int, out: int, kernel_size: int = 3, padding: int = 1, **options: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(into, out, kernel_size, padding=padding, bias=False, **options), nn.BatchNorm2d(out))


class WithLoss(nn.Module):
    """A model that returns its loss, as ExecuTorch wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The loss, and the classes."""
        scores = self.model(x)
        return F.cross_entropy(scores, y), scores.detach().argmax(1)


class Gradients(nn.Module):
    """Both gradients of a convolution, by aten's operator."""

    def __init__(self, problem: ConvProblem) -> None:
        super().__init__()
        low = [int(pad[0]) for pad in problem.padding]
        self.options = (list(problem.strides), low, list(problem.dilation), False, [0, 0], problem.groups)

    def forward(self, dy: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        """dX and dW."""
        return torch.ops.aten.convolution_backward(dy, x, w, None, *self.options, [True, True, False])[:2]


def module_of(trained: Trained) -> nn.Module:
    """The network in train mode with its initial values, without dropout."""
    torch.manual_seed(0)
    if trained.name == "digits":
        model: nn.Module = DigitsCnn(means=trained.frozen)
    else:
        model = Architecture(f"torchvision:{trained.name}").make()
    model.train()
    for name, part in list(model.named_modules()):
        if isinstance(part, nn.Dropout):
            model.set_submodule(name, nn.Identity())
        elif isinstance(part, nn.BatchNorm2d) and trained.frozen:
            part.eval()
    return model


def write_model(trained: Trained, folder: Path) -> None:
    """Write batch.npz, model.onnx, and joint.pt2, the program with its loss."""
    model = module_of(trained)
    random = np.random.default_rng(0)
    channels = 1 if trained.name == "digits" else 3
    x = random.standard_normal((trained.batch, channels, trained.size, trained.size), "float32")
    y = random.integers(0, 10, trained.batch)
    np.savez(folder / "batch.npz", x=x, y=y)
    given = (torch.from_numpy(x), torch.from_numpy(y))
    torch.export.save(torch.export.export(WithLoss(model), given, strict=True), folder / "joint.pt2")
    stream, mode = io.BytesIO(), torch.onnx.TrainingMode.PRESERVE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            given[:1],
            stream,
            dynamo=False,
            training=mode,
            do_constant_folding=False,
            opset_version=OPSET,
        )
    (folder / "model.onnx").write_bytes(stream.getvalue())


def write_layer(descriptor: str, folder: Path) -> None:
    """Write layer.json, batch.npz and layer.pt2, the program of both gradients."""
    problem = ConvProblem.from_descriptor(descriptor)
    random = np.random.default_rng(0)
    shapes = {name: tuple(map(int, problem.tensors[name][0])) for name in ("grad", "data", "weight")}
    arrays = {name: random.standard_normal(shape, "float32") for name, shape in shapes.items()}
    np.savez(folder / "batch.npz", dy=arrays["grad"], x=arrays["data"], w=arrays["weight"])
    (folder / "layer.json").write_text(json.dumps(descriptor))
    given = tuple(map(torch.from_numpy, arrays.values()))
    torch.export.save(torch.export.export(Gradients(problem), given), folder / "layer.pt2")
