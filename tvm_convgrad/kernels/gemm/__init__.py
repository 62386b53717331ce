# SPDX-License-Identifier: Apache-2.0
"""Forward and dgrad as a blocked implicit GEMM.

    result[o, pixel] = sum over (tap, c) of W[o, (tap, c)] * source[pixel + tap, c]

The source is X in forward and dY in dgrad. Read the generator in this order:

    ../spec.py     ConvSpec: either direction as strides, taps and phases; the words and names used here
    tiling.py      GemmTiling: the parameters of a kernel; Blocking: its sizes and strides
    kernel.py      the loop nest: work items, spatial blocks, tiles, and the sum of a tile
    taps.py        the loop over the taps that are in bounds
    source.py      packing the panel of a spatial block
    weight.py      packing W
    prefetch.py    prefetching the source of the next block and of the next tile
    result.py      storing tiles, with the epilogue

What is decided before anything is generated:

    plan.py        the tilings that are considered, and their estimated times
    regions.py     splitting the result where the taps in bounds change, for large dilations
"""
