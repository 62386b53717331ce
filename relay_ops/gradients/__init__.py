# SPDX-License-Identifier: Apache-2.0
"""Gradients of Relay: of every convolution, and of operators that stock Relay has none of or a wrong one. One table.

convolutions   nn.conv{1,2,3}d, their transposes, and the six operators of this package
norms          nn.batch_norm, nn.dropout
pools          gradients of pools (so that they can be differentiated again), nn.adaptive_avg_pool{1,2,3}d
shapes         split, nn.pad, tile, reverse, nn.dilate, layout_transform, broadcasts
logic          comparisons and logical operators, whose gradients are zeros
stock          stock's own, where they raise or are wrong
"""

from __future__ import annotations

from relay_ops.gradients import convolutions, logic, norms, pools, shapes, stock
from relay_ops.gradients.contract import Rules

GRADIENTS: Rules = {
    **convolutions.RULES,
    **norms.RULES,
    **pools.RULES,
    **shapes.RULES,
    **logic.RULES,
    **stock.RULES,
}
"""Gradient rules by operator."""
