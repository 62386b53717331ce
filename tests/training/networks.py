# SPDX-License-Identifier: Apache-2.0
"""PyTorch networks that the tests train: small forms of well-known ones."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class ResidualBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 for 32x32 images; `width` is 64 in the original."""

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        blocks = []
        channels = width
        for stage in range(4):
            for block in range(2):
                wider = width * 2**stage
                blocks.append(ResidualBlock(channels, wider, 2 if stage and not block else 1))
                channels = wider
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, classes)

    def forward(self, x):
        x = self.blocks(F.relu(self.bn(self.conv(x))))
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class InvertedResidual(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels_in * expand
        self.residual = stride == 1 and channels_in == channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU6(),
            nn.Conv2d(hidden, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x):
        return x + self.layers(x) if self.residual else self.layers(x)


class MobileNetV2(nn.Module):
    """Three stages of MobileNetV2, narrow."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU6(),
            InvertedResidual(8, 8, 1, 2),
            InvertedResidual(8, 12, 2, 3),
            InvertedResidual(12, 12, 1, 3),
        )
        self.fc = nn.Linear(12, 5)

    def forward(self, x):
        return self.fc(self.layers(x).mean((2, 3)))


class ConvNeXtBlock(nn.Module):
    """Depthwise 7x7, layer norm over channels, GELU and a scaled residual."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 4, 4)
        self.depthwise = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.norm = nn.LayerNorm(channels, eps=1e-6)
        self.expand = nn.Linear(channels, 4 * channels)
        self.project = nn.Linear(4 * channels, channels)
        self.gamma = nn.Parameter(0.5 * torch.ones(channels))
        self.head = nn.Linear(channels, 5)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.gamma * self.project(F.gelu(self.expand(y)))
        x = x + y.permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


class UNet(nn.Module):
    """Two levels; transposed convolutions bring the extents back, skips are concatenated."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.down1 = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.down2 = nn.Sequential(nn.Conv2d(6, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU())
        self.bottom = nn.Sequential(nn.Conv2d(8, 8, 3, padding=2, dilation=2), nn.LeakyReLU(0.1))
        self.up2 = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.join2 = nn.Conv2d(16, 6, 3, padding=1)
        self.up1 = nn.ConvTranspose2d(6, 6, 3, stride=2, padding=1, output_padding=1)
        self.out = nn.Conv2d(12, classes, 1)

    def forward(self, x):
        one = self.down1(x)
        two = self.down2(F.max_pool2d(one, 2))
        bottom = self.bottom(F.avg_pool2d(two, 2))
        y = F.relu(self.join2(torch.cat([self.up2(bottom), two], 1)))
        return self.out(torch.cat([self.up1(y), one], 1))


class Volumes(nn.Module):
    """A 3-D CNN."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(1, 4, 3, padding=1)
        self.bn = nn.BatchNorm3d(4)
        self.conv2 = nn.Conv3d(4, 6, 3, stride=2, padding=1, bias=False)
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        x = F.relu(self.bn(self.conv1(x)))
        x = F.relu(self.conv2(x))
        return self.fc(x.mean((2, 3, 4)))
