# SPDX-License-Identifier: Apache-2.0
"""Dropout of every flavour that torch.export writes: masks when training, the identity when predicting, gradients."""

from __future__ import annotations

import copy
import math
from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.training.beside_torch import train_beside  # noqa: E402
from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.model.own_loss import OwnLoss  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

SHAPE = (6, 8, 4, 4)
KEPT = 0.75
ALPHA, SCALE = 1.6732632423543772, 1.0507009873554805


def drop_path(x, training):
    """The way of timm: a mask of samples, divided by the probability in place."""
    if not training:
        return x
    mask = x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(KEPT)
    mask.div_(KEPT)
    return x * mask


def drop_connect(x, training):
    """The way of the first EfficientNets: the floor of a uniform number and the probability."""
    if not training:
        return x
    return x / KEPT * torch.floor(KEPT + torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype))


RATE = 1 - KEPT
FLAVOURS = {
    "dropout": lambda x, training: F.dropout(x, RATE, training),
    "dropout_in_place": lambda x, training: F.dropout(x * 1, RATE, training, inplace=True),
    "dropout2d": lambda x, training: F.dropout2d(x, RATE, training),
    "dropout3d": lambda x, training: F.dropout3d(x[:, :, None], RATE, training)[:, :, 0],
    "alpha_dropout": lambda x, training: F.alpha_dropout(x, RATE, training),
    "feature_alpha_dropout": lambda x, training: F.feature_alpha_dropout(x, RATE, training),
    "drop_path": drop_path,
    "drop_connect": drop_connect,
}
OF_CHANNELS = {"dropout2d", "dropout3d", "feature_alpha_dropout"}
OF_SAMPLES = {"drop_path", "drop_connect"}
IN_EVAL = {"drop_path", "drop_connect"}
"""Functions that a model in eval mode does not call, so that nothing of them is in the graph."""


