# SPDX-License-Identifier: Apache-2.0
"""Steps that compute values of the forward pass again: the same bits as without, and less memory; refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm

from tests.linked import PLAIN
from tests.training.harness import Runner
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.compile.planned_memory import Planner, plan_memory
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program
from tvm_convgrad.training.ir.recomputation import Recomputation
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.passes import rematerialise
from tvm_convgrad.training.passes.rematerialise import recorded_repetitions
from tvm_convgrad.training.step.build import build_step

torch = pytest.importorskip("torch")
BATCH, SIZE, CLASSES = 4, 32, 5
TARGET = tvm.target.Target(PLAIN)


class Block(torch.nn.Module):
    """Two convolutions with batch norms, dropout between them, and a shortcut."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(into, out, 3, 1, 1, bias=False), torch.nn.Conv2d(out, out, 3, 1, 1)
        self.norms = torch.nn.ModuleList([torch.nn.BatchNorm2d(out), torch.nn.BatchNorm2d(out)])
        self.dropout = torch.nn.Dropout(0.3)
        self.shortcut = torch.nn.Conv2d(into, out, 1) if into != out else torch.nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.dropout(torch.relu(self.norms[0](self.first(x))))
        return torch.relu(self.norms[1](self.second(y)) + self.shortcut(x))


