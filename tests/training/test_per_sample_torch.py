# SPDX-License-Identifier: Apache-2.0
"""Per-sample gradients, norms and clipped sums of whole networks against torch.func.vmap(grad) in float64."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import tvm

torch = pytest.importorskip("torch")

from relax_ops.single_run import quick_machine  # noqa: E402
from tests.cases import load  # noqa: E402
from tests.training import networks  # noqa: E402
from tests.training import test_torch_deformable as deformable  # noqa: E402
from tests.training import test_torch_spectra as spectra  # noqa: E402
from tests.training.harness import relative_error  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.per_sample import per_sample_module  # noqa: E402


def with_group_norm(network: Any, groups: int) -> Any:
    """The network with GroupNorm(min(groups, c), c) in the place of every batch norm."""
    for name, child in network.named_children():
        if isinstance(child, torch.nn.BatchNorm2d):
            channels = child.num_features
            setattr(network, name, torch.nn.GroupNorm(min(groups, channels), channels))
        else:
            with_group_norm(child, groups)
    return network


def by_torch(network: Any, x: Any, labels: Any) -> dict[str, Any]:
    """vmap(grad) of the cross entropy of one sample, in float64."""
    reference = copy.deepcopy(network).double()
    parameters = {name: value.detach() for name, value in reference.named_parameters()}

    def loss(values: Any, image: Any, label: Any) -> Any:
        scores = torch.func.functional_call(reference, values, (image[None],))
        return torch.nn.functional.cross_entropy(scores, label[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, x.double(), labels)
    return {name: value.numpy() for name, value in found.items()}


def run(model: Any, result: Any, *arrays: Any) -> list[Any]:
    main = quick_machine(per_sample_module(model, result=result))["main_per_sample"]
    values = [*arrays[:2], *model.parameters.values(), *model.states.values(), *arrays[2:]]
    return [part.numpy() for part in main(*map(tvm.runtime.tensor, values))]


def check_gradients(network: Any, x: Any, labels: Any, tolerance: float) -> None:
    model = from_exported_program(torch.export.export(network, (x,)))
    wanted = by_torch(network, x, labels)
    _, _, *found = run(model, "gradients", x.numpy(), labels.numpy())
    for name, have in zip(model.parameters, found, strict=True):
        assert relative_error(have, wanted[name]) < tolerance, name


def check_clipped(network: Any, x: Any, labels: Any, tolerance: float) -> None:
    """Norms and clipped sums."""
    model = from_exported_program(torch.export.export(network, (x,)))
    wanted = by_torch(network, x, labels)
    norms = np.sqrt(sum((value.reshape(len(x), -1) ** 2).sum(1) for value in wanted.values()))
    clip = float(np.median(norms))
    _, _, found_norms, *sums = run(model, "clipped", x.numpy(), labels.numpy(), np.float32(clip))
    assert relative_error(found_norms, norms) < tolerance
    factors = np.minimum(1, clip / norms)
    for name, have in zip(model.parameters, sums, strict=True):
        assert relative_error(have, np.tensordot(factors, wanted[name], 1)) < tolerance, name


@pytest.mark.skipif(not load.FOLDER.is_dir(), reason=load.ABSENT)
def test_functorchs_resnet18() -> None:
    """Its test_resnet18_per_sample_grads: group norm, three images of 3x32x32, ten classes; an eighth of the width."""
    case = load.read("functorch_vmap_conv")["per_sample"]["resnet18"]
    torch.manual_seed(0)
    network = with_group_norm(networks.ResNet18(8), 32)
    x = torch.randn(case["images"])
    check_gradients(network, x, torch.randint(0, case["classes"], (len(x),)), case["atol"])


def test_depthwise_network() -> None:
    torch.manual_seed(1)
    network = with_group_norm(networks.MobileNetV2(), 2)
    check_clipped(network, torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,)), 1e-3)


def test_layer_norm_and_linear_layers_on_pixels() -> None:
    torch.manual_seed(2)
    network, x, labels = networks.ConvNeXtBlock(), torch.randn(3, 3, 32, 32), torch.randint(0, 5, (3,))
    check_gradients(network, x, labels, 1e-3)
    check_clipped(network, x, labels, 1e-3)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(spectra.Spectrogram, (3, 200)), (spectra.Mixing, (3, 7, 6)), (deformable.Block, (2, 3, 13, 10))],
)
def test_spectra_and_reads_at_places(make: Any, shape: tuple[int, ...]) -> None:
    """Frames of a signal, transforms, and elements gathered at places of each sample; vmap knows no deform_conv2d."""
    torch.manual_seed(3)
    network, x, labels = make(), torch.randn(shape), torch.randint(0, 3, shape[:1])
    model = from_exported_program(torch.export.export(network, (x,)))
    _, _, *found = run(model, "gradients", x.numpy(), labels.numpy())
    reference = copy.deepcopy(network).double()
    for sample in range(len(x)):
        reference.zero_grad()
        part = slice(sample, sample + 1)
        torch.nn.functional.cross_entropy(reference(x[part].double()), labels[part]).backward()
        for (name, value), have in zip(reference.named_parameters(), found, strict=True):
            assert relative_error(have[sample], value.grad.numpy()) < 1e-4, name


class Words(torch.nn.Module):
    """A table of words, read twice, of which one word is padding; its rows are the classes' weights, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = torch.nn.Embedding(11, 6, padding_idx=0), torch.nn.GroupNorm(2, 6)
        self.bag = torch.nn.EmbeddingBag(11, 6, mode="sum")

    def forward(self, x: Any) -> Any:
        rows = self.table(x) + self.table(x * 2 % 11)
        return (self.norm(rows.transpose(1, 2)).mean(2) + self.bag(x)) @ self.table.weight.T