class Flavours(nn.Module):
    """Each flavour of the input plus a parameter, behind each other."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets = nn.Parameter(torch.full((len(FLAVOURS), *SHAPE), 2.0))

    def forward(self, x):
        parts = [drop(x + self.offsets[at], self.training) for at, drop in enumerate(FLAVOURS.values())]
        return torch.stack(parts, 1)


@cache
def stepped(mode):
    """By flavour: (operand, predictions of two steps, of `predict`, the gradient of the first step)."""
    network = Flavours()
    network.train(mode == "train")
    x = torch.rand(SHAPE, generator=torch.Generator().manual_seed(1))
    runner = Runner(build_step(from_exported_program(torch.export.export(network, (x,))), loss="mse", lr=1.0, seed=5))
    target = np.zeros((SHAPE[0], len(FLAVOURS), *SHAPE[1:]), "float32")
    (before,) = runner.named("parameter").values()
    predicted = runner.predict(x.numpy())
    _, first = runner.step(x.numpy(), target, lr=float(target.size))
    (after,) = runner.named("parameter").values()
    runner.state = runner.machine["init"]()
    _, again = runner.step(x.numpy(), target, lr=0.0)
    _, second = runner.step(x.numpy(), target, lr=0.0)
    np.testing.assert_array_equal(again, first)
    return {
        name: (x.numpy() + before[at], first[:, at], second[:, at], predicted[:, at], before[at] - after[at])
        for at, name in enumerate(FLAVOURS)
    }


CASES = [(mode, name) for mode in ("train", "eval") for name in FLAVOURS if mode == "train" or name not in IN_EVAL]


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_a_mask_is_drawn_anew_for_every_step_and_is_the_identity_when_predicting(mode, name):
    operand, first, second, predicted, _ = stepped(mode)[name]
    np.testing.assert_array_equal(predicted, operand)
    assert (first != second).any()


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_what_is_kept_is_scaled_as_pytorch_does(mode, name):
    operand, first, _, _, _ = stepped(mode)[name]
    lost = -ALPHA * SCALE
    if "alpha" in name:
        scale = ((lost * lost * RATE + 1) * (1 - RATE)) ** -0.5
        shift = -lost * RATE * scale
        forms = operand.astype("float64") * scale + shift, np.full(operand.shape, lost * scale + shift)
    else:
        forms = operand.astype("float64") / KEPT, np.zeros(operand.shape)
    kept = np.abs(first - forms[0]) <= 4e-6
    assert (kept | (np.abs(first - forms[1]) <= 4e-6)).all()
    drawn = kept[:, 0, 0, 0] if name in OF_SAMPLES else kept[:, :, 0, 0] if name in OF_CHANNELS else kept
    whole = drawn.reshape(drawn.shape + (1,) * (kept.ndim - drawn.ndim))
    assert (kept == whole).all()
    assert 0 < (~drawn).sum() < drawn.size
    if drawn.size > 40:  # 5 standard deviations of the binomial distribution; the seed is fixed
        assert abs(drawn.mean() - KEPT) <= 5 * (KEPT * RATE / drawn.size) ** 0.5


@pytest.mark.parametrize(("mode", "name"), CASES)
def test_the_gradient_passes_where_the_value_did(mode, name):
    """The loss is a sum of squares: dx = 2·y·∂y/∂x."""
    operand, first, _, _, gradient = stepped(mode)[name]
    if "alpha" in name:
        scale = ((ALPHA * ALPHA * SCALE * SCALE * RATE + 1) * (1 - RATE)) ** -0.5
        shift = ALPHA * SCALE * RATE * scale
        slope = np.where(np.abs(first - (operand * scale + shift)) <= 4e-6, scale, 0.0)
    else:
        slope = np.where(first != 0, 1 / KEPT, 0.0)
    np.testing.assert_allclose(gradient, 2.0 * first * slope, rtol=0, atol=2e-5)


class Noisy(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.scale, self.make = nn.Parameter(torch.ones(4)), make

    def forward(self, x):
        return self.make(x * self.scale)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda x: x + torch.poisson(x), ("aten.poisson.default", "test_torch_random.py:", "eval mode")),
        (
            lambda x: x * torch.multinomial(x, 2).sum(),
            ("aten.multinomial.default", "test_torch_random.py:", "an input"),
        ),
    ],
)
def test_what_has_no_meaning_in_a_step_is_refused_with_its_line(make, named):
    program = torch.export.export(Noisy(make), (torch.rand(4, 4),))
    with pytest.raises(ModelError) as refusal:
        from_exported_program(program)
    for words in named:
        assert words in str(refusal.value)


COUNT = 4000
NOISES = {
    "rand": (lambda x: torch.rand(len(x), COUNT), 0.5, 12**-0.5, (0.0, 1.0)),
    "uniform": (lambda x: torch.empty(3, COUNT).uniform_(-1.0, 3.0), 1.0, 4 * 12**-0.5, (-1.0, 3.0)),
    "randn": (lambda x: torch.randn(len(x), COUNT), 0.0, 1.0, (-6.0, 6.0)),
    "randn_like": (lambda x: torch.randn_like(x.expand(-1, COUNT)), 0.0, 1.0, (-6.0, 6.0)),
    "randn_bfloat16": (lambda x: torch.randn_like(torch.zeros(3, COUNT).bfloat16()).float(), 0.0, 1.0, (-6.0, 6.0)),
    "normal": (lambda x: torch.normal(torch.full((3, COUNT), 2.0), 0.5), 2.0, 0.5, (-1.0, 5.0)),
    "exponential": (lambda x: torch.empty(3, COUNT).exponential_(2.0), 0.5, 0.5, (0.0, 9.0)),
    "randint": (lambda x: torch.randint(2, 5, (3, COUNT)).float(), 3.0, (2 / 3) ** 0.5, (2.0, 4.0)),
    "bernoulli": (lambda x: torch.bernoulli(torch.full((3, COUNT), 0.3)), 0.3, 0.21**0.5, (0.0, 1.0)),
    "randperm": (lambda x: torch.randperm(COUNT).float().expand(3, -1) / COUNT, 0.5, 12**-0.5, (0.0, 1.0)),
    "rrelu": (lambda x: F.rrelu(-torch.ones(3, COUNT), 0.1, 0.3, True), -0.2, 0.2 * 12**-0.5, (-0.3, -0.1)),
    "multinomial": (
        lambda x: (
            torch.multinomial(torch.tensor([0.2, 0.3, 0.5]).expand(COUNT, 3), 1).float().view(1, -1).expand(3, -1)
        ),
        *(1.3, 0.61**0.5, (0.0, 2.0)),
    ),
}
"""By name: what draws three rows of numbers, their mean, deviation and bounds."""
MEDIANS = {"exponential": math.log(2) / 2, "bernoulli": 0.0, "multinomial": 2.0}


@cache
def noises():
    """The numbers of a step, of the next, of the first one again, and of `predict`, by name."""
    network = Noisy(lambda x: torch.stack([make(x[:, :1]) + 0 * x[:, :1] for make, *_ in NOISES.values()], 1))
    x = torch.rand(3, 4)
    runner = Runner(build_step(from_exported_program(torch.export.export(network, (x,))), loss="mse", lr=0.0, seed=3))
    target = np.zeros((3, len(NOISES), COUNT), "float32")
    predicted = runner.predict(x.numpy())
    (_, first), (_, second) = (runner.step(x.numpy(), target, lr=0.0) for _ in range(2))
    runner.state = runner.machine["init"]()
    _, again = runner.step(x.numpy(), target, lr=0.0)
    return {name: [each[:, at] for each in (first, second, again, predicted)] for at, name in enumerate(NOISES)}


@pytest.mark.parametrize("name", NOISES)
def test_random_numbers_are_seeded_and_have_their_distribution(name):
    """Mean and deviation to 5 standard errors; the seed is fixed."""
    _, mean, deviation, (low, high) = NOISES[name]
    first, second, again, _ = noises()[name]
    np.testing.assert_array_equal(again, first)
    assert (first != second).any()
    assert first.min() >= low
    assert first.max() <= high
    found = first.astype("float64")
    np.testing.assert_allclose(found.mean(1), mean, rtol=0, atol=5 * deviation * COUNT**-0.5)
    np.testing.assert_allclose(found.std(1), deviation, rtol=0.15)


@pytest.mark.parametrize("name", NOISES)
def test_predictions_take_the_median(name):
    predicted = noises()[name][-1]
    if name == "randperm":
        np.testing.assert_allclose(predicted, np.tile(np.arange(COUNT) / COUNT, (3, 1)), rtol=1e-6)
    else:
        np.testing.assert_allclose(predicted, MEDIANS.get(name, NOISES[name][1]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (lambda x: x.half() * torch.randn_like(x.half()), "float16"),
        (lambda x: x.bfloat16() + torch.rand(4, dtype=torch.bfloat16), "float32"),
        (lambda x: x.bfloat16() * torch.normal(x.bfloat16(), 0.5), "float32"),
        (lambda x: F.rrelu(x.half(), training=True), "float16"),
        (lambda x: torch.cat([torch.randperm(2), torch.tensor([2, 3])]) + 0 * x.sum().long(), "int64"),
    ],
)
def test_random_numbers_have_the_type_that_was_asked_for(make, dtype):
    """Others could not be joined with numbers of that type, which TVM checks; bfloat16 is kept in float32."""
    model = from_exported_program(torch.export.export(Noisy(make), (torch.rand(4, 4),)))
    assert model.module[model.function].ret_ty.fields[0].dtype == dtype


def of_replaced(x):
    """Rows of numbers that are drawn in the shape of what is replaced itself, or of a tensor, or twice."""
    drawn = (
        torch.randn_like(x.detach()),
        torch.rand_like(F.dropout(x)),
        torch.bernoulli(torch.rand_like(x)),
        torch.normal(torch.zeros(1), x.exp()),
        torch.normal(x, 0.5),
        torch.randint_like(x, 1000) / 1000,
        torch.rand(x.shape),
        torch.rand(x.shape),
    )
    assert all(each.dtype == x.dtype for each in drawn)
    return torch.stack([x, *drawn], 1)


def test_numbers_in_the_shape_of_what_is_replaced_differ_and_pass_no_gradient():
    """PyTorch's `normal` has no gradient for mean and deviation: that of x itself is left."""
    x = torch.rand(3, 4, generator=torch.Generator().manual_seed(2))
    model = from_exported_program(torch.export.export(Noisy(of_replaced), (x,)))
    runner = Runner(build_step(model, loss="mse", lr=1.0, seed=3))
    (before,) = runner.named("parameter").values()
    target = np.zeros((3, 9, 4), "float32")
    _, y = runner.step(x.numpy(), target, lr=float(target.size))
    (after,) = runner.named("parameter").values()
    np.testing.assert_allclose(before - after, 2 * (x.numpy() ** 2).sum(0), rtol=1e-5)
    for at in (1, 2, 4, 5, 6, 7, 8):
        assert len(np.unique(y[:, at])) == 12, at
    assert set(np.unique(y[:, 3])) == {0.0, 1.0}
    assert len(np.unique(y[:, 4] / np.exp(x.numpy()))) == 12
    assert (y[:, 7] != y[:, 8]).all()


