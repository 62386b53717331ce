# SPDX-License-Identifier: Apache-2.0
"""The convolutions of known networks at 224 x 224: each distinct layer, and how often it occurs.

Whole networks: He et al. 2015 (ResNet-50, stride in the 3x3 as torchvision has it), Sandler et al. 2018 (MobileNetV2),
Simonyan and Zisserman 2014 (VGG-16), Liu et al. 2022 (ConvNeXt-T, its linear layers as 1x1 convolutions).

Of others only the layers that are of another kind: the grouped ones of ResNeXt-50 32x4d (Xie et al. 2017), the
dilated ones of DeepLabv3 on a ResNet-50 of output stride 8 (Chen et al. 2017), those of I3D (Carreira and Zisserman
2017) for 16 frames, with symmetric padding where TensorFlow's SAME is not, and the transposed ones of U-Net
(Ronneberger et al. 2015) for 256 x 256, as the convolutions whose dgrad is their forward pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tvm_convgrad.core.problem import ConvProblem


@dataclass(frozen=True)
class Layer:
    """One problem of a suite.

    Attributes:
        suite: the name of the suite, "problem" for one that the user names.
        problem: static.
        count: how often it occurs in its network.
    """

    suite: str
    problem: ConvProblem
    count: int = 1


def suite(name: str, batch: int, layout: str) -> dict[ConvProblem, int]:
    """The problems of a network and their counts.

    Args:
        name: a key of SUITES.
        batch: N.
        layout: "NCHW" (with OIHW) or "NHWC" (with OHWI, as PyTorch's channels_last has it); NC… and N…C in 3-D.
    """
    counts = Counter(SUITES[name]())
    return {_arranged(problem, batch, layout): count for problem, count in counts.items()}


def _arranged(problem: ConvProblem, batch: int, layout: str) -> ConvProblem:
    problem = replace(problem, batch=batch)
    if layout == "NCHW":
        return problem
    spatial = problem.data_layout[2:]
    return problem.with_layouts(f"N{spatial}C", f"O{spatial}I", f"N{spatial}C")


def _conv(
    into: int, out: int, size: int, kernel: int, stride: int, padding: int, groups: int = 1, dilation: int = 1
) -> ConvProblem:
    """A square convolution of one image of `size` x `size`."""
    return _conv_nd(into, out, (size, size), (kernel,) * 2, (stride,) * 2, (padding,) * 2, groups, dilation)


def _conv_nd(
    into: int,
    out: int,
    extents: tuple[int, ...],
    kernel: tuple[int, ...],
    strides: tuple[int, ...],
    padding: tuple[int, ...],
    groups: int = 1,
    dilation: int = 1,
) -> ConvProblem:
    return ConvProblem(
        batch=1,
        in_channels=into,
        out_channels=out,
        data_extents=extents,
        kernel=kernel,
        strides=strides,
        padding=tuple((p, p) for p in padding),
        dilation=(dilation,) * len(kernel),
        groups=groups,
    )


def _resnet50() -> Iterator[ConvProblem]:
    yield _conv(3, 64, 224, 7, 2, 3)
    channels, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            yield _conv(channels, width, size, 1, 1, 0)
            yield _conv(width, width, size, 3, stride, 1)
            if block == 0:
                yield _conv(channels, 4 * width, size, 1, stride, 0)
            size //= stride
            yield _conv(width, 4 * width, size, 1, 1, 0)
            channels = 4 * width


def _mobilenet_v2() -> Iterator[ConvProblem]:
    yield _conv(3, 32, 224, 3, 2, 1)
    channels, size = 32, 112
    settings = (
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    )
    for expansion, out, blocks, first_stride in settings:
        for block in range(blocks):
            stride, hidden = first_stride if block == 0 else 1, channels * expansion
            if expansion > 1:
                yield _conv(channels, hidden, size, 1, 1, 0)
            yield _conv(hidden, hidden, size, 3, stride, 1, groups=hidden)
            size //= stride
            yield _conv(hidden, out, size, 1, 1, 0)
            channels = out
    yield _conv(channels, 1280, size, 1, 1, 0)


def _vgg16() -> Iterator[ConvProblem]:
    channels, size = 3, 224
    for out, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            yield _conv(channels, out, size, 3, 1, 1)
            channels = out
        size //= 2


def _convnext_t() -> Iterator[ConvProblem]:
    yield _conv(3, 96, 224, 4, 4, 0)
    size = 56
    for stage, (width, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage:
            yield _conv(width // 2, width, size, 2, 2, 0)
            size //= 2
        for _ in range(blocks):
            yield _conv(width, width, size, 7, 1, 3, groups=width)
            yield _conv(width, 4 * width, size, 1, 1, 0)
            yield _conv(4 * width, width, size, 1, 1, 0)


def _resnext50() -> Iterator[ConvProblem]:
    """The 3x3 of each block: 32 groups of 4, 8, 16 and 32 channels."""
    size = 56
    for stage, (width, blocks) in enumerate(((128, 3), (256, 4), (512, 6), (1024, 3))):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            yield _conv(width, width, size, 3, stride, 1, groups=32)
            size //= stride


def _deeplab() -> Iterator[ConvProblem]:
    """The last two stages at 28 x 28 (dilation 2 and 4; a stage begins with the dilation before) and the pyramid."""
    for width, dilations in ((256, (1, 2, 2, 2, 2, 2)), (512, (2, 4, 4))):
        for dilation in dilations:
            if dilation > 1:
                yield _conv(width, width, 28, 3, 1, dilation, dilation=dilation)
    for rate in (12, 24, 36):
        yield _conv(2048, 256, 28, 3, 1, rate, dilation=rate)


# Width of each branch of an Inception block: 1x1; 1x1 then 3x3; 1x1 then 3x3; 1x1 after the pool (Szegedy et al. 2014).
_INCEPTION = (
    (2, 28, 192, ((64, (96, 128), (16, 32), 32), (128, (128, 192), (32, 96), 64))),
    (
        4,
        14,
        480,
        (
            (192, (96, 208), (16, 48), 64),
            (160, (112, 224), (24, 64), 64),
            (128, (128, 256), (24, 64), 64),
            (112, (144, 288), (32, 64), 64),
            (256, (160, 320), (32, 128), 128),
        ),
    ),
    (8, 7, 832, ((256, (160, 320), (32, 128), 128), (384, (192, 384), (48, 128), 128))),
)


def _i3d() -> Iterator[ConvProblem]:
    def cubic(into: int, out: int, frames: int, size: int, kernel: int) -> ConvProblem:
        return _conv_nd(into, out, (frames, size, size), (kernel,) * 3, (1,) * 3, (kernel // 2,) * 3)

    frames = 16
    yield _conv_nd(3, 64, (frames, 224, 224), (7, 7, 7), (2, 2, 2), (3, 3, 3))
    frames //= 2
    yield cubic(64, 64, frames, 56, 1)
    yield cubic(64, 192, frames, 56, 3)
    for shrink, size, channels, blocks in _INCEPTION:
        depth = frames * 2 // shrink
        for plain, (reduce3, out3), (reduce_other, out_other), pooled in blocks:
            yield cubic(channels, plain, depth, size, 1)
            yield cubic(channels, reduce3, depth, size, 1)
            yield cubic(reduce3, out3, depth, size, 3)
            yield cubic(channels, reduce_other, depth, size, 1)
            yield cubic(reduce_other, out_other, depth, size, 3)
            yield cubic(channels, pooled, depth, size, 1)
            channels = plain + out3 + out_other + pooled


def _unet() -> Iterator[ConvProblem]:
    """Up-convolutions 2x2 of stride 2 that halve the channels: 1024 at 16 x 16 become 512 at 32 x 32, and so on."""
    for level in range(4):
        yield _conv(512 >> level, 1024 >> level, 32 << level, 2, 2, 0)


NETWORKS = {"resnet50": _resnet50, "mobilenet_v2": _mobilenet_v2, "vgg16": _vgg16, "convnext_t": _convnext_t}
"""Whole networks by name: what `--suite all` is."""

KINDS = {"resnext50": _resnext50, "deeplab": _deeplab, "i3d": _i3d, "unet": _unet}
"""Layers of another kind (grouped, dilated, 3-D, transposed), by the name of their network."""

SUITES = NETWORKS | KINDS
"""All suites by name."""
