# SPDX-License-Identifier: Apache-2.0
"""Architectures that no library of the zoo has: generators, audio, volumes, mixers; written as their papers draw them.

Widths are small. `MODELS` has each with the shapes of its inputs for one sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def dcgan_generator(width: int = 32) -> nn.Module:
    """DCGAN's generator (Radford et al., 2016): transposed convolutions from a vector to an image."""
    layers: list[nn.Module] = []
    channels = [64, width * 8, width * 4, width * 2, width]
    for number, (into, out) in enumerate(pairwise(channels)):
        stride, padding = (1, 0) if number == 0 else (2, 1)
        layers += [nn.ConvTranspose2d(into, out, 4, stride, padding, bias=False), nn.BatchNorm2d(out), nn.ReLU(True)]
    return nn.Sequential(*layers, nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh())


def dcgan_discriminator(width: int = 32) -> nn.Module:
    """DCGAN's discriminator."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for scale in (1, 2, 4):
        layers += [nn.Conv2d(width * scale, width * scale * 2, 4, 2, 1, bias=False), nn.BatchNorm2d(width * scale * 2)]
        layers += [nn.LeakyReLU(0.2, inplace=True)]
    return nn.Sequential(*layers, nn.Conv2d(width * 8, 1, 4, 1, 0, bias=False), nn.Flatten())


class CycleGan(nn.Module):
    """CycleGAN's generator (Zhu et al., 2017): reflection padding, instance norm, residual blocks."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.ReflectionPad2d(3), *_normed(nn.Conv2d(3, width, 7), width))
        self.down = nn.Sequential(
            *_normed(nn.Conv2d(width, width * 2, 3, 2, 1), width * 2),
            *_normed(nn.Conv2d(width * 2, width * 4, 3, 2, 1), width * 4),
        )
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.ReflectionPad2d(1),
                *_normed(nn.Conv2d(width * 4, width * 4, 3), width * 4),
                nn.ReflectionPad2d(1),
                nn.Conv2d(width * 4, width * 4, 3),
                nn.InstanceNorm2d(width * 4),
            )
            for _ in range(blocks)
        )
        self.up = nn.Sequential(
            *_normed(nn.ConvTranspose2d(width * 4, width * 2, 3, 2, 1, 1), width * 2),
            *_normed(nn.ConvTranspose2d(width * 2, width, 3, 2, 1, 1), width),
        )
        self.tail = nn.Sequential(nn.ReflectionPad2d(3), nn.Conv2d(width, 3, 7), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.head(x))
        for block in self.blocks:
            x = x + block(x)
        return self.tail(self.up(x))


def _normed(convolution: nn.Module, channels: int) -> tuple[nn.Module, ...]:
    return convolution, nn.InstanceNorm2d(channels), nn.ReLU(inplace=True)


def espcn(scale: int = 3) -> nn.Module:
    """ESPCN (Shi et al., 2016): super-resolution by a pixel shuffle."""
    return nn.Sequential(
        nn.Conv2d(1, 64, 5, padding=2),
        nn.Tanh(),
        nn.Conv2d(64, 32, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(32, scale * scale, 3, padding=1),
        nn.PixelShuffle(scale),
    )


class SrResNet(nn.Module):
    """SRResNet (Ledig et al., 2017)."""

    def __init__(self, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        self.head = nn.Sequential(nn.Conv2d(3, width, 9, padding=4), nn.PReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
                nn.PReLU(),
                nn.Conv2d(width, width, 3, padding=1),
                nn.BatchNorm2d(width),
            )
            for _ in range(blocks)
        )
        self.joined = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width))
        self.up = nn.Sequential(nn.Conv2d(width, width * 4, 3, padding=1), nn.PixelShuffle(2), nn.PReLU())
        self.tail = nn.Conv2d(width, 3, 9, padding=4)

    def forward(self, x: Tensor) -> Tensor:
        head = self.head(x)
        x = head
        for block in self.blocks:
            x = x + block(x)
        return self.tail(self.up(head + self.joined(x)))


