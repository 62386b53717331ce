# SPDX-License-Identifier: Apache-2.0
"""Operators that depend on a symbolic batch, against PyTorch at several batches, and refusals with their remedies."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402

from tests.training.beside_torch import train_beside  # noqa: E402
from tests.training.harness import Runner, relative_error  # noqa: E402
from tests.training.torch_operators import TOPICS  # noqa: E402
from tests.training.torch_topics import SHAPE, Topic  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.core.extent_limits import MOST_EXTENT  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.model.own_loss import OwnLoss  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

NORMS = {1: torch.nn.InstanceNorm1d, 2: torch.nn.InstanceNorm2d, 3: torch.nn.InstanceNorm3d}


class Normalised(torch.nn.Module):
    def __init__(self, rank, **options):
        super().__init__()
        self.norm = NORMS[rank](2, momentum=0.3, **options)
        self.linear = torch.nn.Linear(2, 3)

    def forward(self, x):
        return self.linear((self.norm(x) * x).relu().flatten(2).mean(2))


def exported(model, x, least=None):
    return torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("n", min=least)},))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"affine": True, "track_running_stats": True}], ids=["plain", "tracked"])
def test_instance_norms_of_any_batch(rank, options):
    torch.manual_seed(rank)
    model = Normalised(rank, **options).train()
    reference = copy.deepcopy(model).double()
    shape = (2, *(5, 4, 3)[:rank])
    runner = Runner(build_step(from_exported_program(exported(model, torch.randn(4, *shape)), batch="dynamic"), lr=0.1))
    batches = [(torch.randn(n, *shape) + 1, torch.randint(0, 3, (n,))) for n in (4, 2, 7)]
    train_beside(runner, reference, batches, 0.1)
    state = runner.named()
    wanted = {name: value for name, value in reference.state_dict().items() if name in state}
    assert {name for name in reference.state_dict() if "tracked" not in name} <= set(wanted)
    for name, value in wanted.items():
        assert relative_error(state[name], value.numpy()) < 1e-5, name


@pytest.mark.parametrize("bn", ["train", "frozen"])
@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize("export", [exported, lambda model, x: torch.export.export(model, (x,))], ids=["any", "fixed"])
def test_instance_norms_predict_by_running_statistics(export, is_training, bn):
    """In whichever mode the model was exported; frozen, they train by them, too, and leave them."""
    torch.manual_seed(3)
    model = Normalised(2, affine=True, track_running_stats=True).train(is_training)
    model.norm.running_mean.normal_()
    reference = copy.deepcopy(model).double()
    (reference.eval() if bn == "frozen" else reference.train()).requires_grad_()
    x = torch.randn(4, 2, 5, 4) + 1
    step = build_step(from_exported_program(export(model, x)), lr=0.1, bn=bn)
    runner = Runner(step)
    train_beside(runner, reference, [(x + k, torch.randint(0, 3, (4,))) for k in range(2)], 0.1)
    state = runner.named()
    for name in ("running_mean", "running_var"):
        wanted = reference.state_dict()[f"norm.{name}"].numpy()
        assert relative_error(state[f"norm.{name}"], wanted) < 1e-5, name
    found = runner.predict(x.numpy())
    assert relative_error(found, reference.eval()(x.double()).detach().numpy()) < 1e-5


def test_inputs_that_share_a_batch_take_a_fixed_one():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x, y):
            return self.linear(x * y.mean(1, keepdim=True))

    n = torch.export.Dim("n")
    program = torch.export.export(
        Two(), (torch.randn(4, 3), torch.randn(4, 5)), dynamic_shapes={"x": {0: n}, "y": {0: n}}
    )
    model = from_exported_program(program, batch=6)
    assert [schema.shape for schema in model.inputs] == [(6, 3), (6, 5)]


@pytest.mark.parametrize("is_checked", [False, True])
def test_one_dim_of_which_pytorch_makes_two(is_checked):
    class Pair(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(3, 2)

        def forward(self, x, y):
            if is_checked:
                torch._check(x.shape[0] == y.shape[0])
            z = torch.cat([self.linear(x), self.linear(y)])
            return (z @ z.T - torch.eye(2 * x.shape[0])).square().mean()

    n = torch.export.Dim("n", min=2)
    given = torch.randn(4, 3), torch.randn(4, 3)
    program = torch.export.export(Pair(), given, dynamic_shapes={"x": {0: n}, "y": {0: n}})
    if is_checked:
        assert from_exported_program(program, outputs=OwnLoss()).target.name == "y"
        return
    with pytest.raises(ModelError, match=r"torch\._check\(x\.shape\[0\] == y\.shape\[0\]\) into forward\.$"):
        from_exported_program(program, outputs=OwnLoss())


def test_an_operator_of_fixed_extents_is_refused_with_the_remedy():
    class Strided(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return torch.as_strided(x * self.scale, (x.shape[0], 3), (9, 2))

    class FirstTwo(Strided):
        def forward(self, x):
            return x[:2] * self.scale

    class FromFourth(Strided):
        def forward(self, x):
            return torch.cat([x, x])[3 : x.shape[0] + 3] * self.scale  # of three samples or more

    class Written(Strided):
        def forward(self, x):
            y = torch.cat([x, x])
            y[: x.shape[0]] *= self.scale
            return y

    class Rounded(Strided):
        def forward(self, x):
            return x * round(x.shape[0] * 0.7) * self.scale

    for module, remedy in (
        (Strided, r"without dynamic shapes, or write it as slices"),
        (FirstTwo, r"its predictions are \[2, 9\]; axis 0 of both must be the batch, one row a sample"),
        (Written, r"it writes to places 0 to .*; join the parts by torch.cat, or export without dynamic shapes"),
        (Rounded, r"from the batch by \w+, .*: return x \* round.*, or export the model without dynamic shapes"),
    ):
        with pytest.raises(ModelError, match=rf"{remedy}\.$"):
            from_exported_program(exported(module(), torch.randn(3, 9), least=3))
    program = exported(FromFourth(), torch.randn(3, 9), least=3)
    assert list(from_exported_program(program).inputs[0].limits.values()) == [(3, MOST_EXTENT)]


def test_a_multiple_of_the_batch_is_named_so():
    class Doubled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(torch.cat([x, x]))

    with pytest.raises(ModelError, match=r"batch of its inputs is (\w+), but its predictions are \[2 \* \1, 4\]"):
        from_exported_program(exported(Doubled(9, 4), torch.randn(3, 9)))


def chosen(x):
    """An element of each sample, and one written: by places that number the samples, and by places from the end."""
    samples, rows = torch.arange(x.shape[0]), x.flatten(1)
    places = rows.detach().argmax(1)
    picked = rows[samples, places].unsqueeze(1) * rows[-1, -3]
    written = rows.index_put((samples, places // 2), picked[:, 0] * 2)
    return written.index_put((torch.tensor([-1, 0]),), torch.stack([rows.sum(0), rows[0] * 3]), accumulate=True)


def columns(x):
    """Columns written and added to, of every sample."""
    y = x.clone()
    y[:, [3, 0, -2]] = x[:, [1, 1, 2]] * 2
    return y.index_add(1, torch.tensor([0, 3, 0]), x[:, :3])


def counted(x):
    """Numbers of Python that are computed from the batch."""
    n = x.shape[0]
    scaled = x * (n - 1) / (n * 3.0) + x**2 * (1 / n) - x.sum() / x.numel() + n**-0.5
    return (
        (n - torch.add(scaled, x, alpha=n // 2))
        * max(n % 3, 1)
        * torch.tensor(2.0 / n)
        * (x.flatten(1)[:, 0] > n - 6)[:, None, None, None]
    )


def halves(x):
    """Parts of samples that are joined: from and to places that the batch says."""
    n, joined = x.shape[0], torch.cat([x, x * 2, x**2])
    return joined[:n] * joined[n : 2 * n] + joined[-n:] * joined.narrow(0, n, n) + joined[1 : n + 1] * joined[: -2 * n]


def contrasted(x):
    """The diagonal of the products of all pairs, as contrastive losses take it."""
    left, right = x.flatten(1)[:, ::2], x.flatten(1)[:, 1::2]
    return (left @ right.T / 10).log_softmax(1).diagonal()[:, None]


FUNCTIONS = {
    "counted": counted,
    "halves": halves,
    "contrasted": contrasted,
    "added_in_place": TOPICS["selection"]["add_in_place"],
    "last_axis": lambda x: x[..., :2] * x[..., -1:] + x[..., 1:-1:2] * x[:1, ..., 2:4] * x[-1, ..., 3:5],
    "pooled": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "inverted": lambda x: torch.linalg.inv(x.mean(1) + 8 * torch.eye(6)),
    "masked_scatter": lambda x: x.masked_scatter(x.detach() > 0.3, (x * 2).flip(1)),
    "unfold": lambda x: F.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1)),
    "fold": lambda x: F.fold(x.flatten(2).repeat(1, 6, 1)[:, :, :9], (7, 6), (2, 3), (3, 1), (1, 2), (2, 3)),
    "max_unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 3, 2, return_indices=True), 3, 2, output_size=(6, 6)),
    "grid_sample": lambda x: F.grid_sample(x, x[:, :2].movedim(1, 3).tanh() * 1.3, align_corners=False),
    "grid_volume": lambda x: F.grid_sample(
        x.unflatten(1, (2, 2)), x[:, :3, None].movedim(1, 4).tanh(), "bilinear", "reflection", align_corners=True
    ),
    "chosen": chosen,
    "columns": columns,
    "spread": lambda x: (
        x * (x.std() + x.var(0) + x.var((0, 2), correction=0, keepdim=True) + x.std((1, 3), keepdim=True))
    ),
    "squeezed": lambda x: x[:, :1].squeeze((0, 1, 2)) * x[None, :, 1:2].squeeze() + x[:, 2:3].squeeze(0).squeeze(1),
    "spread_and_mean": lambda x: x * sum(torch.var_mean(x, (0, 1), correction=0.5)),
    **{
        f"scattered_{reduction}": lambda x, reduction=reduction: x.flatten(1).scatter_reduce(
            1, x.detach().flatten(1)[:, :20].argsort(1) % 7, x.flatten(1)[:, 3:23], reduction
        )
        for reduction in ("prod", "amax", "amin", "mean", "sum")
    },
}


def test_gradients_for_any_batch():
    torch.manual_seed(0)
    model = Topic(FUNCTIONS).train()
    reference = copy.deepcopy(model).double()
    program = exported(model, torch.randn(3, *SHAPE[1:]))
    runner = Runner(build_step(from_exported_program(program, batch="dynamic"), loss="mse", lr=1.0))
    for batch in (2, 5):
        x = torch.randn(batch, *SHAPE[1:])
        outputs = reference(x.double())
        target = torch.randn(outputs.shape, dtype=torch.float64)
        reference.zero_grad()
        ((outputs - target) ** 2).sum().backward()
        before = runner.named("parameter")
        runner.step(x.numpy(), target.float().numpy(), lr=float(target.numel()))
        after = runner.named("parameter")
        with torch.no_grad():
            for name, value in reference.named_parameters():
                scale = max(float(value.grad.abs().max()), 1.0)
                found = before[name].astype("float64") - after[name]
                np.testing.assert_allclose(found, value.grad.numpy(), rtol=0, atol=400 * 2.0**-24 * scale, err_msg=name)
                value.copy_(torch.from_numpy(after[name]))


class Joined(torch.nn.Module):
    """Samples behind each other, of different numbers: the final states of recurrent layers are joined so, too."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer
        self.linear = torch.nn.Linear(5, 3)

    def forward(self, x):
        states = self.layer(x)[1]
        joined = torch.cat([states[-1], x[:, 0] * 2, x.flatten(0, 1)])
        return self.linear(states[-1] - states.sum(0) + joined.square().mean(0))