class Sentences(torch.nn.Module):
    """Words, a layer of sequences, and a linear layer; `call` gives the layer's sequence, with the words as axis 1."""

    def __init__(self, layer: Any, call: Any) -> None:
        super().__init__()
        self.table, self.layer, self.linear = torch.nn.Embedding(11, 6), layer, torch.nn.Linear(6, 11)
        self.call = call

    def forward(self, x: Any) -> Any:
        return self.linear(self.call(self.layer, self.table(x)).mean(1))


def first(layer: Any, h: Any) -> Any:
    return layer(h)[0]


def words_first(layer: Any, h: Any) -> Any:
    return first(layer, h.transpose(0, 1)).transpose(0, 1)


SEQUENCES: dict[str, Any] = {
    "embeddings": Words,
    "attention": lambda: Sentences(
        torch.nn.MultiheadAttention(6, 2, batch_first=True), lambda layer, h: layer(h, h, h)[0]
    ),
    "transformer": lambda: Sentences(
        torch.nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True), lambda layer, h: layer(h)
    ),
    "lstm": lambda: Sentences(torch.nn.LSTM(6, 6), words_first),
    "gru": lambda: Sentences(torch.nn.GRU(6, 3, batch_first=True, bidirectional=True), first),
}


@pytest.mark.parametrize("name", SEQUENCES)
@pytest.mark.parametrize("batch", [4, "n"])
def test_sequences(name: str, batch: Any) -> None:
    """Samples whose axis is merged with that of words before it, and first hidden states that are constants."""
    torch.manual_seed(4)
    network, x, labels = SEQUENCES[name](), torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (4,))
    free = {"dynamic_shapes": ({0: torch.export.Dim("n", min=2)},)} if batch == "n" else {}
    model = from_exported_program(torch.export.export(network, (x,), **free))
    _, _, *found = run(model, "gradients", x.numpy(), labels.numpy())
    _, _, norms = run(model, "norms", x.numpy(), labels.numpy())
    reference = copy.deepcopy(network).double()
    for sample in range(len(x)):
        reference.zero_grad()
        part = slice(sample, sample + 1)
        torch.nn.functional.cross_entropy(reference(x[part]), labels[part]).backward()
        gradients = {key: value.grad.numpy() for key, value in reference.named_parameters()}
        largest = max(np.abs(value).max() for value in gradients.values())
        for key, have in zip(model.parameters, found, strict=True):
            assert np.abs(have[sample] - gradients[key]).max() < 1e-5 * largest, key
        wanted = sum((value**2).sum() for value in gradients.values()) ** 0.5
        assert abs(norms[sample] - wanted) < 1e-5 * wanted


