# SPDX-License-Identifier: Apache-2.0
"""The architectures of the zoo: found in torchvision, timm and segmentation-models-pytorch, and a few written here.

Libraries are asked for the least model of each family, so that nobody here chooses. An entry is named
`library:model`; `make` builds it with random weights.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from benchmarks.zoo import own_models

# torchvision's wheel for CUDA cannot load its compiled operators beside a PyTorch for CPUs, and then its import fails
# for want of these declarations. No model of the zoo calls them.
for _operator in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, _operator):
        torch.library.define(f"torchvision::{_operator}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

SIZE = 128
"""Extent of input images, where an architecture takes it."""


@dataclass(frozen=True)
class Architecture:
    """One model of the zoo.

    Attributes:
        name: "library:model".
        shapes: shapes of its float32 inputs for one sample, without the batch.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...] = ((3, SIZE, SIZE),)

    def make(self) -> nn.Module:
        """Build it with random weights, in training mode."""
        library, _, name = self.name.partition(":")
        return _BUILDERS[library](name)


def architectures(cache: Path | None = None) -> list[Architecture]:
    """All architectures of the libraries that are installed, in the order of their names.

    Args:
        cache: a folder to remember timm's least models in: looking at all of its models takes minutes.
    """
    found = [*_torchvision(), *_timm(cache), *_segmentation_models(), *_own()]
    return sorted(found, key=lambda each: each.name)


def named(name: str) -> Architecture:
    """One architecture by its name, with small images where it is of another library."""
    library, _, model = name.partition(":")
    return Architecture(name, own_models.MODELS[model][1]) if library == "own" else Architecture(name)


def _torchvision() -> Iterator[Architecture]:
    import torchvision.models as library

    for kind, module in (("", library), ("segmentation", library.segmentation), ("video", library.video)):
        least: dict[str, tuple[float, str]] = {}
        for name in library.list_models(module=module):
            family = inspect.getmodule(library.get_model_builder(name)).__name__
            size = library.get_model_weights(name).DEFAULT.meta["num_params"]
            least[family] = min(least.get(family, (float("inf"), "")), (size, name))
        for _, name in least.values():
            shapes = ((3, 8, 112, 112),) if kind == "video" else ((3, SIZE, SIZE),)
            if name == "inception_v3":
                shapes = ((3, 299, 299),)
            if name in ("vit_b_16", "maxvit_t", "mvit_v1_b", "mvit_v2_s"):
                shapes = (tuple(224 if extent in (112, SIZE) else extent for extent in shapes[0]),)
            if name.startswith("mvit") or name == "s3d":
                shapes = ((3, 16, 224, 224),)
            yield Architecture(f"torchvision:{name}", shapes)
    yield Architecture("torchvision:resnet18_fpn")


def _from_torchvision(name: str) -> nn.Module:
    import torchvision.models as library

    if name == "resnet18_fpn":
        return _fpn()
    builder = library.get_model_builder(name)
    options = {"weights": None}
    if "weights_backbone" in inspect.signature(builder).parameters:
        options["weights_backbone"] = None
    if name in ("googlenet", "inception_v3"):  # torch.export.save refuses the named tuple of the auxiliary outputs
        options["aux_logits"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return builder(**options)


def _fpn() -> nn.Module:
    from torchvision.models.detection.backbone_utils import resnet_fpn_backbone

    return resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=5, norm_layer=nn.BatchNorm2d)


def _timm(cache: Path | None) -> Iterator[Architecture]:
    for name, size in _least_of_timm(cache):
        yield Architecture(f"timm:{name}", ((3, size, size),))


def _from_timm(name: str) -> nn.Module:
    import timm

    return timm.create_model(name, pretrained=False)


def _least_of_timm(cache: Path | None) -> list[tuple[str, int]]:
    """The least model of each of timm's modules that convolves more than once, and the extent of its images."""
    import timm
    from timm.models import model_entrypoint

    kept = cache / f"timm-{timm.__version__}.json" if cache else None
    if kept and kept.exists():
        return [(name, size) for name, size in json.loads(kept.read_text())]
    least: dict[str, tuple[int, str, int]] = {}
    for name in timm.list_models():
        family = model_entrypoint(name).__module__
        try:
            with torch.device("meta"):
                model = timm.create_model(name, pretrained=False)
        except (RuntimeError, NotImplementedError, TypeError):
            continue  # models that compute with values while they are built
        convolutions = sum(isinstance(part, nn.Conv1d | nn.Conv2d | nn.Conv3d) for part in model.modules())
        if convolutions < 3:
            continue
        config = model.pretrained_cfg
        native = config.get("min_input_size") or config["input_size"]
        size = native[-1] if config.get("fixed_input_size") or config.get("min_input_size") else min(SIZE, native[-1])
        count = sum(value.numel() for value in model.parameters())
        least[family] = min(least.get(family, (1 << 62, "", 0)), (count, name, size))
    found = sorted((name, size) for _, name, size in least.values())
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    return found


def _segmentation_models() -> Iterator[Architecture]:
    import segmentation_models_pytorch as library

    for name in (
        "Unet",
        "UnetPlusPlus",
        "MAnet",
        "Linknet",
        "FPN",
        "PSPNet",
        "DeepLabV3",
        "DeepLabV3Plus",
        "PAN",
        "UPerNet",
    ):
        if hasattr(library, name):
            yield Architecture(f"smp:{name}")


def _from_segmentation_models(name: str) -> nn.Module:
    import segmentation_models_pytorch as library

    return getattr(library, name)(encoder_name="resnet18", encoder_weights=None, in_channels=3, classes=4)


def _own() -> Iterator[Architecture]:
    for name, (_, shapes) in own_models.MODELS.items():
        yield Architecture(f"own:{name}", shapes)


def _from_own(name: str) -> nn.Module:
    return own_models.MODELS[name][0]()


_BUILDERS: dict[str, Callable[[str], nn.Module]] = {
    "own": _from_own,
    "smp": _from_segmentation_models,
    "timm": _from_timm,
    "torchvision": _from_torchvision,
}
