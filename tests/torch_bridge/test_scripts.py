# SPDX-License-Identifier: Apache-2.0
"""Training scripts as nobody plans them: what they give with the bridge and without is equal but for rounding."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

nn, F = torch.nn, torch.nn.functional
Script = Callable[[], list]
BOUND = 1e-5
"""Of each tensor's largest number: a few roundings of float32 after some updates; 3e-6 was found."""


def check(
    script: Callable[[], list], store: Path, *, always: bool = True, least: int = 1, bound: float = BOUND
) -> None:
    """Compare a script's tensors, their strides among it, with PyTorch's own; kernels must have computed calls."""
    wanted = script()
    with bridge.enable(wait=True, always=always, folder=store):
        script()
        before = bridge.stats().kernel_calls
        found = script()
        if always:
            assert bridge.stats().kernel_calls - before >= least
    assert len(found) == len(wanted)
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), number
        assert (one - other).abs().max() <= bound * other.abs().max() + 1e-12, number


def batch(seed: int, samples: int = 4, size: int = 9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(samples, 3, size, size, generator=generator), torch.randint(5, (samples,), generator=generator)


def small(seed: int = 0):
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


def parameters_of(module) -> list:
    return [each.detach().clone() for each in module.parameters()]


class Shared(nn.Module):
    """One kernel in four convolutions, dilated and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.shared, self.last = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 3, bias=False), nn.Linear(4, 5)

    def forward(self, x):
        x = self.first(x)
        for dilation in (1, 2, 1):
            x = x + F.conv2d(x, self.shared.weight, padding=dilation, dilation=dilation).tanh()
        x = x + F.conv_transpose2d(x, self.shared.weight, padding=1)
        return self.last(x.mean((2, 3)))


def changing() -> list:
    """Formats, frozen parts and the optimizer change on the way; a copy of the model infers meanwhile."""
    torch.manual_seed(0)
    model, averaged, found = Shared(), None, []
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for number in range(12):
        x, y = batch(number)
        if number == 3:
            model = model.to(memory_format=torch.channels_last)
        if number >= 3 and number % 2:
            x = x.to(memory_format=torch.channels_last)
        if number == 4:
            averaged = copy.deepcopy(model)
        model.first.requires_grad_(number not in (5, 6))
        model.shared.weight.requires_grad_(number not in (7, 8))
        if number == 9:
            model = model.to(memory_format=torch.contiguous_format)
            optimizer = torch.optim.Adam(model.parameters(), 0.01)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        found.append(loss.detach())
        if averaged is not None:
            with torch.inference_mode():
                found.append(averaged(x).clone())
    return found + parameters_of(model)


@pytest.mark.parametrize("always", [True, False])
def test_a_model_that_changes(always: bool, store: Path) -> None:
    check(changing, store, always=always, least=80)


def views() -> list:
    """Memory that is cut out of other memory, not at a multiple of 64 bytes either; gradients of stride 0."""
    torch.manual_seed(0)
    wide = torch.randn(2, 8, 8, 8)
    inputs = [
        torch.randn(1 + 2 * 4 * 8 * 8)[1:].view(2, 4, 8, 8),
        wide[:, ::2],
        wide[:, 2:6],
        torch.randn(2, 8, 8, 4).permute(0, 3, 1, 2),
        torch.randn(1, 4, 8, 8).expand(2, 4, 8, 8),
        torch.randn(2, 4, 8, 8).transpose(2, 3),
    ]
    weights = [
        torch.randn(6, 4, 3, 3),
        torch.randn(3 + 6 * 36)[3:].view(6, 4, 3, 3),
        torch.randn(6, 3, 3, 4).permute(0, 3, 1, 2),
    ]
    losses = [
        lambda y: y.sum(),
        lambda y: y[:, :, ::2].square().sum(),
        lambda y: y.permute(0, 2, 3, 1).reshape(-1).cos().sum(),
    ]
    found = []
    for x in inputs:
        for w in weights:
            for loss in losses:
                data, weight = x.detach().requires_grad_(), w.detach().requires_grad_()
                y = F.conv2d(data, weight, padding=1)
                first = torch.autograd.grad(loss(y), (data, weight), create_graph=True)
                found += [y.detach(), *(each.detach() for each in first)]
                found += torch.autograd.grad(sum(each.square().sum() for each in first), weight)
    return found


def test_views(store: Path) -> None:
    check(views, store, least=50)


CASES: list[tuple[tuple[int, ...], tuple[int, ...], dict]] = [
    ((2, 1, 7, 1), (3, 1, 3, 1), {"padding": (1, 0)}),
    ((3, 4, 1, 9), (8, 1, 1, 3), {"groups": 4}),
    ((2, 3, 7, 7), (5, 3, 2, 2), {"padding": 3, "stride": 3}),
]


def extents() -> list:
    """Extents of one, for which formats are ambiguous, and each choice of wanted gradients."""
    generator, found = torch.Generator().manual_seed(0), []
    for shape, kernel, fixed in CASES:
        for wanted in ((1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1)):
            for form in (torch.contiguous_format, torch.channels_last):
                tensors = [torch.randn(each, generator=generator) for each in (shape, kernel, kernel[:1])]
                tensors = [*(each.to(memory_format=form) for each in tensors[:2]), tensors[2]]
                for each, is_wanted in zip(tensors, wanted, strict=True):
                    each.requires_grad_(bool(is_wanted))
                y = F.conv2d(*tensors, **fixed)
                gradients = torch.autograd.grad(y.sin().sum(), [each for each in tensors if each.requires_grad])
                found += [y.detach(), *gradients]
    return found


def test_extents_of_one_and_wanted_gradients(store: Path) -> None:
    check(extents, store, least=20)


def ensemble() -> list:
    """Gradients of three models at once and of each sample, by functional_call and vmap of grad."""
    models = [small(seed).eval() for seed in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)
    shell = copy.deepcopy(models[0]).to("meta")

    def loss(values, others, x, y):
        return F.cross_entropy(torch.func.functional_call(shell, (values, others), (x[None],)), y[None])

    found, gradient = [], torch.func.grad(loss)
    for number in range(3):
        x, y = batch(number)
        of_models = torch.func.vmap(gradient, (0, 0, None, None))
        of_all = torch.func.vmap(torch.func.vmap(gradient, (None, None, 0, 0)), (0, 0, None, None))
        found += of_all(parameters, buffers, x, y).values()
        change = of_models(parameters, buffers, x[0], y[0])
        parameters = {name: value - 0.1 * change[name] for name, value in parameters.items()}
    return found + list(parameters.values())


def test_an_ensemble(store: Path) -> None:
    check(ensemble, store)


def hooked() -> list:
    """Saved tensors replaced by copies, graphs used twice, gradients of gradients, parametrized weights."""
    torch.manual_seed(0)
    norms = torch.nn.utils.parametrizations
    model = nn.Sequential(
        norms.weight_norm(nn.Conv2d(3, 6, 3)), nn.SiLU(),
        norms.spectral_norm(nn.Conv2d(6, 6, 3, padding=1, padding_mode="circular")), nn.SiLU(inplace=True),
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(6, 5),
    )  # fmt: skip
    optimizer, found = torch.optim.RMSprop(model.parameters(), 0.01), []
    for number in range(5):
        x, y = batch(number)
        x.requires_grad_()
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
            loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()
        (gradient,) = torch.autograd.grad(F.cross_entropy(model(x), y), x, create_graph=True)
        gradient.square().sum().backward()
        torch.utils.checkpoint.checkpoint_sequential(model, 2, x, use_reentrant=False).sum().backward()
        optimizer.step()
        found.append(loss.detach())
    return found + parameters_of(model)


def test_hooks_and_penalties(store: Path) -> None:
    check(hooked, store, least=40, bound=1e-4)  # spectral_norm divides by an estimate


def in_threads() -> list:
    """Three threads, each of which trains its own model, two of them on the same shapes."""
    models = [small(seed) for seed in range(3)]

    def train(place: int) -> None:
        optimizer = torch.optim.SGD(models[place].parameters(), 0.1)
        for number in range(6):
            x, y = batch(100 * place + number, 4 + place % 2)
            optimizer.zero_grad()
            F.cross_entropy(models[place](x), y).backward()
            optimizer.step()
            if number % 3 == 2:
                with torch.inference_mode():
                    models[place](x)

    threads = [threading.Thread(target=train, args=(place,)) for place in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [each for model in models for each in parameters_of(model)]


@pytest.mark.parametrize("always", [True, False])
def test_models_in_threads(always: bool, store: Path) -> None:
    check(in_threads, store, always=always, least=80)