class Tokens(torch.nn.Module):
    """A convolution's pixels as tokens of a transformer's block, whose norms and attention give several results."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.scale = torch.nn.Conv2d(3, width, 4, 4), torch.nn.Parameter(torch.ones(width))
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.project = torch.nn.Linear(width, 3 * width)
        self.mlp = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.head = torch.nn.Linear(width, CLASSES)

    def forward(self, x: Any) -> Any:
        x = self.stem(x).flatten(2).transpose(1, 2)
        query, key, value = self.project(self.first(x)).chunk(3, -1)
        x = x + self.scale * (torch.softmax(query @ key.transpose(1, 2), -1) @ value)
        return self.head((x + self.mlp(self.second(x))).mean(1))


def test_bits_of_tokens_are_the_same() -> None:
    """Calls with several results are repeated, too."""
    torch.manual_seed(0)
    model = from_exported_program(torch.export.export(Tokens(8).train(), (torch.zeros(BATCH, 3, SIZE, SIZE),)))
    plain, again = Runner(build_step(model)), Runner(build_step(model, recompute="cheap"))
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCH, 3, SIZE, SIZE), "float32"), rng.integers(0, CLASSES, BATCH)
    loss, predictions = plain.step(x, y, lr=0.05)
    other, others = again.step(x, y, lr=0.05)
    assert loss == other
    np.testing.assert_array_equal(predictions, others)
    for name, value in plain.named().items():
        np.testing.assert_array_equal(again.named()[name], value, err_msg=name)


def test_what_costs_hardly_any_time_is_repeated_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a step whose tensors are not small; it costs less than "cheap" does, and gives the same bits."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3, 1, 1), torch.nn.GELU()) for _ in "abcdef")
    )
    network.append(torch.nn.Flatten()).append(torch.nn.Linear(3 * SIZE * SIZE, CLASSES))
    model = from_exported_program(torch.export.export(network.train(), (torch.zeros(BATCH, 3, SIZE, SIZE),)))
    with recorded_repetitions() as repeated:
        plain = Runner(build_step(model))
    assert not repeated["step"].calls, "the tensors of this step are small"
    monkeypatch.setattr(rematerialise, "_WORTH", 0)
    monkeypatch.setattr(rematerialise, "_PRICE", 1.0)
    with recorded_repetitions() as repeated:
        again = Runner(build_step(model))
    assert repeated["step"].calls
    assert 0 < repeated["step"].share <= rematerialise._HARDLY
    with recorded_repetitions() as cheap:
        Runner(build_step(model, recompute="cheap"))
    assert cheap["step"].share > repeated["step"].share
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((BATCH, 3, SIZE, SIZE), "float32"), rng.integers(0, CLASSES, BATCH)
    (loss, predictions), (other, others) = plain.step(x, y, lr=0.05), again.step(x, y, lr=0.05)
    assert loss == other
    np.testing.assert_array_equal(predictions, others)


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(0)
    layers = [Block(3, 8), torch.nn.MaxPool2d(2), Block(8, 12), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()]
    network = torch.nn.Sequential(*layers, torch.nn.Linear(12, CLASSES)).train()
    return from_exported_program(torch.export.export(network, (torch.zeros(BATCH, 3, SIZE, SIZE),)))


def gradients_of(runner: Runner, *arrays: np.ndarray) -> np.ndarray:
    """The flat buffer of a split step."""
    return runner.machine["gradients"](*map(tvm.runtime.tensor, arrays), runner.state)[2].numpy()


@pytest.mark.parametrize(
    "options",
    [
        {"momentum": 0.9, "nesterov": True},
        {"optimizer": "adam", "accumulate": 2, "layout": "NHWC", "clip_norm": 0.1},
        {"optimizer": "adamw", "dtype": "bfloat16", "results": "activations", "ema": 0.9},
        {"accumulate": 2, "split": True, "dtype": "float16", "results": "operands", "bn": "frozen"},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_bits_are_the_same(model: Model, options: dict[str, Any]) -> None:
    """Losses, predictions, gradients, parameters, running statistics and what the optimizer keeps, over three steps."""
    plain = Runner(build_step(model, **options))
    with recorded_repetitions() as repeated:
        again = Runner(build_step(model, recompute="all", **options))
    assert set(repeated) == ({"step", "gradients"} if "split" in options else {"step"})
    assert all(each.calls >= 5 for each in repeated.values())
    rng = np.random.default_rng(0)
    samples = BATCH * options.get("accumulate", 1)
    for _ in range(3):
        x, y = rng.standard_normal((samples, 3, SIZE, SIZE), "float32"), rng.integers(0, CLASSES, samples)
        if "split" in options:
            flat, same = (gradients_of(runner, x, y) for runner in (plain, again))
            np.testing.assert_array_equal(flat, same)
        (loss, predictions), (other, others) = plain.step(x, y, lr=0.05), again.step(x, y, lr=0.05)
        assert loss == other
        np.testing.assert_array_equal(predictions, others)
    for name, value in plain.named().items():
        np.testing.assert_array_equal(again.named()[name], value, err_msg=name)


def test_the_plan_follows_the_budget(model: Model) -> None:
    """Less memory costs more; no convolution is repeated of cheap values; a budget is kept but for gaps."""
    step = build_step(model)
    planner = Planner(step, TARGET)
    plain, none = planner.plan(Recomputation())
    assert none.calls == 0
    (cheap, cheaply), (least, much) = planner.plan(Recomputation("cheap")), planner.plan(Recomputation("all"))
    assert least.peak.bytes <= cheap.peak.bytes < plain.peak.bytes
    assert cheaply.share < much.share < 1 / 3, "a forward pass is a third of a step"
    budget = (least.peak.bytes + plain.peak.bytes) // 2
    kept, some = planner.plan(Recomputation("all", budget))
    assert kept.peak.bytes <= budget * 1.05
    assert some.share <= much.share
    asked = build_step(model, recompute=budget)
    assert plan_memory(asked, TARGET) == kept
    assert asked.options == step.options, "they say what is trained, which is the same"


def test_refusals(model: Model, tiny_model: str) -> None:
    for given in ("some", 0, -5):
        with pytest.raises(UnsupportedError, match="recompute = "):
            build_step(model, recompute=given)
    free = load_model(tiny_model, batch="dynamic")
    with pytest.raises(UnsupportedError, match=r"recompute = all needs sizes .* build with a batch"):
        build_step(free, recompute="all")
