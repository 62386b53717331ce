# SPDX-License-Identifier: Apache-2.0
"""The values that the options of a training step take, by name. Loads no TVM, so that commands check them at once."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, get_args

LossName = Literal["cross_entropy", "nll", "bce", "mse", "l1", "huber", "model"]
LOSSES: tuple[LossName, ...] = get_args(LossName)
"""Loss functions; `losses` has what each computes. "model": the model returns its loss itself."""
LOSS_SETTINGS: Mapping[LossName, tuple[str, ...]] = MappingProxyType(
    {
        "cross_entropy": ("label_smoothing", "class_weights", "ignore_index"),
        "nll": ("class_weights", "ignore_index"),
        "bce": ("class_weights", "positive_weight"),
        "mse": (),
        "l1": (),
        "huber": ("delta",),
        "model": (),
    }
)
"""The settings that each loss has."""

OptimizerName = Literal["sgd", "adam", "adamw", "lamb"]
OPTIMIZER_DEFAULTS: Mapping[OptimizerName, Mapping[str, Any]] = MappingProxyType(
    {
        "sgd": {"lr": 0.1, "momentum": 0.0, "weight_decay": 0.0, "nesterov": False},
        "adam": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
        "adamw": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
        "lamb": {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 1e-2},
    }
)
"""The settings that each optimizer has, and their defaults, of torch.optim (lr of SGD: 0.1) and LAMB's paper."""
OPTIMIZERS: tuple[OptimizerName, ...] = get_args(OptimizerName)
"""Update rules; `optimizers` has what each computes."""

DECAYED = ("all", "matrices")
"""Which parameters decay: all, or those of two axes and more, which biases, scales and shifts of norms are not."""

DTYPES = ("float32", "float16", "bfloat16")
"""Types of the operands of convolutions and matrix products (see `precision`)."""
ACTIVATIONS = "activations"
RESULTS = ("float32", "operands", ACTIVATIONS)
"""Types that their results are stored in: "operands" is the type of the operands, as in PyTorch's autocast.

With "activations" all that is made of them is kept in the operands' type, too (see `storage`).
"""


def usual_results(dtype: str, *, on_gpu: bool) -> str:
    """The type of RESULTS that commands take: of 16-bit types as cuDNN stores them on GPUs, and activations on CPUs."""
    if dtype == "float32":
        return "float32"
    return "operands" if on_gpu else ACTIVATIONS


DYNAMIC = "dynamic"
"""The loss scale that adapts (see `scaling`)."""

LAYOUTS = ("NCHW", "NHWC", "NHWC:OHWI")
"""Layouts of the data of 2-D convolutions, the last one with that of their kernels (see `layout`)."""

BATCH_NORMS = ("train", "train-all", "frozen")
"""Which batch norms take the statistics of the batch (see `batch_norm`)."""

DROPOUTS = ("train", "off")
"""Whether dropout drops anything (see `dropout`)."""

RECOMPUTED = ("auto", "none", "cheap", "all")
"""Which values of the forward pass a step may compute again in its backward pass (see `passes.rematerialise`)."""