class DiffusionUNet(nn.Module):
    """A diffusion model's U-Net (Ho et al., 2020): group norm, SiLU, time embedding, attention at the bottom."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, width * 4), nn.SiLU(), nn.Linear(width * 4, width * 4))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down1 = _TimedBlock(width, width, width * 4)
        self.halved = nn.Conv2d(width, width, 3, 2, 1)
        self.down2 = _TimedBlock(width, width * 2, width * 4)
        self.norm = nn.GroupNorm(8, width * 2)
        self.qkv = nn.Conv2d(width * 2, width * 6, 1)
        self.out = nn.Conv2d(width * 2, width * 2, 1)
        self.up = _TimedBlock(width * 3, width, width * 4)
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        rates = torch.exp(
            torch.arange(self.width // 2, device=x.device, dtype=x.dtype) * (-math.log(1e4) * 2 / self.width)
        )
        angles = time[:, None] * rates[None, :]
        timed = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        skip = self.down1(self.first(x), timed)
        h = self.down2(self.halved(skip), timed)
        # One head, as an axis of its own: torch.onnx.export takes attention with four axes only.
        q, k, v = self.qkv(self.norm(h)).flatten(2).transpose(1, 2).unsqueeze(1).chunk(3, dim=3)
        attended = F.scaled_dot_product_attention(q, k, v).squeeze(1).transpose(1, 2).reshape(h.shape)
        h = F.interpolate(h + self.out(attended), scale_factor=2.0, mode="nearest")
        return self.last(self.up(torch.cat([h, skip], dim=1), timed))


class _TimedBlock(nn.Module):
    def __init__(self, into: int, out: int, timed: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, into), nn.Conv2d(into, out, 3, padding=1)
        self.time = nn.Linear(timed, out)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.skip = nn.Conv2d(into, out, 1) if into != out else nn.Identity()

    def forward(self, x: Tensor, timed: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(timed))[:, :, None, None]
        return self.skip(x) + self.conv2(F.dropout(F.silu(self.norm2(h)), 0.1, self.training))


class WaveNet(nn.Module):
    """WaveNet (van den Oord et al., 2016): gated, dilated, causal 1-D convolutions."""

    def __init__(self, width: int = 32, levels: int = 6) -> None:
        super().__init__()
        self.first = nn.Conv1d(1, width, 1)
        self.gates = nn.ModuleList(nn.Conv1d(width, width * 2, 2, dilation=2**level) for level in range(levels))
        self.residuals = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(levels))
        self.skips = nn.ModuleList(nn.Conv1d(width, width, 1) for _ in range(levels))
        self.last = nn.Sequential(nn.ReLU(), nn.Conv1d(width, width, 1), nn.ReLU(), nn.Conv1d(width, 64, 1))

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.first(x), 0.0
        for level, (gate, residual, skip) in enumerate(zip(self.gates, self.residuals, self.skips, strict=True)):
            filtered, opened = gate(F.pad(x, (2**level, 0))).chunk(2, dim=1)
            h = filtered.tanh() * opened.sigmoid()
            x, total = x + residual(h), total + skip(h)
        return self.last(total)


class TemporalConvNet(nn.Module):
    """TCN (Bai et al., 2018): dilated causal blocks with weight norm and dropout; the last time step classifies."""

    def __init__(self, width: int = 32, levels: int = 4) -> None:
        super().__init__()
        norm = nn.utils.parametrizations.weight_norm
        self.convolutions = nn.ModuleList(
            norm(nn.Conv1d(8 if level == 0 else width, width, 3, dilation=2**level)) for level in range(levels)
        )
        self.skip = nn.Conv1d(8, width, 1)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for level, convolution in enumerate(self.convolutions):
            h = F.dropout(F.relu(convolution(F.pad(x, (2 * 2**level, 0)))), 0.1, self.training)
            x = F.relu(h + (self.skip(x) if level == 0 else x))
        return self.head(x[:, :, -1])


def m5() -> nn.Module:
    """M5 (Dai et al., 2017): raw audio to a class."""
    layers: list[nn.Module] = []
    for into, out, kernel, stride in ((1, 32, 80, 16), (32, 32, 3, 1), (32, 64, 3, 1), (64, 64, 3, 1)):
        layers += [nn.Conv1d(into, out, kernel, stride), nn.BatchNorm1d(out), nn.ReLU(), nn.MaxPool1d(4)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(64, 35))


class Crnn(nn.Module):
    """CRNN (Shi et al., 2017): convolutions, then a bidirectional LSTM over the columns."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d((2, 1)),
        )
        self.recurrent = nn.LSTM(32 * 8, 32, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 12)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(x).flatten(1, 2).transpose(1, 2)
        return self.head(self.recurrent(h)[0]).transpose(1, 2)


