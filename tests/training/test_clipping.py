# SPDX-License-Identifier: Apache-2.0
"""Bounds on gradients, and weight decay of matrices only, against steps of PyTorch in float64."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm import relax

from tests.training.harness import Runner
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.options import StepOptions

SHAPES = {"w": (4, 3), "b": (3,)}
OPTIMIZERS = {
    "sgd": {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1},
    "adamw": {"lr": 0.05, "weight_decay": 0.3},
    "adam": {"lr": 0.05, "weight_decay": 0.3},
}


def linear():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((4, 4), "float32"))
    params = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in SHAPES.items()}
    with builder.function("main", [x, *params.values()]):
        with builder.dataflow():
            y = builder.emit(relax.op.matmul(x, params["w"]))
            y = builder.emit_output(relax.op.add(y, params["b"]))
        builder.emit_func_output(y)
    random = np.random.default_rng(0)
    values = {name: random.normal(0, 1, shape).astype("float32") for name, shape in SHAPES.items()}
    return from_module(builder.get(), parameters=values), values


CASES = [
    ("sgd", {"clip_norm": 0.7}, 1),
    ("sgd", {"clip_norm": 1e4}, 1),
    ("adamw", {"clip_norm": 0.01, "decayed": "matrices"}, 1),
    ("adam", {"clip_value": 0.05, "decayed": "matrices"}, 1),
    ("sgd", {"clip_value": 0.1}, 2),
    ("sgd", {"clip_norm": 0.2, "decayed": "matrices", "loss_scale": 64.0}, 2),
]


@pytest.mark.parametrize(("optimizer", "options", "accumulate"), CASES)
def test_steps_are_those_of_pytorch(optimizer, options, accumulate):
    """Of accumulated and scaled gradients, too, the bound is on what the optimizer takes."""
    torch = pytest.importorskip("torch")
    model, values = linear()
    settings = OPTIMIZERS[optimizer]
    runner = Runner(build_step(model, optimizer=optimizer, loss="mse", accumulate=accumulate, **settings, **options))
    tensors = {name: torch.tensor(value.astype("float64"), requires_grad=True) for name, value in values.items()}
    decay = settings["weight_decay"]
    groups = [
        {"params": [tensors["w"]], "weight_decay": decay},
        {"params": [tensors["b"]], "weight_decay": 0.0 if options.get("decayed") == "matrices" else decay},
    ]
    kinds = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    theirs = kinds[optimizer](groups, **{k: v for k, v in settings.items() if k != "weight_decay"})
    random = np.random.default_rng(1)
    for _ in range(4):
        x = random.normal(0, 1, (4 * accumulate, 4)).astype("float32")
        y = random.normal(0, 1, (4 * accumulate, 3)).astype("float32")
        runner.step(x, y, lr=settings["lr"])
        theirs.zero_grad()
        predictions = torch.tensor(x).double() @ tensors["w"] + tensors["b"]
        torch.nn.functional.mse_loss(predictions, torch.tensor(y).double()).backward()
        if "clip_norm" in options:
            torch.nn.utils.clip_grad_norm_(tensors.values(), options["clip_norm"])
        if "clip_value" in options:
            torch.nn.utils.clip_grad_value_(tensors.values(), options["clip_value"])
        theirs.step()
    for name, tensor in tensors.items():
        np.testing.assert_allclose(runner.named("parameter")[name], tensor.detach().numpy(), rtol=0, atol=4e-6)


@pytest.mark.parametrize("option", ["clip_norm", "clip_value"])
def test_nan_stays(option):
    """A bound does not hide that a gradient is not a number."""
    model, _ = linear()
    runner = Runner(build_step(model, loss="mse", **{option: 1.0}))
    x = np.ones((4, 4), "float32")
    x[0, 0] = np.nan
    runner.step(x, np.ones((4, 3), "float32"), lr=0.1)
    assert np.isnan(runner.named("parameter")["w"]).any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be a positive number, but is 0.0"),
        ({"clip_value": float("inf")}, "clip_value must be a positive number, but is inf"),
        ({"clip_norm": 1.0, "clip_value": 1.0}, "clip_norm and clip_value are both given; choose one"),
        ({"decayed": "weights"}, "decayed = 'weights' is unknown; choose one of all, matrices"),
    ],
)
def test_bounds_without_meaning_are_refused(options, message):
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        StepOptions(**options)
