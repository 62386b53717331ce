# SPDX-License-Identifier: Apache-2.0
"""Fake quantisation: values rounded to a grid of integers, with the straight-through gradient inside its bounds.

A grid has a scale and a zero point: x is rounded to scale * (n - zero_point) of an integer n from `least` to `most`.
PyTorch multiplies by the reciprocal of the scale in float32, so that these do, too.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor

LEAST_SCALE = float(np.float32(6.1e-5))
"""Scales are at least as large, as in float16 a smaller one would be denormal (PyTorch's SMALL_SCALE_THRESHOLD)."""

_OBSERVED = "fused_moving_avg_obs_fake_quant.default"


def per_tensor(x: Tensor, scale: float, zero_point: int, least: int, most: int) -> tuple[Tensor, Tensor]:
    """x on one grid, and whether each element is within its bounds."""
    return _on_grid(x, float(np.float32(scale)), float(np.float32(1) / np.float32(scale)), zero_point, least, most)


def per_tensor_of_tensors(
    x: Tensor, scale: Tensor, zero_point: Tensor, enabled: Tensor, least: int, most: int
) -> tuple[Tensor, Tensor]:
    """x on one grid whose scale and zero point are tensors of one element, where `enabled` is not zero."""
    import torch

    scale, zero_point = scale.reshape([]), zero_point.reshape([])
    values, inside = _on_grid(x, scale, 1.0 / scale, zero_point, least, most)
    on = enabled.reshape([]) != 0
    return torch.where(on, values, x), inside | ~on


def per_channel(
    x: Tensor, scale: Tensor, zero_point: Tensor, axis: int, least: int, most: int
) -> tuple[Tensor, Tensor]:
    """x on a grid for each index of an axis."""
    along = [-1 if each == axis % x.ndim else 1 for each in range(x.ndim)]
    scale, zero_point = scale.reshape(along), zero_point.reshape(along)
    return _on_grid(x, scale, 1.0 / scale, zero_point, least, most)


def observed(
    x: Tensor,
    observer_on: Tensor,
    fake_quant_on: Tensor,
    lowest: Tensor,
    highest: Tensor,
    scale: Tensor,
    zero_point: Tensor,
    rate: float,
    least: int,
    most: int,
    axis: int,
    is_per_channel: bool = False,
    is_symmetric: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """x on the grid of moving averages of its extrema: the module of `torch.ao.quantization.prepare_qat`.

    Args:
        observer_on, fake_quant_on: whether the averages move, and whether values are rounded; tensors of one element.
        lowest, highest: the averages, infinite before the first batch; of each index of axis 0 if `is_per_channel`.
        rate: the share of the new extrema in the averages.
        is_symmetric: whether the bounds are equally far from zero.

    Returns:
        The values, whether each is within the bounds, and the new averages, scale and zero point.
    """
    import torch

    if is_per_channel and axis != 0:
        raise UnsupportedError(
            f"fused_moving_avg_obs_fake_quant takes axis 0 for channels, as PyTorch's, but got {axis}"
        )
    seen = torch.ops.convgrad.stop_gradient(x)
    axes = list(range(1, x.ndim)) if is_per_channel else list(range(x.ndim))
    moves, on = observer_on.reshape([]) != 0, fake_quant_on.reshape([]) != 0

    def average(before: Tensor, now: Tensor) -> Tensor:
        now = now.reshape(before.shape)
        return torch.where(moves, torch.where(torch.isinf(before), now, before + rate * (now - before)), before)

    lowest, highest = average(lowest, seen.amin(axes)), average(highest, seen.amax(axes))
    fitted, middle = _fitted(lowest, highest, least, most, is_symmetric)
    scale = torch.where(on, fitted.reshape(scale.shape), scale)
    zero_point = torch.where(on, middle.reshape(zero_point.shape).to(zero_point.dtype), zero_point)
    if is_per_channel:
        values, inside = per_channel(x, scale, zero_point, 0, least, most)
        return torch.where(on, values, x), inside | ~on, lowest, highest, scale, zero_point
    values, inside = per_tensor_of_tensors(x, scale, zero_point, fake_quant_on, least, most)
    return values, inside, lowest, highest, scale, zero_point


def with_sized_observers(program: torch.export.ExportedProgram) -> None:
    """Give the buffers of observers per channel that have seen no batch their sizes, as PyTorch's first call does."""
    import torch

    targets = {spec.arg.name: spec.target for spec in program.graph_signature.input_specs}
    for node in program.graph.nodes:
        if name_of(node) != _OBSERVED or len(node.args) < 12 or not node.args[11]:
            continue
        channels = node.args[0].meta["val"].shape[0]
        for buffer, value in zip(node.args[3:7], (math.inf, -math.inf, 1.0, 0), strict=True):
            held = buffer.meta["val"]
            if buffer.op == "placeholder" and held.shape != (channels,):
                buffer.meta["val"] = held.new_full((channels,), value)
                program.state_dict[targets[buffer.name]] = torch.full((channels,), value, dtype=held.dtype)


def _on_grid(
    x: Tensor, scale: Tensor | float, reciprocal: Tensor | float, zero_point: Tensor | int, least: int, most: int
) -> tuple[Tensor, Tensor]:
    """x on a grid, and whether each element is within its bounds."""
    import torch

    fixed = torch.ops.convgrad.stop_gradient
    places = fixed(x * reciprocal)
    is_shifted = isinstance(zero_point, torch.Tensor) and zero_point.is_floating_point()
    places = (places + zero_point).round() if is_shifted else places.round() + zero_point
    inside = (places >= least) & (places <= most)
    values = fixed((places.clamp(least, most) - zero_point) * scale)
    return values + torch.where(inside, x - fixed(x), torch.zeros_like(x)), inside


def _fitted(lowest: Tensor, highest: Tensor, least: int, most: int, is_symmetric: bool) -> tuple[Tensor, Tensor]:
    """The scale, in float32, and the zero point of the grid from lowest to highest, widened to contain zero.

    The rules are those of PyTorch's ChooseQuantizationParams (ATen/native/quantized/cpu/QuantUtils.h), which computes
    in float64 as well.
    """
    import torch

    spans = (lowest < 0) & (highest > 0)
    if is_symmetric:
        below, above = -((most - least) // 2 + 1), (most - least) // 2
        widest = torch.maximum((lowest / below).abs(), (highest / above).abs())
        lowest = torch.where(spans, widest * below, lowest)
        highest = torch.where(spans, widest * above, highest)
    low, high = lowest.clamp(max=0.0).to(torch.float64), highest.clamp(min=0.0).to(torch.float64)
    scale = (high - low) / (most - least)
    scale = torch.where(scale < 2.0**-128, torch.full_like(scale, 0.1), scale)  # the reciprocal is infinite in float32
    small = scale < LEAST_SCALE
    grown = LEAST_SCALE / scale.to(torch.float32)
    wide = torch.where(small, LEAST_SCALE, scale)
    low = torch.where(small, (low.to(torch.float32) * grown).to(torch.float64), low)
    high = torch.where(small, (high.to(torch.float32) * grown).to(torch.float64), high)
    from_low, from_high = least - low / wide, most - high / wide
    nearer = abs(least) - (low / wide).abs() < abs(most) - (high / wide).abs()
    middle = torch.where(nearer, from_low, from_high)
    if is_symmetric:
        middle = torch.where((low < 0) & (high > 0), (least + most) / 2, middle)
    return wide.to(torch.float32), middle.clamp(least, most).round()


__all__ = ["observed", "per_channel", "per_tensor", "per_tensor_of_tensors", "with_sized_observers"]
