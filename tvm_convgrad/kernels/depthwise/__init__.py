# SPDX-License-Identifier: Apache-2.0
"""Depthwise convolutions, and small groups of several channels. Reading order:

- base.py: operands and extents that all of them have, and the frame of their PrimFuncs.
- taps.py: which taps are in bounds where.
- column_terms.py: column taps one by one, or two at once by dot products of bfloat16.
- columns.py, columns_wgrad.py: vectors of contiguous columns (NCHW), read and written in place.
- row_vectors.py: vectors of columns from rows of any width, strides of two, prefetch.
- channels.py, channels_wgrad.py: vectors of channels, in place (NHWC) or through panels.
- channel_panels.py: the packing of these panels, and of W.
- channel_words.py: dot products of bfloat16 where vectors run over channels.
- columns_plan.py, channels_plan.py: which problems each takes, its tiling, and an estimate of its time.
"""
