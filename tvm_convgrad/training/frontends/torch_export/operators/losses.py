# SPDX-License-Identifier: Apache-2.0
"""Losses whose decomposition by PyTorch has another value or gradient than PyTorch itself."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    from torch import Tensor

_NONE, _MEAN = 0, 1
"""Reductions; 2 is the sum."""

_LEAST_LOG, _LEAST_VARIANCE = -100.0, 1e-12
"""PyTorch's bounds of the logarithms and of the denominator p (1 - p) of the gradient."""


def binary_cross_entropy(p: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN) -> Tensor:
    """The loss of probabilities p, with PyTorch's gradient (p - target) / max(p (1 - p), 1e-12).

    The gradient of the logarithms would be NaN at p = 0 and 1, which a sigmoid reaches in float32 near 17.
    """
    import torch

    fixed = torch.ops.convgrad.stop_gradient
    log_p, log_q = (fixed(log.clamp_min(_LEAST_LOG)) for log in (torch.log(p), torch.log1p(-p)))
    slope = fixed((p - target) / (p * (1.0 - p)).clamp_min(_LEAST_VARIANCE))
    loss = (p - fixed(p)) * slope - target * log_p - (1.0 - target) * log_q
    loss = loss if weight is None else loss * weight
    return loss if reduction == _NONE else loss.mean() if reduction == _MEAN else loss.sum()


def multilabel_margin(x: Tensor, target: Tensor, reduction: int = _MEAN) -> tuple[Tensor, Tensor]:
    """The loss of several labels a sample, listed up to the first -1, and whether each class is one.

    PyTorch's decomposition compares labels that are clamped to 0, so that each -1 stands for class 0.
    """
    import torch

    rows, labels = (each.reshape(1, -1) if each.ndim < 2 else each for each in (x, target))
    classes = rows.shape[1]
    listed = (labels < 0).cumsum(1) == 0
    named = (labels.unsqueeze(2) == torch.arange(classes)) & listed.unsqueeze(2)  # (sample, place in the list, class)
    is_label = named.sum(1) > 0
    margins = 1.0 - rows.gather(1, labels.clamp_min(0)).unsqueeze(2) + rows.unsqueeze(1)
    counted = listed.unsqueeze(2) & ~is_label.unsqueeze(1)
    loss = torch.where(counted, margins, torch.zeros_like(margins)).relu().sum((1, 2)) / classes
    reduced = loss.reshape(x.shape[:-1]) if reduction == _NONE else loss.mean() if reduction == _MEAN else loss.sum()
    return reduced, is_label.to(x.dtype).reshape(x.shape)


__all__ = ["binary_cross_entropy", "multilabel_margin"]
