# SPDX-License-Identifier: Apache-2.0
"""Buffers that a model updates under `torch.no_grad()` are updated by a step, and no gradient passes there."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from torch.nn.utils.parametrizations import spectral_norm  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

from tests.training.beside_torch import train_beside  # noqa: E402
from tests.training.harness import Runner, relative_error  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program, load_pt2  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

STEPS, SAMPLES, RATE = 4, 3, 0.1


class Base(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution = torch.nn.Conv2d(2, 3, 3)
        self.linear = torch.nn.Linear(3, 4)
        self.register_buffer("center", torch.full((3,), 0.5))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def features(self, x):
        return self.convolution(x).mean((2, 3))


class MovingAverage(Base):
    def forward(self, x):
        h = self.features(x)
        with torch.no_grad():
            self.center.mul_(0.9).add_(h.mean(0), alpha=0.1)
            self.count += 1
        return self.linear(h - self.center)


class Initialised(Base):
    """A condition that is set in the first step, as normalisations by the first batch have it."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.bool))
        self.register_buffer("large", torch.zeros(3, dtype=torch.bool))

    def forward(self, x):
        h = self.features(x)
        with torch.no_grad():
            self.center.copy_(torch.where(self.seen, self.center, h.mean(0)))
            self.seen.fill_(True)
            self.large |= h.mean(0) > 0
        return self.linear(h - self.center)


class PartOfBuffer(Base):
    def forward(self, x):
        h = self.features(x)
        with torch.no_grad():
            self.center[:2] = self.center[:2] * 0.5 + h.mean(0)[:2]
            self.center.view(3, 1)[2:].copy_(h.max())
        return self.linear(h * (1 + self.center))


class Between(Base):
    """The buffer is read before, between and after two updates."""

    def forward(self, x):
        h = self.features(x)
        before = self.center * 2
        with torch.no_grad():
            self.center.add_(h.mean(0))
        between = self.center + before
        with torch.no_grad():
            self.center.mul_(h.std())
        return self.linear(h * self.center - between)


class Nested(Base):
    def forward(self, x):
        with torch.no_grad():
            h = self.features(x)
            with torch.enable_grad():
                y = self.linear(h)
            self.center.add_(h.mean(0))
        return y + self.center.sum()


class Codebook(Base):
    """Vector quantisation whose codes move towards the features of their cells."""

    def forward(self, x):
        h = self.features(x)
        codes = torch.stack([self.center, -self.center])
        nearest = (h[:, None] - codes).square().sum(-1).argmin(1)
        with torch.no_grad():
            share = torch.nn.functional.one_hot(nearest, 2).to(h.dtype).mean(0)
            self.center.lerp_((share[:, None] * codes).sum(0) + h.mean(0), 0.3)
        return self.linear(h + (codes[nearest] - h).detach())


class DetachedBuffer(Base):
    def forward(self, x):
        h = self.features(x)
        self.center.detach().view(3, 1).mul_(0.9).add_(h.detach().mean(0)[:, None], alpha=0.1)
        return self.linear(h - self.center)


class ReadBefore(Base):
    """What is detached is read before its operand is overwritten."""

    def forward(self, x):
        h = self.features(x)
        scaled = h.detach() * 2
        return self.linear(torch.nn.functional.relu(h, inplace=True) * scaled + self.center)


class MomentumEncoder(Base):
    """A frozen copy of a layer that follows it, as in MoCo and BYOL."""

    def __init__(self):
        super().__init__()
        self.slow = torch.nn.Linear(3, 4).requires_grad_(False)

    def forward(self, x):
        h = self.features(x)
        self.center.add_(1)
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.linear.parameters(), strict=True):
                slow.mul_(0.5).add_(fast, alpha=0.5)
        return self.linear(h) + self.slow(h + self.center)


class DetachedInPlace(Base):
    """No gradient passes what is read after detach_, under either name."""

    def forward(self, x):
        h = self.features(x)
        double, triple = h * 2, h * 3
        kept = double.detach_()
        triple.detach_()
        self.center.copy_(kept.mean(0))
        return self.linear(h * kept + triple + double)


