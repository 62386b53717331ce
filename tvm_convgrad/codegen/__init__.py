# SPDX-License-Identifier: Apache-2.0
"""A small TIR builder, shared by the convolution kernels, the schedules of training steps and the peak measurements.

    loops.py          Loops: collects the statements of one PrimFunc (loops, conditions, buffers, stores, prefetches);
                      and functions that make its expressions (vector and masked loads, type conversion, min and max)
    register_tile.py  Tile: an m x n tile of accumulators in vector registers
    packing.py        transposing a square of vectors in registers
    dot_product.py    dot products of pairs of bfloat16: the instruction, and words that hold a pair
    tile_product.py   products of tiles of bfloat16: the instructions of AMX, and the permission to use them
    extrema.py        maxima and minima that propagate NaN
    stack_slots.py    where `Loops.let` keeps named values, so that TVM compiles long kernels fast
    hardware.py       Machine: vector width, registers and caches of a CPU
    tir.py            TIR of the TVM in use: tir_flat.py from 0.26 on, tir_nested.py where TVM has Relay

Python code runs once and writes the kernel: a Python `for` unrolls, `with loops.loop(...)` makes a loop of the kernel.
A PrimFunc that adds 1 to n floats, 16 at a time, on all cores:

    loops = Loops()
    x, y = (make_parameter(name, (n,), "float32") for name in ("x", "y"))
    with loops.loop(n // 16, "chunk", "parallel") as chunk:
        at = loops.let(chunk * 16, "at")
        loops.store(y, at, load(x, at, 16) + splat(tir.const(1.0, "float32"), 16))
    with loops.loop(n % 16, "rest") as rest:
        at = n - n % 16 + rest
        loops.store(y, at, load(x, at) + tir.const(1.0, "float32"))
    function = loops.finish([x, y], "add_one")
"""

import tvm  # noqa: F401  # it registers this plugin, which imports these files; none may be half imported by then