class Computed(torch.nn.Module):
    """A convolution whose weight `weight` computes from two of 3x3 taps, a matrix, a vector and a number."""

    def __init__(self, weight: Any) -> None:
        super().__init__()
        shapes = {"w": (8, 3, 3, 3), "v": (16, 3, 3, 3), "m": (8, 8), "b": (8,), "s": (1,)}
        for name, shape in shapes.items():
            self.register_parameter(name, torch.nn.Parameter(0.3 * torch.randn(shape)))
        self.weight, self.linear = weight, torch.nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        functional = torch.nn.functional
        return self.linear(functional.relu(functional.conv2d(x, self.weight(self), self.b, padding=1)).mean((2, 3)))


def standardized(p: Any) -> Any:
    """As in BiT's ResNets, and by a batch norm, as timm's StdConv2d."""
    centred = (p.w - p.w.mean((1, 2, 3), keepdim=True)) / (p.w.var((1, 2, 3), keepdim=True) + 1e-5).sqrt()
    normed = torch.nn.functional.batch_norm(p.v.reshape(1, 16, 27), None, None, training=True).reshape(p.v.shape)
    return centred * p.s + normed[::2]


def normalized(p: Any) -> Any:
    """Weight normalization, and low-rank terms."""
    normed = p.w / p.w.flatten(1).norm(dim=1)[:, None, None, None] * p.b[:, None, None, None]
    return normed + (p.m[:, :2] @ p.m[2:4].tril() @ p.v[:8].flatten(1)).reshape(p.w.shape)


def put_together(p: Any) -> Any:
    first, second = p.v.chunk(2)
    joined = torch.cat([first[:, :2].flip(2, 3), p.w[:, 1:2]], 1)
    return joined + second.roll(1, 2) * torch.stack([p.w, p.w * p.s]).amax(0)


def selected(p: Any) -> Any:
    rows = p.v[torch.tensor([3, 1, 1, 5, 7, 9, 11, 0])].clamp(-0.2, 0.2)
    elements = torch.gather(p.v, 0, (torch.arange(216) * 7 % 16).reshape(p.w.shape))
    ordered = p.w[:2].repeat(4, 1, 1, 1).sort(0).values
    return rows + elements.masked_fill(elements.abs() < 0.1, 0.0) + ordered.repeat_interleave(2, 0)[:8].cumsum(1)


def resized(p: Any) -> Any:
    functional = torch.nn.functional
    small = functional.interpolate(p.w[:, :, :2, :2], size=(3, 3), mode="bilinear")
    padded = functional.pad(p.v[8:, :, :2, :2], (0, 1, 1, 0), mode="replicate")
    unfolded = functional.unfold(p.w[:, :, :2, :2], 2).sum(2).mean(1)
    return small + padded + unfolded[:, None, None, None].expand(8, 3, 3, 3)


@pytest.mark.parametrize("weight", [standardized, normalized, put_together, selected, resized])
def test_weights_that_are_computed_from_parameters(weight: Any) -> None:
    """The gradient of a weight is a sum over the samples, which goes through what computes the weight."""
    torch.manual_seed(5)
    network, x, labels = Computed(weight), torch.randn(3, 3, 7, 6), torch.randint(0, 5, (3,))
    check_gradients(network, x, labels, 1e-5)
    check_clipped(network, x, labels, 1e-5)
