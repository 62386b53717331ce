# SPDX-License-Identifier: Apache-2.0
"""Attention and its softmax as PyTorch's CPU kernel computes them, with one matrix of scores kept for the gradient.

PyTorch's own decomposition takes the softmax that gives zeros in rows without a finite score for any attention. Only a
mask makes such rows. Its zeros, conditions and selections are as large as the scores, and the scores are the largest
tensors of a vision transformer.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query · keyᵀ · scale + mask) · value, with dropout of the softmax; arguments as in PyTorch."""
    import torch

    dtype = query.dtype
    if dtype in (torch.float16, torch.bfloat16):  # as in PyTorch, whose scores and sums are float32
        query, key, value = query.float(), key.float(), value.float()
    if enable_gqa:
        key, value = (each.repeat_interleave(query.shape[-3] // each.shape[-3], -3) for each in (key, value))
    factor = 1.0 / math.sqrt(max(query.shape[-1], 1)) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        rows, columns = (torch.arange(extent, device=query.device) for extent in scores.shape[-2:])
        scores = scores.masked_fill(rows[:, None] < columns, -math.inf)
    if attn_mask is None:
        weights = torch.softmax(scores, -1)
    else:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, -math.inf) if is_bool else scores + attn_mask
        weights = safe_softmax(scores, -1)
    return ((torch.dropout(weights, dropout_p, True) if dropout_p else weights) @ value).to(dtype)


def safe_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """A softmax that is 0 where all elements are -inf, as attention has it for rows that are masked altogether."""
    import torch

    x = x if dtype is None else x.to(dtype)
    masked = x.amax(dim, True) == -math.inf
    return torch.softmax(x.masked_fill(masked, 0.0), dim).masked_fill(masked, 0.0)


__all__ = ["attention", "safe_softmax"]
