# SPDX-License-Identifier: Apache-2.0
"""Winograd's transform F(2x2, 3x3) for all directions. Reading order:

- shape.py: tiles of 2x2 results, slabs of them, and their tiling.
- tiles.py: the transforms, and the transformed tiles of a slab.
- kernel.py: forward and dgrad.
- wgrad.py: wgrad.
- plan.py: which problems it takes, the valid tilings, and estimates of their time.
"""
