# SPDX-License-Identifier: Apache-2.0
"""Losses of ResNet-18 trained by PyTorch in float64; a script, as PyTorch stands in another environment than Relay.

    python torch_resnet.py ARRAYS.npz STEPS RATE

ARRAYS has "data", "target" and each parameter and running statistic under the name that this network gives it. The
network is that of He et al. (2015) for 32x32 images: no stride and no pool in its stem. Prints a JSON list of losses
and then, as its last element, the running statistics of the last batch norm.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Two 3x3 convolutions beside a shortcut."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.short = nn.Sequential()
        if stride > 1:
            self.short = nn.Sequential(nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(inner + self.short(x))


def network(width: int, classes: int) -> nn.Sequential:
    """ResNet-18, `width` channels in its first stage."""
    stages = [(width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2), (4 * width, 8 * width, 2)]
    blocks = [Block(*each) for inputs, out, stride in stages for each in ((inputs, out, stride), (out, out, 1))]
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8 * width, classes),
    )  # fmt: skip


def main(arrays: str, steps: int, rate: float) -> None:
    """Train and print."""
    values = {name: torch.from_numpy(array) for name, array in np.load(arrays).items()}
    data, target = values.pop("data").double(), values.pop("target").long()
    width = values["0.weight"].shape[0]
    model = network(width, values["13.bias"].shape[0]).double()
    missing = model.load_state_dict({name: value.double() for name, value in values.items()}, strict=False)
    assert not missing.unexpected_keys, missing
    assert all(name.endswith("num_batches_tracked") for name in missing.missing_keys), missing
    optimizer, losses = torch.optim.SGD(model.parameters(), rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    last = model.state_dict()
    print(json.dumps([*losses, [last["10.bn2.running_mean"].tolist(), last["10.bn2.running_var"].tolist()]]))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
