# SPDX-License-Identifier: Apache-2.0
"""CPU loops for what is not a convolution: elementwise stages and reductions that are bound by memory."""
