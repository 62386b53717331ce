# SPDX-License-Identifier: Apache-2.0
"""The networks whose whole training steps are measured, as PyTorch modules, without dropout and stochastic depth.

Sources: He et al. 2015 (ResNet-18; for CIFAR with a 3x3 stem and no pool), Sandler et al. 2018, Liu et al. 2022.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(into, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """[n, into, h, w] to [n, out, h / stride, w / stride]."""
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18."""

    def __init__(self, classes: int, small: bool) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 3, 1, 1, bias=False)] if small else [nn.Conv2d(3, 64, 7, 2, 3, bias=False)]
        self.stem = nn.Sequential(*stem, nn.BatchNorm2d(64), nn.ReLU())
        self.pool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        blocks, channels = [], 64
        for stage in range(4):
            for block in range(2):
                width = 64 << stage
                blocks.append(BasicBlock(channels, width, 2 if stage and not block else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.classifier = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = self.blocks(self.pool(self.stem(x)))
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class InvertedResidual(nn.Module):
    """1x1 up, 3x3 depthwise, 1x1 down."""

    def __init__(self, into: int, out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = into * expansion
        self.residual = stride == 1 and into == out
        up = [nn.Conv2d(into, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.ReLU6()] if expansion > 1 else []
        self.layers = nn.Sequential(
            *up,
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[n, into, h, w] to [n, out, h / stride, w / stride]."""
        y = self.layers(x)
        return x + y if self.residual else y


class MobileNetV2(nn.Module):
    """MobileNetV2 of width 1."""

    SETTINGS = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
        channels = 32
        for expansion, out, blocks, stride in self.SETTINGS:
            for block in range(blocks):
                layers.append(InvertedResidual(channels, out, 1 if block else stride, expansion))
                channels = out
        layers += [nn.Conv2d(channels, 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU6()]
        self.layers = nn.Sequential(*layers)
        self.classifier = nn.Linear(1280, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.classifier(self.layers(x).mean((2, 3)))


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of [n, c, h, w]."""

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm, an inner product up and down, and a scaled residual."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.up = nn.Linear(channels, 4 * channels)
        self.down = nn.Linear(4 * channels, channels)
        self.scale = nn.Parameter(1e-6 * torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """The same shape."""
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.down(F.gelu(self.up(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNeXtT(nn.Module):
    """ConvNeXt-T."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), ChannelNorm(96, eps=1e-6)]
        for stage, (width, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
            if stage:
                layers += [ChannelNorm(width // 2, eps=1e-6), nn.Conv2d(width // 2, width, 2, 2)]
            layers += [ConvNeXtBlock(width) for _ in range(blocks)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.LayerNorm(768, eps=1e-6)
        self.classifier = nn.Linear(768, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        return self.classifier(self.norm(self.layers(x).mean((2, 3))))


class GroupNormCifar(nn.Module):
    """Three stages of two 3x3 convolutions and one with stride 2, and a group norm: samples are independent."""

    def __init__(self, classes: int, width: int = 16, stages: int = 3) -> None:
        super().__init__()
        widths = [width * 2**stage for stage in range(stages)]
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.first = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for c in widths)
        self.second = nn.ModuleList(nn.Conv2d(c, c, 3, padding=1) for c in widths)
        self.down = nn.ModuleList(nn.Conv2d(c, 2 * c, 3, stride=2, padding=1) for c in widths)
        self.norm = nn.GroupNorm(8, 2 * widths[-1])
        self.classifier = nn.Linear(2 * widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        x = F.relu(self.stem(x))
        for first, second, down in zip(self.first, self.second, self.down, strict=True):
            x = F.relu(x + second(F.relu(first(x))))
            x = F.relu(down(x))
        return self.classifier(self.norm(x).mean((2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet18_cifar": (lambda: ResNet18(10, small=True), 32),
    "resnet18": (lambda: ResNet18(1000, small=False), 224),
    "mobilenet_v2": (lambda: MobileNetV2(1000), 224),
    "convnext_t": (lambda: ConvNeXtT(1000), 224),
    "groupnorm_cifar": (lambda: GroupNormCifar(10), 32),
}
"""How each is made, and the extent of its images."""


def network(name: str, seed: int = 0) -> tuple[nn.Module, int]:
    """A network of NETWORKS in train mode, with PyTorch's initial values, and the extent of its images."""
    torch.manual_seed(seed)
    make, size = NETWORKS[name]
    return make().train(), size