class Tracked(Base):
    """An instance norm with running statistics and without weights, of a known batch."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.InstanceNorm2d(3, momentum=0.3, track_running_stats=True)

    def forward(self, x):
        self.center.add_(1)
        h = self.convolution(x)
        return self.linear((self.norm(h) * h).mean((2, 3)) + self.center)


class Spectral(torch.nn.Module):
    """The power iteration of both layers updates two buffers of each."""

    def __init__(self):
        super().__init__()
        self.convolution = spectral_norm(torch.nn.Conv2d(2, 3, 3))
        self.linear = spectral_norm(torch.nn.Linear(3, 4))

    def forward(self, x):
        return self.linear(self.convolution(x).relu().mean((2, 3)))


class StatisticsInside(Base):
    """A batch norm under no_grad only, one with statistics only, and an instance norm."""

    def __init__(self):
        super().__init__()
        self.batch = torch.nn.BatchNorm2d(3)
        self.bare = torch.nn.BatchNorm2d(2, affine=False)
        self.instance = torch.nn.InstanceNorm2d(3, affine=True, track_running_stats=True)

    def forward(self, x):
        with torch.no_grad():
            target = self.instance(self.batch(self.convolution(self.bare(x))) + 1).amax((2, 3))
        return self.linear(self.features(x) - target)


class ReturnsItsArguments(Base):
    """What PyTorch gives as the tensor itself has its gradient; a view that is made there has none."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(3)

    def forward(self, x):
        h, y = self.features(x), self.norm(self.convolution(x))
        with torch.no_grad():
            same = h.flatten(1)
            also = torch.nn.functional.dropout(y.to(y.dtype), 0.5, training=False)  # of a model in train mode
            view = h.view(-1, 3)
            scale = same.mean()
        return self.linear(same * (1 + scale) + also.amax((2, 3)) + view)


class SpectralInside(torch.nn.Module):
    """The exported program reads a flattened weight of the block behind it."""

    def __init__(self):
        super().__init__()
        self.linear = spectral_norm(torch.nn.Linear(50, 4))

    def forward(self, x):
        with torch.no_grad():
            target = self.linear(x.flatten(1))
        return self.linear(x.flatten(1) + 1) - target


@pytest.mark.parametrize(
    "make",
    [
        *(MovingAverage, Initialised, PartOfBuffer, Between, Nested, Codebook, DetachedBuffer, ReadBefore, Spectral),
        *(MomentumEncoder, DetachedInPlace, Tracked, StatisticsInside, ReturnsItsArguments, SpectralInside),
    ],
)
def test_buffers_and_parameters_are_those_of_pytorch(make):
    torch.manual_seed(0)
    model = make().train()
    reference = copy.deepcopy(model).double()
    x, labels = torch.randn(STEPS, SAMPLES, 2, 5, 5), torch.randint(0, 4, (STEPS, SAMPLES))
    runner = Runner(build_step(from_exported_program(torch.export.export(model, (x[0],))), lr=RATE))
    start = {name: value.clone() for name, value in reference.state_dict().items()}
    train_beside(runner, reference, zip(x, labels, strict=True), RATE)
    state = runner.named()
    for name, value in reference.state_dict().items():
        if name.endswith(("count", "num_batches_tracked", "center")) and name not in state:  # of a model without it
            assert torch.equal(value, start[name])
            continue
        assert relative_error(state[name], value.numpy()) < 1e-5, name
        if (name == "center" and make is not ReadBefore) or "_u" in name:
            assert not torch.equal(value, start[name])


class WritesDetached(Base):
    def forward(self, x):
        h = self.features(x)
        h.detach().view(-1).clamp_(0)
        return self.linear(h)


class WrittenLater(Base):
    """The detached tensor is the memory of h, and has the results of its relu."""

    def forward(self, x):
        h = self.features(x)
        kept = h.detach()
        return self.linear(torch.nn.functional.relu(h, inplace=True) - 2 * kept)


class WritesFeatures(Base):
    def forward(self, x):
        h = self.features(x)
        with torch.no_grad():
            h.clamp_(0)
        return self.linear(h)


class WritesWeight(Base):
    def forward(self, x):
        with torch.no_grad():
            self.convolution.weight.view(-1).clamp_(-0.1, 0.1)
        return self.linear(self.features(x))


@pytest.mark.parametrize(("make", "line"), [(WritesFeatures, "h.clamp_(0)"), (WritesWeight, "clamp_(-0.1, 0.1)")])
def test_writing_to_what_has_a_gradient_is_refused_with_its_line(make, line):
    program = torch.export.export(make().train(), (torch.randn(SAMPLES, 2, 5, 5),))
    with pytest.raises(
        ModelError, match=r"aten\.clamp_\.default \(test_torch_no_grad\.py:\d+.*inside torch\.no_grad"
    ) as error:
        from_exported_program(program)
    assert line in str(error.value)


def test_a_decomposed_program_that_writes_to_a_trained_parameter_is_refused():
    program = torch.export.export(WritesWeight().train(), (torch.randn(SAMPLES, 2, 5, 5),)).run_decompositions()
    with pytest.raises(
        ModelError, match=r"writes to parameter 'convolution\.weight', which the optimizer updates, too"
    ):
        from_exported_program(program)


class OnlyWrites(Base):
    """The block of `torch.no_grad()` has no result, which PyTorch saves, but does not load again."""

    def forward(self, x):
        h = self.features(x)
        with torch.no_grad():
            self.center[:2] = h.mean(0)[:2]
        return self.linear(h - self.center)


class Detached(Base):
    def forward(self, x):
        h = self.features(x)
        self.center[:2] = h.detach().mean(0)[:2]
        return self.linear(h - self.center)


