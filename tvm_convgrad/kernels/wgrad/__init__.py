# SPDX-License-Identifier: Apache-2.0
"""wgrad as an implicit GEMM. Reading order:

- spec.py: wgrad as a product of M = output channels, N = input channels, K = pixels for each tap; its tiling.
- panel_shapes.py: the shapes of the panels of vectors and of im2col rows.
- plan.py: the valid tilings, and the best of them; cycles.py: the estimate of their time.
- kernel.py: the loops: work items, slabs of pixels, register tiles.
- panels.py: the base of the kernel: tables and addresses, the packing of vectors.
- scalars.py: the scalar operand: dY in place, packed, or im2col rows of X.
- store.py: the blocks of dW, and how their sums are stored.
- bias.py: the bias gradient in the same pass.
- dot.py: the same over pairs of pixels of bfloat16.
- amx.py: by products of tiles; tile_shape.py, tile_panels.py, tile_nest.py: its sizes, its panels, its loop nest.
"""