def test_masks_and_places_are_drawn_for_any_batch():
    """Of a tensor without values, and of one of truth values, to which PyTorch's dropout does not apply."""

    def drawn(x):
        mask = torch.empty_like(x, dtype=torch.bool)
        chances = torch.tensor([0.0, 1.0, 0.5, 0.5])
        number, tensor = mask.clone().bernoulli_(0.5), mask.bernoulli_(chances)
        return torch.stack([F.gumbel_softmax(x, hard=True), x.detach() * 0 + number, torch.ones_like(x) * tensor], 1)

    x = torch.rand(30, 4)
    program = torch.export.export(Noisy(drawn), (x,), dynamic_shapes=({0: torch.export.Dim("n")},))
    runner = Runner(build_step(from_exported_program(program), loss="mse", lr=0.0, seed=4))
    _, y = runner.step(x.numpy(), np.zeros((30, 3, 4), "float32"), lr=0.0)
    np.testing.assert_allclose(y[:, 0].sum(1), 1, rtol=1e-6)
    assert set(np.unique(y[:, 1:])) == {0.0, 1.0}
    assert abs(y[:, 1].mean() - 0.5) <= 5 * 0.5 * 120**-0.5
    np.testing.assert_array_equal(y[:, 2, :2], np.tile([0, 1], (30, 1)))
    assert (y[:, 1] != y[:, 2]).any()


