# SPDX-License-Identifier: Apache-2.0
"""Whether the samples of a batch depend on each other in a model of PyTorch, by which operator, or not known."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from relax_ops.per_sample.states import Mixed  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.model.sample_mixing import mixing_of  # noqa: E402


class Net(nn.Module):
    """A convolution and a linear layer, and what stands between them: from (samples, 4, 6, 6) to (samples, 4)."""

    def __init__(self, between):
        super().__init__()
        self.convolution, self.linear = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(4, 3)
        self.part, self.call = between()

    def forward(self, x):
        return self.linear(self.call(self.part, self.convolution(x)))


def pooled(call):
    """What does `call` with the pooled channels."""
    return lambda: (nn.Identity(), lambda _, h: call(h.mean((2, 3))))


def layer(make):
    """A layer of images in front of the pool."""
    return lambda: (make(), lambda part, h: part(h).mean((2, 3)))


def sequence(make, call=lambda part, h: part(h).mean(1)):
    """A layer of sequences of pixels."""
    return lambda: (make(), lambda part, h: call(part, h.flatten(2).transpose(1, 2)))


def attended(_part, h):
    return F.scaled_dot_product_attention(h, h, h).mean(1)


APART = {
    "nothing": pooled(lambda h: h.relu()),
    "tracked batch norm": layer(lambda: nn.BatchNorm2d(4)),
    "group norm": layer(lambda: nn.GroupNorm(2, 4)),
    "instance norm": layer(lambda: nn.InstanceNorm2d(4)),
    "dropout": layer(lambda: nn.Dropout(0.3)),
    "resize": layer(lambda: nn.Upsample(scale_factor=2, mode="bilinear")),
    "unit vectors": pooled(lambda h: F.normalize(h, dim=1)),
    "attention": sequence(nn.Identity, attended),
    "embedding": lambda: (nn.Embedding(8, 4), lambda part, h: part((h.mean((2, 3)).abs() * 8).long() % 8).mean(1)),
    "multi-head attention": sequence(
        lambda: nn.MultiheadAttention(4, 2, batch_first=True), lambda part, h: part(h, h, h)[0].mean(1)
    ),
    "transformer": sequence(lambda: nn.TransformerEncoderLayer(4, 2, 8, batch_first=True)),
    "lstm": sequence(lambda: nn.LSTM(4, 4, batch_first=True), lambda part, h: part(h)[0][:, -1]),
    "gru": sequence(lambda: nn.GRU(4, 4), lambda part, h: part(h.transpose(0, 1))[0][-1]),
    "padded": layer(lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.MaxPool2d(2))),
}

MIXED = {
    "untracked batch norm": (
        layer(lambda: nn.BatchNorm2d(4, track_running_stats=False)),
        "normalises over the samples",
    ),
    "centred": (pooled(lambda h: h - h.mean(0)), "relax.mean: it reduces over the samples"),
    "largest": (pooled(lambda h: h - h.amax(0)), "relax.max: it reduces over the samples"),
    "unit columns": (pooled(lambda h: F.normalize(h, dim=0)), "a sum over the samples"),
    "rolled": (pooled(lambda h: h + h.roll(1, 0)), "it selects samples"),
    "first": (pooled(lambda h: h - h[:1]), "it selects samples"),
    "similarities": (pooled(lambda h: (h @ h.T) @ h), "it multiplies each sample by every other"),
    "softmax": (pooled(lambda h: h.softmax(0)), "it runs along the samples"),
    "halves": (pooled(lambda h: torch.cat([h[:2] * h[2:], h[2:]])), "it selects samples"),
}


def mixing(between):
    torch.manual_seed(0)
    return mixing_of(from_exported_program(torch.export.export(Net(between).train(), (torch.randn(4, 3, 6, 6),))))


@pytest.mark.parametrize("name", APART)
def test_samples_that_stay_apart(name):
    assert mixing(APART[name]) is None


@pytest.mark.parametrize("name", MIXED)
def test_samples_that_depend_on_each_other(name):
    between, reason = MIXED[name]
    found = mixing(between)
    assert found.is_known
    assert reason in found.reason


def test_what_is_not_known():
    """Rows that have parts of two samples, and get them back."""
    found = mixing(pooled(lambda h: h.reshape(2, 8).exp().reshape(4, 4)))
    assert found == Mixed("relax.reshape: it merges the axis of the samples with others", is_known=False)