class ConvTasNet(nn.Module):
    """Conv-TasNet (Luo and Mesgarani, 2019): a learned filter bank, a mask from dilated depthwise blocks."""

    def __init__(self, width: int = 64, speakers: int = 2) -> None:
        super().__init__()
        self.speakers = speakers
        self.encoder = nn.Conv1d(1, width, 16, 8, bias=False)
        self.norm = nn.GroupNorm(1, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv1d(width, width * 2, 1),
                nn.PReLU(),
                nn.GroupNorm(1, width * 2),
                nn.Conv1d(width * 2, width * 2, 3, padding=2**level, dilation=2**level, groups=width * 2),
                nn.PReLU(),
                nn.GroupNorm(1, width * 2),
                nn.Conv1d(width * 2, width, 1),
            )
            for level in range(4)
        )
        self.mask = nn.Conv1d(width, width * speakers, 1)
        self.decoder = nn.ConvTranspose1d(width, 1, 16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x).relu()
        h = self.norm(encoded)
        for block in self.blocks:
            h = h + block(h)
        masks = self.mask(h).sigmoid().unflatten(1, (self.speakers, -1))
        parts = (masks * encoded[:, None]).flatten(0, 1)
        return self.decoder(parts).view(x.shape[0], self.speakers, -1)


class UNet3d(nn.Module):
    """3-D U-Net (Cicek et al., 2016): pooled volumes, transposed convolutions back up."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.down1, self.down2 = _volume_block(1, width), _volume_block(width, width * 2)
        self.bottom = _volume_block(width * 2, width * 4)
        self.up2 = nn.ConvTranspose3d(width * 4, width * 2, 2, 2)
        self.joined2 = _volume_block(width * 4, width * 2)
        self.up1 = nn.ConvTranspose3d(width * 2, width, 2, 2)
        self.joined1 = _volume_block(width * 2, width)
        self.last = nn.Conv3d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        first = self.down1(x)
        second = self.down2(F.max_pool3d(first, 2))
        h = self.bottom(F.max_pool3d(second, 2))
        h = self.joined2(torch.cat([self.up2(h), second], dim=1))
        return self.last(self.joined1(torch.cat([self.up1(h), first], dim=1)))


def _volume_block(into: int, out: int) -> nn.Module:
    return nn.Sequential(nn.Conv3d(into, out, 3, padding=1), nn.BatchNorm3d(out), nn.ReLU(inplace=True))


class TwoInputs(nn.Module):
    """An image and a vector of features, joined before the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.Hardswish(), nn.AdaptiveMaxPool2d(1)
        )
        self.vector = nn.Sequential(nn.Linear(6, 16), nn.GELU())
        self.head = nn.Linear(32, 5)

    def forward(self, image: Tensor, vector: Tensor) -> Tensor:
        return self.head(torch.cat([self.image(image).flatten(1), self.vector(vector)], dim=1))


class DropFlavours(nn.Module):
    """Every dropout that `torch.nn` has, each behind a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.Dropout2d(0.2),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Dropout(0.2, inplace=True),
            nn.ELU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.AlphaDropout(0.1),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Linear(32, 5),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[tuple[int, ...], ...]]] = {
    "conv_tasnet": (ConvTasNet, ((1, 800),)),
    "crnn": (Crnn, ((1, 32, 64),)),
    "cyclegan": (CycleGan, ((3, 64, 64),)),
    "dcgan_discriminator": (dcgan_discriminator, ((3, 64, 64),)),
    "dcgan_generator": (dcgan_generator, ((64, 1, 1),)),
    "diffusion_unet": (DiffusionUNet, ((3, 32, 32), ())),
    "drop_flavours": (DropFlavours, ((3, 16, 16),)),
    "espcn": (espcn, ((1, 32, 32),)),
    "m5": (m5, ((1, 8000),)),
    "srresnet": (SrResNet, ((3, 32, 32),)),
    "tcn": (TemporalConvNet, ((8, 64),)),
    "two_inputs": (TwoInputs, ((3, 32, 32), (6,))),
    "unet3d": (UNet3d, ((1, 16, 16, 16),)),
    "wavenet": (WaveNet, ((1, 256),)),
}
"""What makes each model, and the shapes of its inputs for one sample."""
