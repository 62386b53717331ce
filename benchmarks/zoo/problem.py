# SPDX-License-Identifier: Apache-2.0
"""What a case trains: inputs and target of a batch, PyTorch's step on them, and the file that PyTorch exports."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.zoo.architectures import Architecture
from tvm_convgrad.training.model.outputs import Outputs

FORMS = ("train", "eval", "onnx")
"""`.pt2` exported in training mode, `.pt2` in evaluation mode, and what torch.onnx.export writes by default."""


@dataclass(frozen=True)
class Problem:
    """What is trained: inputs and target of one batch, and which output, if there are several."""

    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: str
    outputs: Outputs | None = None


def draw(module: nn.Module, architecture: Architecture, batch: int, seed: int) -> Problem:
    """Inputs and a target that fits the model's (first) output."""
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(torch.randn(batch, *shape, generator=generator) for shape in architecture.shapes)
    with torch.no_grad():
        found = copy.deepcopy(module).eval()(*inputs)
    shape = first_tensor(found).shape
    outputs = {"0": 1.0} if len(torch.utils._pytree.tree_leaves(found)) > 1 else None
    if len(shape) >= 2 and shape[1] > 1:
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
        return Problem(inputs, target, "cross_entropy", outputs)
    return Problem(inputs, torch.randn(shape, generator=generator), "mse", outputs)


def make_distinct(module: nn.Module) -> None:
    """Move parameters that are constant, such as those of new batch norms, a little apart.

    The exporter to ONNX makes one layer of two that read the same tensor with equal values, which those of a trained
    model never have.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in module.parameters():
            if value.numel() and bool((value == value.flatten()[0]).all()):
                value.add_(0.01 * torch.randn(value.shape, generator=generator))


def first_tensor(value: object) -> Tensor:
    """The first tensor of a nested output, in the order in which torch.export flattens it."""
    return torch.utils._pytree.tree_flatten(value)[0][0]


def export(module: nn.Module, problem: Problem, form: str, folder: Path) -> Path:
    """Write the model as PyTorch does by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "onnx":
            path = folder / "model.onnx"
            torch.onnx.export(module, problem.inputs, path, verbose=False)
            return path
        path = folder / "model.pt2"
        torch.export.save(torch.export.export(module, problem.inputs), path)
        return path


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """No dropout, of modules or of functions, and no dropped paths."""
    kept = []
    for part in module.modules():
        kind = type(part).__name__.lower()
        for name in ("p", "drop_prob"):
            dropping = "drop" in kind or "stochasticdepth" in kind
            if dropping and isinstance(getattr(part, name, None), float):
                kept.append((part, name, getattr(part, name)))
                setattr(part, name, 0.0)

    def unchanged(x: Tensor, *_arguments: object, **_options: object) -> Tensor:
        return x

    with mock.patch("torch.nn.functional.dropout", unchanged), mock.patch("torch.dropout", unchanged):
        yield
    for part, name, value in kept:
        setattr(part, name, value)


def torch_step_of(module: nn.Module, problem: Problem, dtype: torch.dtype) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and by name (each that the model has) the gradients and new running statistics, of PyTorch in a type.

    Parameters that the loss does not depend on have no gradient in PyTorch, which is zero here.
    """
    twin = copy.deepcopy(module).to(dtype)
    inputs = [value.to(dtype) for value in problem.inputs]
    criterion = nn.functional.mse_loss if problem.loss == "mse" else nn.functional.cross_entropy
    target = problem.target.to(dtype) if problem.target.is_floating_point() else problem.target
    with without_dropout(twin):
        loss = criterion(first_tensor(twin(*inputs)), target)
    loss.backward()
    found = {
        name: torch.zeros_like(value) if value.grad is None else value.grad
        for name, value in twin.named_parameters(remove_duplicate=False)
    }
    found |= dict(twin.named_buffers(remove_duplicate=False))
    return loss.item(), {name: value.detach().double().numpy() for name, value in found.items()}
