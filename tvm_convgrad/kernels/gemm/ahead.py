# SPDX-License-Identifier: Apache-2.0
"""W packed ahead of all calls, where its values are known: the panels that `WeightPanel` would write, in numpy.

Panels of a loop nest lie one after the other, [group][block of result channels], and nests in their order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.core.exact import Array
from tvm_convgrad.kernels.gemm.tiling import Blocking, GemmTiling, blocking_of
from tvm_convgrad.kernels.spec import ConvSpec


def packs_ahead(spec: ConvSpec) -> bool:
    """Whether W's elements are packed as they are: neither converted nor made to words."""
    return spec.pairs is None and spec.weight.dtype == spec.dtype and spec.weight.size > 0


def panel_bounds(spec: ConvSpec, tilings: Sequence[GemmTiling], machine: Machine) -> list[int]:
    """Where the panels of each loop nest begin, in elements, and where the last ones end."""
    bounds = [0]
    for phases, tiling in zip(spec.phases, tilings, strict=True):
        blocking = blocking_of(spec, phases, tiling, machine)
        panel = blocking.tap_count * spec.source_channels * blocking.channel_block
        bounds.append(bounds[-1] + spec.groups * blocking.channel_blocks * panel)
    return bounds


def packed(weight: Array, spec: ConvSpec, tilings: Sequence[GemmTiling], machine: Machine) -> Array:
    """The panels of W.

    Args:
        weight: in the problem's layout.

    Returns:
        A vector of `panel_bounds(...)[-1]` elements.
    """
    flat = np.ascontiguousarray(weight).ravel()
    nests = zip(spec.phases, tilings, strict=True)
    parts = [_of_nest(flat, spec, blocking_of(spec, p, t, machine), t.over_pixels) for p, t in nests]
    return np.concatenate(parts)


def _of_nest(flat: Array, spec: ConvSpec, blocking: Blocking, over_pixels: bool) -> Array:
    """The panels of a loop nest; channels beyond the last result channel are zeros."""
    size, blocks, last = blocking.channel_block, blocking.channel_blocks, spec.result_channels
    firsts = np.arange(blocks) * size
    if over_pixels:  # the last block overlaps the one before
        firsts = np.minimum(firsts, last - size)
    result_channel = firsts[:, None] + np.arange(size)
    source = np.arange(spec.source_channels) * spec.weight_source_stride
    rows = []
    for taps in blocking.taps:
        offsets = np.array([np.dot(kernel, spec.weight.spatial) for kernel, _ in taps], np.int64)
        both = source[:, None] + offsets if over_pixels else offsets[:, None] + source
        rows.append(both.ravel())
    row = np.concatenate(rows) if rows else np.zeros(0, np.int64)
    inside = np.minimum(result_channel, last - 1) * spec.weight_result_stride
    groups = np.arange(spec.groups) * spec.weight_group_stride
    panels = flat[groups[:, None, None, None] + row[:, None] + inside[:, None, :]]
    return np.where((result_channel < last)[:, None, :], panels, flat.dtype.type(0)).ravel()


__all__ = ["packed", "packs_ahead", "panel_bounds"]
