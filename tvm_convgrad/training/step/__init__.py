# SPDX-License-Identifier: Apache-2.0
"""The training step as an IRModule: loss, gradients, optimizer, new state."""
