# SPDX-License-Identifier: Apache-2.0
"""From the step's IRModule to a library: targets, lowering, GPUs."""
