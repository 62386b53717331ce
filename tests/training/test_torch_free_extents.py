# SPDX-License-Identifier: Apache-2.0
"""Models of which several axes are free, stepped with several extents: losses, scores and parameters are PyTorch's.

They are compiled by LLVM's optimiser for this CPU, which has compiled divisions by symbolic extents to wrong code.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from tests.training.beside_torch import train_beside  # noqa: E402
from tests.training.harness import Runner, relative_error  # noqa: E402
from tvm_convgrad.codegen.hardware import native_target  # noqa: E402
from tvm_convgrad.core.errors import ModelError, UnsupportedError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

RATE = 0.1


class Sequences(nn.Module):
    """Embedded tokens, attention over a window of them with a slope for each of two heads, and their mean."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(9, 8), nn.Linear(8, 4)
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.table(tokens)
        places = torch.arange(tokens.shape[1])
        apart = places[:, None] - places
        bias = (torch.tensor([-0.5, -0.25])[:, None, None] * apart.abs().to(x.dtype)).masked_fill(apart >= 4, -9.0)
        scores = (self.query(x) @ self.key(x).transpose(1, 2) / 3)[:, None] + bias
        return self.head((scores.softmax(-1).mean(1) @ x).mean(1))


class Differences(nn.Module):
    """Squared differences of adjacent pixels, as in a total variation."""

    def forward(self, x):
        return (x[:, :, 1:, :-1] - x[:, :, :-1, 1:]).square()


class Selections(nn.Module):
    """Medians, cumulative sums and adaptive pools along free axes, whose windows and places are no numbers."""

    def forward(self, x):
        pooled, places = F.adaptive_max_pool2d(
            torch.round(x.detach() * 2) + (x - x.detach()), (2, 3), return_indices=True
        )
        lines = F.adaptive_max_pool1d(x.flatten(2), 4) * x.logcumsumexp(2).mean(2)[..., :1]
        middle = x.flatten(2).median(-1, keepdim=True).values * x.median(2).values.mean(-1, keepdim=True)
        short = F.adaptive_max_pool3d(x.unsqueeze(2)[..., :2], (1, 3, 2)).flatten(2)
        return torch.cat(
            [pooled.flatten(2), places.flatten(2) * x.mean((2, 3)).unsqueeze(2) / 50, lines, middle, short], 2
        )


def layers(convolution, norm, pool, rank):
    """Convolutions that keep the extents, a batch norm, and an average of all that is left."""
    return nn.Sequential(
        convolution(3, 6, 3, padding=1), norm(6), nn.ReLU(), convolution(6, 4, 1), pool(1), nn.Flatten(1)
    ), (3, *(8,) * rank)


CASES = {
    "height and width": (*layers(nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d, 2), (2, 3)),
    "batch and height": (*layers(nn.Conv2d, nn.BatchNorm2d, nn.AdaptiveAvgPool2d, 2), (0, 2)),
    "batch and length": (*layers(nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d, 1), (0, 2)),
    "batch and tokens": (Sequences(), (8,), (0, 1)),
    "differences": (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Differences(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (3, 8, 8),
        (0, 2, 3),
    ),
    "enlarged": (
        nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1),
            nn.Upsample(scale_factor=2),
            nn.Conv2d(4, 4, 3, padding=1),
            nn.Upsample(scale_factor=(3, 1), mode="bilinear"),
            nn.Upsample(scale_factor=2, mode="bicubic"),
            nn.Hardtanh(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        ),
        (3, 8, 8),
        (0, 2, 3),
    ),
    "selections": (
        nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), Selections(), nn.Flatten(), nn.Linear(92, 4)),
        (3, 8, 8),
        (0, 2, 3),
    ),
    "all but channels": (
        nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(8, 4),
        ),
        (3, 8, 8),
        (0, 2, 3),
    ),
}

EXTENTS = ((8, 6, 9), (3, 11, 5), (5, 4, 16))
"""Of the free axes in each step, as many as there are."""


@pytest.mark.parametrize("name", CASES)
def test_steps_of_several_extents_are_those_of_pytorch(name):
    model, shape, axes = CASES[name]
    model = copy.deepcopy(model).train()
    reference = copy.deepcopy(model).double()
    generator = torch.Generator().manual_seed(0)

    def batch(*extents):
        full = [4, *shape]
        for axis, extent in zip(axes, extents, strict=False):
            full[axis] = extent
        x = torch.randn(full, generator=generator)
        x = torch.randint(0, 9, full, generator=generator) if name.endswith("tokens") else x
        return x, torch.randint(0, 4, full[:1], generator=generator)

    free = {axis: torch.export.Dim(f"n{axis}", min=3, max=64) for axis in axes}
    program = torch.export.export(model, (batch(*EXTENTS[0])[0],), dynamic_shapes=(free,))
    runner = Runner(build_step(from_exported_program(program), lr=RATE), native_target())
    if name.endswith("tokens"):
        reference.forward = lambda x, forward=reference.forward: forward(x.long())
    train_beside(runner, reference, [batch(*extents) for extents in EXTENTS], RATE)
    state = runner.named()
    for key, value in reference.state_dict().items():
        if not key.endswith("num_batches_tracked"):
            assert relative_error(state[key], np.asarray(value)) < 1e-5, key


