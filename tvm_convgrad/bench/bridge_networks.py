# SPDX-License-Identifier: Apache-2.0
"""The networks that a bridge is measured with beside those of networks.py: ResNet-50, a U-Net, a 3-D CNN.

Sources: He et al. 2015 with the stride in the 3x3 convolution; Ronneberger et al. 2015 with padding, a quarter of the
width, and batch norms; a 3-D ResNet's stages (Tran et al. 2018) without shortcuts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tvm_convgrad.bench.networks import NETWORKS


class Bottleneck(nn.Module):
    """1x1 down, 3x3, 1x1 up, and a shortcut."""

    def __init__(self, into: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.layers = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, out, 1, bias=False),
            nn.BatchNorm2d(out),
        )
        self.shortcut = nn.Sequential()
        if stride != 1 or into != out:
            self.shortcut = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        """[n, into, h, w] to [n, 4 width, h / stride, w / stride]."""
        return F.relu(self.layers(x) + self.shortcut(x))


def resnet50(classes: int) -> nn.Module:
    """ResNet-50."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            width = 64 << stage
            layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def _two(into: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(into, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
        nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU(),
    )  # fmt: skip


class UNet(nn.Module):
    """Four levels down and up, with transposed convolutions; the mean over pixels is classified."""

    def __init__(self, classes: int, width: int = 16) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(_two(into, out) for into, out in zip([3, *widths], widths, strict=False))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(into, out, 2, 2) for into, out in pairs)
        self.merge = nn.ModuleList(_two(2 * out, out) for _, out in pairs)
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of images."""
        levels = []
        for level, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if level else x)
            levels.append(x)
        for up, merge, level in zip(self.up, self.merge, levels[-2::-1], strict=True):
            x = merge(torch.cat([level, up(x)], 1))
        return self.last(x).mean((2, 3))


def cnn3d(classes: int) -> nn.Module:
    """Four stages of 3x3x3 convolutions on 16 frames."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (32, 64, 128, 256):
        layers += [nn.Conv3d(channels, width, 3, 1 if channels == 3 else 2, 1, bias=False)]
        layers += [nn.BatchNorm3d(width), nn.ReLU()]
        layers += [nn.Conv3d(width, width, 3, 1, 1, bias=False), nn.BatchNorm3d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(channels, classes))


BRIDGE_NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    **{name: (NETWORKS[name][0], (3, *[NETWORKS[name][1]] * 2)) for name in ("resnet18", "mobilenet_v2", "convnext_t")},
    "resnet50": (lambda: resnet50(1000), (3, 224, 224)),
    "cnn3d": (lambda: cnn3d(400), (3, 16, 32, 32)),
    "unet": (lambda: UNet(10), (3, 128, 128)),
    "groupnorm_cifar": (NETWORKS["groupnorm_cifar"][0], (3, 32, 32)),
}
"""How each is made, and the shape of a sample."""

__all__ = ["BRIDGE_NETWORKS", "UNet", "cnn3d", "resnet50"]