class Autoencoder(nn.Module):
    """A variational one with its loss."""

    def __init__(self):
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 4), nn.Linear(2, 6)

    def forward(self, x, target):
        mean, logarithm = self.encode(x).chunk(2, 1)
        y = self.decode(mean + torch.randn_like(mean) * torch.exp(0.5 * logarithm))
        divergence = -0.5 * (1 + logarithm - mean**2 - logarithm.exp()).sum(1).mean()
        return F.mse_loss(y, target) + 0.1 * divergence


def test_a_variational_autoencoder_trains_with_a_dynamic_batch():
    x = torch.rand(4, 6)
    sizes = {0: torch.export.Dim("n")}
    program = torch.export.export(Autoencoder(), (x, x.clone()), dynamic_shapes=(sizes, sizes))
    model = from_exported_program(program, outputs=OwnLoss())
    runner = Runner(build_step(model, loss="model", lr=0.05))
    losses = [runner.step(x.numpy(), x.numpy(), lr=0.05)[0] for _ in range(60)]
    assert np.mean(losses[-10:]) < 0.8 * np.mean(losses[:10])


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_is_off_in_a_training_model_stays_off(dynamic):
    """Dropout and RReLU with training=False, beside a batch norm in train mode; all are on in an eval export."""

    class Switched(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
            self.off = nn.Sequential(nn.Dropout(0.5), nn.AlphaDropout(0.5), nn.RReLU(0.1, 0.7))

        def forward(self, x):
            h = F.dropout(self.first(x), 0.5, training=False)
            return self.last(F.rrelu(self.off(self.norm(h)), 0.2, 0.9, training=False))

    torch.manual_seed(0)
    model = Switched().train()
    model.off.eval()
    shapes = ({0: torch.export.Dim("n", min=2)},) if dynamic else None
    program = torch.export.export(model, (torch.randn(6, 5),), dynamic_shapes=shapes)
    runner = Runner(build_step(from_exported_program(program), lr=0.1))
    batches = [(torch.randn(6, 5), torch.randint(0, 3, (6,))) for _ in range(3)]
    train_beside(runner, copy.deepcopy(model).double(), batches, 0.1)
    ones, first = np.ones((6, 5), "float32"), np.zeros(6, "int64")
    everything = Runner(build_step(from_exported_program(torch.export.export(model.eval(), (torch.ones(6, 5),))), lr=0))
    scores = [everything.step(ones, first, lr=0.0)[1] for _ in range(2)]
    assert not np.array_equal(*scores)


def test_dropout_between_recurrent_layers_is_refused():
    """PyTorch's decomposition of the exported program loses it."""
    program = torch.export.export(nn.LSTM(4, 4, 2, dropout=0.5), (torch.rand(3, 2, 4),))
    with pytest.raises(ModelError, match="dropout between the layers of a recurrent network"):
        from_exported_program(program)