@pytest.mark.parametrize(
    "resize",
    [
        lambda x: F.interpolate(x, scale_factor=1.5),
        lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        lambda x: F.interpolate(x, size=(7, 7)),
    ],
    ids=["not whole", "aligned corners", "size"],
)
def test_other_resizes_of_free_extents_are_refused(resize):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 2, 1)

        def forward(self, x):
            return resize(self.layer(x)).mean((2, 3))

    free = {2: torch.export.Dim("height", min=2, max=64)}
    program = torch.export.export(Model(), (torch.ones(2, 3, 8, 8),), dynamic_shapes=(free,))
    with pytest.raises(ModelError, match=r"an axis from \w+ to .*, which is not fixed; .* by a whole factor, "):
        from_exported_program(program)


def predictions_of(function, x):
    """What a step with a free height predicts by the function of an image times a parameter, and what PyTorch does."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return function(x * self.one).float().flatten(1)

    free = {2: torch.export.Dim("height", min=2, max=64)}
    program = torch.export.export(Model(), (torch.randn(2, 3, 9, 5),), dynamic_shapes=(free,))
    return Runner(build_step(from_exported_program(program), loss="mse")).predict(x.numpy()), function(x).flatten(1)


@pytest.mark.parametrize("place", [0, 1], ids=["values", "places"])
@pytest.mark.parametrize("number", [-float("inf"), float("nan")])
@pytest.mark.parametrize(
    "function",
    [lambda x: F.adaptive_max_pool2d(x, (2, 3), return_indices=True), lambda x: x.median(2)],
    ids=["adaptive_max_pool", "median"],
)
def test_selections_beside_what_is_no_number(function, number, place):
    """A window of -inf alone has its own first place, and a row with NaN the first NaN."""
    x = torch.randn(2, 3, 7, 5, generator=torch.Generator().manual_seed(0))
    x[:, :, 3:, 2:] = -float("inf")
    x[:, :, 5, 1] = number
    found, wanted = predictions_of(lambda x: function(x)[place], x)
    np.testing.assert_array_equal(found, wanted.numpy())


def test_medians_of_nan_with_fixed_extents():
    x = torch.tensor([[3.0, float("nan"), 1.0], [2.0, 5.0, 4.0]])
    model = nn.Sequential(nn.Linear(3, 3, bias=False))
    model[0].weight.data = torch.eye(3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return (self.layers(x.nan_to_num(7.0)) * torch.where(x.isnan(), x, 1.0)).median(1, keepdim=True).values

    program = torch.export.export(Model(), (x,))
    found = Runner(build_step(from_exported_program(program), loss="mse")).predict(x.numpy())
    np.testing.assert_array_equal(found, [[np.nan], [4.0]])


def test_integers_are_resized_to_the_nearest_only():
    x = torch.rand(2, 3, 7, 5, generator=torch.Generator().manual_seed(0)) * 100
    found, wanted = predictions_of(lambda x: F.interpolate(x.to(torch.uint8), scale_factor=2), x)
    np.testing.assert_array_equal(found, wanted.numpy())
    with pytest.raises(ModelError, match="a resize of uint8 takes weighted means of integers; cast its operand to"):
        predictions_of(lambda x: F.interpolate(x.to(torch.uint8), scale_factor=2, mode="bilinear"), x)


def test_triangular_systems_of_free_rows_are_refused():
    def solved(x):
        return torch.linalg.solve_triangular(x @ x.mT, x, upper=False)

    with pytest.raises(
        UnsupportedError, match="triangular systems are written out for the number of rows, which is free"
    ):
        predictions_of(solved, torch.randn(2, 3, 7, 5))


def test_free_lengths_in_micro_batches():
    """The gradients of micro-batches are sums over the free axis, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.AdaptiveAvgPool2d((1, 8)), nn.Flatten(), nn.Linear(8, 4))
    generator = torch.Generator().manual_seed(0)

    def batch(length):
        return torch.randn(16, length, 6, generator=generator), torch.randint(0, 4, (16,), generator=generator)

    free = {1: torch.export.Dim("length", min=2, max=64)}
    program = torch.export.export(model, (batch(7)[0][:8],), dynamic_shapes=(free,))
    runner = Runner(build_step(from_exported_program(program), lr=RATE, accumulate=2), native_target())
    reference = copy.deepcopy(model).double()
    train_beside(runner, reference, [batch(7), batch(3), batch(12)], RATE)
    for key, value in reference.state_dict().items():
        assert relative_error(runner.named()[key], np.asarray(value)) < 1e-5, key
