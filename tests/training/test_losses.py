# SPDX-License-Identifier: Apache-2.0
"""Losses and their settings against PyTorch in float64: value and gradient, scores and pixels, extreme numbers."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tvm import relax

from tests.training.harness import Runner
from tvm_convgrad.core.errors import ConvGradError, ModelError, UnsupportedError
from tvm_convgrad.training.model.model import from_module
from tvm_convgrad.training.runtime.validation import Quality
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.options import StepOptions

CLASSES = 5
WEIGHTS = (0.5, 2.0, 1.0, 0.0, 3.0)
SHAPES = ((6, CLASSES), (4, CLASSES, 3, 2))
PARTS = ("x", "w")

CLASS_CASES = [
    ("cross_entropy", {}),
    ("cross_entropy", {"label_smoothing": 0.1}),
    ("cross_entropy", {"class_weights": WEIGHTS}),
    ("cross_entropy", {"ignore_index": 2}),
    ("cross_entropy", {"ignore_index": 255}),
    ("cross_entropy", {"ignore_index": -100, "label_smoothing": 0.2, "class_weights": WEIGHTS}),
    ("cross_entropy", {"ignore_index": 0, "label_smoothing": 0.3}),
    ("nll", {}),
    ("nll", {"class_weights": WEIGHTS, "ignore_index": 1}),
]
VALUE_CASES = [
    ("bce", {}),
    ("bce", {"positive_weight": WEIGHTS}),
    ("bce", {"positive_weight": WEIGHTS, "class_weights": WEIGHTS}),
    ("mse", {}),
    ("l1", {}),
    ("huber", {}),
    ("huber", {"delta": 0.25}),
]
CASES = [(*case, shape) for case in (*CLASS_CASES, *VALUE_CASES) for shape in SHAPES]


def offset_model(shape):
    """Predictions are the input plus a parameter, whose gradient is that of the predictions summed over the batch."""
    builder = relax.BlockBuilder()
    x, w = (relax.Var(name, relax.TensorType(shape, "float32")) for name in PARTS)
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.add(x, w))
        builder.emit_func_output(y)
    return from_module(builder.get(), parameters={"w": np.zeros(shape, "float32")})


def problem(loss, settings, shape, seed=0):
    """Scores with a few extreme ones, and a target."""
    random = np.random.default_rng(seed)
    x = random.normal(0, 2, shape).astype("float32")
    x.flat[:4] = 80.0, -80.0, 0.0, 300.0
    positions = (shape[0], *shape[2:])
    if loss == "nll":
        x = -np.abs(x)
    if loss in ("cross_entropy", "nll"):
        target = random.integers(0, CLASSES, positions)
        ignored = settings.get("ignore_index")
        if ignored is not None:
            target[random.random(positions) < 0.3] = ignored
        return x, target
    if loss == "bce":
        return x, random.choice([0.0, 1.0, 0.3], shape).astype("float32")
    target = random.normal(0, 1, shape).astype("float32")
    target.flat[2] = 0.0  # equal to the prediction
    return x, target


def torch_loss(torch, loss, settings, x, target):
    functional = torch.nn.functional
    options = dict(settings)
    for name in ("class_weights", "positive_weight"):
        if name in options:
            column = torch.tensor(options.pop(name), dtype=torch.float64)
            if loss == "bce":
                column = column.reshape(-1, *[1] * (x.ndim - 2))
            options["pos_weight" if name == "positive_weight" else "weight"] = column
    functions = {
        "cross_entropy": functional.cross_entropy,
        "nll": functional.nll_loss,
        "bce": functional.binary_cross_entropy_with_logits,
        "mse": functional.mse_loss,
        "l1": functional.l1_loss,
        "huber": functional.huber_loss,
    }
    return functions[loss](x, target, **options)


@pytest.mark.parametrize(("loss", "settings", "shape"), CASES)
def test_value_and_gradient_are_those_of_pytorch(loss, settings, shape):
    torch = pytest.importorskip("torch")
    x, target = problem(loss, settings, shape)
    variable = torch.tensor(x.astype("float64"), requires_grad=True)
    wanted = torch_loss(
        torch,
        loss,
        settings,
        variable,
        torch.tensor(target).to(torch.int64 if target.dtype.kind == "i" else torch.float64),
    )
    wanted.backward()
    runner = Runner(build_step(offset_model(shape), loss=loss, lr=1.0, **settings))
    value, _ = runner.step(x, target, lr=1024.0)
    found = -runner.named("parameter")["w"].astype("float64") / 1024
    assert value == pytest.approx(wanted.item(), rel=2e-6)
    np.testing.assert_allclose(found, variable.grad.numpy(), rtol=0, atol=2e-6 * max(np.abs(found).max(), 0.1))
    quality = Quality()  # of validations, in two batches
    for part in (slice(0, 3), slice(3, None)):
        quality.add(x[part], target[part], {"loss": loss, **settings}, CLASSES if target.dtype.kind == "i" else None)
    assert quality.mean_loss == pytest.approx(wanted.item(), rel=1e-12)


def test_nothing_but_ignored_positions_is_not_a_number():
    """As PyTorch has it: a mean over nothing."""
    runner = Runner(build_step(offset_model((2, CLASSES)), ignore_index=3))
    value, _ = runner.step(np.ones((2, CLASSES), "float32"), np.array([3, 3]), lr=0.0)
    assert np.isnan(value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse", "ignore_index": 1}, "mse has no setting 'ignore_index' (given 1); it has none."),
        ({"loss": "huber", "delta": 0.0}, "delta must be a positive number, but is 0"),
        ({"label_smoothing": 1.5}, "label_smoothing must be from 0 to 1, but is 1.5"),
        ({"class_weights": (1.0, -1.0)}, "class_weights needs numbers from 0 on"),
        ({"class_weights": ()}, "class_weights needs finite numbers, but is ()"),
        ({"loss": "huber", "delta": float("nan")}, "delta needs finite numbers"),
        ({"loss": "crossentropy"}, "loss = 'crossentropy' is unknown"),
    ],
)
def test_settings_without_meaning_are_refused(options, message):
    with pytest.raises(UnsupportedError, match=re.escape(message)):
        StepOptions(**options)


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_weights_are_one_for_each_class(loss):
    with pytest.raises(ModelError, match=f"{loss}: class_weights has 2 numbers, but the model predicts 5 classes"):
        build_step(offset_model((2, CLASSES)), loss=loss, class_weights=(1.0, 2.0))
    assert issubclass(ModelError, ConvGradError)
