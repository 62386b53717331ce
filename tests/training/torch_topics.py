# SPDX-License-Identifier: Apache-2.0
"""A topic: functions and layers of one tensor beside each other in one module, for `torch_operators`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

SHAPE = (2, 4, 6, 6)
"""Of the tensor that each function gets: samples, channels, height, width."""

Function = Callable[[Tensor], Tensor]


def row(x: Tensor) -> Tensor:
    """One sample as a sequence: (samples, 6, 24)."""
    return x.permute(0, 2, 1, 3).flatten(2)


def volume(x: Tensor) -> Tensor:
    """(samples, 4, 2, 3, 6)."""
    return x.unflatten(2, (2, 3))


def whole(x: Tensor) -> Tensor:
    """Four times x, rounded, with the gradient of x: sums with large integers are exact in float32."""
    return torch.round(x.detach() * 4) + (x - x.detach())


def dead(x: Tensor) -> Tensor:
    """x with vectors of channels that are all 0, rows that are, and one whole channel."""
    return x * (torch.arange(6).view(6, 1) % 3 > 0) * (torch.arange(6) > 1) * (torch.arange(4).view(4, 1, 1) != 1)


class Recurrent(nn.Module):
    """A recurrent layer over `row`, its output alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(row(x))[0]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(row(x), row(x), row(x), need_weights=False)[0]


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(24, 3, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(row(x))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM(24, 5, bidirectional=True, batch_first=True)),
    "lstm_two_layers": lambda: Recurrent(nn.LSTM(24, 5, 2, batch_first=True)),
    "gru": lambda: Recurrent(nn.GRU(24, 5, batch_first=True)),
    "rnn": lambda: Recurrent(nn.RNN(24, 5, batch_first=True)),
    "multihead": Attention,
    "transformer": Encoder,
}


class Topic(nn.Module):
    """Functions of one tensor beside each other, each of x plus a parameter of its own; the results put in a row."""

    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        self.functions = functions
        self.layers = nn.ModuleDict({name: LAYERS[name]() for name in functions if name in LAYERS})
        self.offsets = nn.ParameterDict({name: nn.Parameter(torch.zeros(SHAPE[1:])) for name in functions})

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for name, function in self.functions.items():
            y = x + self.offsets[name]
            y = self.layers[name](y) if name in self.layers else function(y)
            results.append(y.reshape(x.shape[0], -1))
        return torch.cat(results, 1)
