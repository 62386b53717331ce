# SPDX-License-Identifier: Apache-2.0
"""`convgrad bench`: layers, training steps and per-sample gradients, timed in turns with PyTorch and others."""
