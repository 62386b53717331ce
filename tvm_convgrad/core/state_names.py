# SPDX-License-Identifier: Apache-2.0
"""Names of tensors in the state of a step that builders give them and readers look for."""

LOSS_SCALE, GOOD_UPDATES, LEFT_OUT_UPDATES = "loss_scale.scale", "loss_scale.good", "loss_scale.skipped"
"""Of a loss scale that adapts: the scale, updates since it changed or one was skipped, skipped updates."""

__all__ = ["GOOD_UPDATES", "LEFT_OUT_UPDATES", "LOSS_SCALE"]
