# SPDX-License-Identifier: Apache-2.0
"""The convolutions of known networks at 224 x 224, each distinct one with how often it occurs.

Sources: He et al. 2015 (ResNet-50, stride in the 3x3 as torchvision has it), Sandler et al. 2018 (MobileNetV2),
Simonyan and Zisserman 2014 (VGG-16), Liu et al. 2022 (ConvNeXt-T, its linear layers as 1x1 convolutions).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tvm_convgrad.problem import ConvProblem

Layer = tuple[int, int, int, int, int, int, int]
"""in channels, out channels, height = width of X, kernel, stride, padding, groups."""


def suite(name: str, batch: int, layout: str) -> dict[ConvProblem, int]:
    """The problems of a network and their counts.

    Args:
        name: a key of SUITES.
        batch: N.
        layout: "NCHW" (with OIHW) or "NHWC" (with OHWI, as PyTorch's channels_last has it).
    """
    counts = Counter(SUITES[name]())
    return {_problem(layer, batch, layout): count for layer, count in counts.items()}


def _problem(layer: Layer, batch: int, layout: str) -> ConvProblem:
    into, out, size, kernel, stride, padding, groups = layer
    return ConvProblem(
        batch=batch,
        in_channels=into,
        out_channels=out,
        data_extents=(size, size),
        kernel=(kernel, kernel),
        strides=(stride, stride),
        padding=((padding, padding), (padding, padding)),
        groups=groups,
        data_layout=layout,
        kernel_layout="OIHW" if layout == "NCHW" else "OHWI",
        grad_layout=layout,
    )


def _resnet50() -> Iterator[Layer]:
    yield 3, 64, 224, 7, 2, 3, 1
    channels, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        for block in range(blocks):
            stride = 2 if stage and block == 0 else 1
            yield channels, width, size, 1, 1, 0, 1
            yield width, width, size, 3, stride, 1, 1
            if block == 0:
                yield channels, 4 * width, size, 1, stride, 0, 1
            size //= stride
            yield width, 4 * width, size, 1, 1, 0, 1
            channels = 4 * width


def _mobilenet_v2() -> Iterator[Layer]:
    yield 3, 32, 224, 3, 2, 1, 1
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
                yield channels, hidden, size, 1, 1, 0, 1
            yield hidden, hidden, size, 3, stride, 1, hidden
            size //= stride
            yield hidden, out, size, 1, 1, 0, 1
            channels = out
    yield channels, 1280, size, 1, 1, 0, 1


def _vgg16() -> Iterator[Layer]:
    channels, size = 3, 224
    for out, layers in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(layers):
            yield channels, out, size, 3, 1, 1, 1
            channels = out
        size //= 2


def _convnext_t() -> Iterator[Layer]:
    yield 3, 96, 224, 4, 4, 0, 1
    size = 56
    for stage, (width, blocks) in enumerate(((96, 3), (192, 3), (384, 9), (768, 3))):
        if stage:
            yield width // 2, width, size, 2, 2, 0, 1
            size //= 2
        for _ in range(blocks):
            yield width, width, size, 7, 1, 3, width
            yield width, 4 * width, size, 1, 1, 0, 1
            yield 4 * width, width, size, 1, 1, 0, 1


SUITES = {"resnet50": _resnet50, "mobilenet_v2": _mobilenet_v2, "vgg16": _vgg16, "convnext_t": _convnext_t}
"""Networks by name."""