@pytest.mark.parametrize("options", [{"bidirectional": True}, {"num_layers": 2}])
def test_tensors_joined_along_a_symbolic_axis(options):
    torch.manual_seed(0)
    model = Joined(torch.nn.GRU(5, 5, batch_first=True, **options)).train()
    reference = copy.deepcopy(model).double()
    program = exported(model, torch.randn(4, 3, 5))
    runner = Runner(build_step(from_exported_program(program, batch="dynamic"), lr=0.1))
    batches = [(torch.randn(n, 3, 5), torch.randint(0, 3, (n,))) for n in (4, 2, 7)]
    train_beside(runner, reference, batches, 0.1)
    for name, value in runner.named("parameter").items():
        assert relative_error(value, reference.state_dict()[name].numpy()) < 1e-5, name


@pytest.mark.parametrize("extents", [(), (1,), (2,)])
def test_a_batch_norm_of_one_value_is_a_least_batch(extents):
    """Of a sample with one value for each channel no variance exists: PyTorch raises, too."""
    norm = {0: torch.nn.BatchNorm1d, 1: torch.nn.BatchNorm1d}[len(extents)](4)
    model = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.LazyLinear(3)).train()
    x = torch.randn(3, 4, *extents)
    model(x)
    step = build_step(from_exported_program(exported(model, x), batch="dynamic"))
    assert [schema.least for schema in step.inputs] == [2 if extents in ((), (1,)) else 1]
    frozen = build_step(from_exported_program(exported(model, x), batch="dynamic"), bn="frozen")
    assert [schema.least for schema in frozen.inputs] == [1]