@pytest.mark.parametrize(("make", "line"), [(WritesDetached, "clamp_"), (WrittenLater, "relu_")])
def test_writing_to_the_memory_of_a_detached_tensor_is_refused(make, line):
    program = torch.export.export(make().train(), (torch.randn(SAMPLES, 2, 5, 5),))
    with pytest.raises(ModelError, match=rf"aten\.{line}.*detach.*clone\(\)"):
        from_exported_program(program)


def test_a_file_that_pytorch_does_not_load_is_refused_with_the_remedy(tmp_path):
    for make in (OnlyWrites, Detached):
        program = torch.export.export(make().train(), (torch.randn(SAMPLES, 2, 5, 5),))
        torch.export.save(program, tmp_path / f"{make.__name__}.pt2")
    with pytest.raises(ModelError, match=r"torch\.no_grad\(\) block that gives no result.*x\.detach\(\)"):
        load_pt2(tmp_path / "OnlyWrites.pt2", None)
    assert "center" in load_pt2(tmp_path / "Detached.pt2", None).states


class Distilled(torch.nn.Module):
    """A student, its teacher behind `no_grad`, and a layer that is not used."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher, self.unused = (torch.nn.Linear(5, 4) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x) - taught


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_without_gradient_stay_as_they_are(name):
    torch.manual_seed(0)
    model = Distilled().train()
    optimizer, settings = OPTIMIZERS[name]
    x, labels = torch.randn(SAMPLES, 5), torch.randint(0, 4, (SAMPLES,))
    program = torch.export.export(model, (x,))
    runner = Runner(build_step(from_exported_program(program), optimizer=name, lr=RATE, **settings))
    reference = copy.deepcopy(model).double()
    trained = optimizer(reference.parameters(), lr=RATE, **settings)
    for _ in range(STEPS):
        runner.step(x.numpy(), labels.numpy(), lr=RATE)
        trained.zero_grad()
        torch.nn.functional.cross_entropy(reference(x.double()), labels).backward()
        trained.step()
    state = runner.named()
    for parameter, value in reference.state_dict().items():
        if parameter.startswith("student"):
            assert relative_error(state[parameter], value.numpy()) < 1e-5
        elif parameter in state:
            assert (state[parameter] == dict(model.named_parameters())[parameter].detach().numpy()).all(), parameter
    assert "teacher.weight" in state


class OnlyStatistics(torch.nn.Module):
    """A batch norm of which nothing but its new running mean is used, which has no gradient."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear = torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 4)

    def forward(self, x):
        self.norm(x)
        return self.linear(x + self.norm.running_mean)


def test_new_statistics_have_no_gradient():
    torch.manual_seed(0)
    model = OnlyStatistics().train()
    reference = copy.deepcopy(model).double()
    x, labels = torch.randn(STEPS, SAMPLES, 5), torch.randint(0, 4, (STEPS, SAMPLES))
    runner = Runner(build_step(from_exported_program(torch.export.export(model, (x[0],))), lr=RATE))
    train_beside(runner, reference, zip(x, labels, strict=True), RATE)
    assert relative_error(runner.named()["norm.running_mean"], reference.norm.running_mean.numpy()) < 1e-5


@pytest.mark.parametrize("momentum", [None, 0.1])
def test_statistics_that_never_change_are_a_warning(momentum):
    """PyTorch exports an average over all batches, momentum=None, as momentum 0 in eval mode."""
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), torch.nn.BatchNorm2d(3, momentum=momentum)).eval()
    found = from_exported_program(torch.export.export(model, (torch.randn(2, 2, 5, 5),))).warnings
    assert [text.partition(" momentum 0 ")[0] for text in found] == (["a batch norm has"] if momentum is None else [])


class InnerGradient(Base):
    def forward(self, x):
        return self.linear(torch.func.grad(lambda h: (h**3).sum())(self.features(x)))


class Sparse(Base):
    def __init__(self):
        super().__init__()
        self.register_buffer("graph", torch.eye(3).to_sparse())

    def forward(self, x):
        return self.linear(torch.sparse.mm(self.graph, self.features(x)))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (InnerGradient, r"torch\.func, test_torch_no_grad\.py:\d+: .* write that gradient as operators\.$"),
        (Sparse, r"tensor 'graph' is sparse \(torch\.sparse_coo\); give the model its to_dense\(\)\.$"),
    ],
)
def test_what_export_loses_is_refused_with_a_remedy(make, said):
    program = torch.export.export(make().train(), (torch.randn(SAMPLES, 2, 5, 5),))
    with pytest.raises(ModelError, match=said):
        from_exported_program(program)


class Checkpointed(Base):
    """A checkpoint after which torch.export writes the rest of the model under no_grad."""

    def forward(self, x):
        return checkpoint(self.linear, self.features(x), use_reentrant=True)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loss_without_gradients_is_refused():
    """As PyTorch's backward() refuses it."""
    program = torch.export.export(Checkpointed().train(), (torch.zeros(SAMPLES, 2, 5, 5),))
    with pytest.raises(
        ModelError, match=r"no gradient of the loss reaches any of its parameters \(4\).*use_reentrant=Fa"
    ):
        build_step(from_exported_program(program))
