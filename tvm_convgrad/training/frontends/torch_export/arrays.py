# SPDX-License-Identifier: Apache-2.0
"""PyTorch's tensors as arrays of numpy, bfloat16 included."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.training.model.model import Array

if TYPE_CHECKING:  # an optional package
    import torch


def array_of(tensor: torch.Tensor) -> Array:
    """A tensor's values, of which PyTorch itself gives numpy none in bfloat16."""
    import torch

    held = tensor.detach().cpu().contiguous()
    if held.dtype is torch.bfloat16:
        return held.view(torch.int16).numpy().view(numpy_dtype("bfloat16"))
    return held.numpy()
