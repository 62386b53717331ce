# SPDX-License-Identifier: Apache-2.0
"""The gradient of `take` on GPUs: TVM's is a loop for CPUs, which its pipeline would call with memory of the GPU."""

from __future__ import annotations

import math
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.script.ir_builder import IRBuilder
from tvm.script.ir_builder import tirx as T

from relax_ops.gpu.scheduled import THREADS, scheduled


def legalize_take_backward(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """FLegalize of grad.take_backward: zeros, then a thread for each element that a row has adds its rows in order.

    No two threads write to one place, so that the result is the same each time.
    """
    axis = int(call.attrs.axis)

    def compute(grad: te.Tensor, data: te.Tensor, places: te.Tensor) -> te.Tensor:
        result = tirx.decl_buffer(data.shape, data.dtype, "result", layout=None)
        return te.extern(
            [data.shape],
            [grad, data, places],
            lambda given, made: _loops(axis, given[0], given[1], given[2], made[0]),
            dtype=data.dtype,
            out_buffers=[result],
            name="take_backward",
        )

    found = block_builder.call_te(compute, *call.args, primfunc_name_hint="take_backward")
    return scheduled(block_builder, found)


def _loops(axis: int, grad: tirx.Buffer, data: tirx.Buffer, places: tirx.Buffer, result: tirx.Buffer) -> tirx.Stmt:
    """The two kernels; tensors are addressed by one number."""
    before, rows, after = _product(data.shape[:axis]), data.shape[axis], _product(data.shape[axis + 1 :])
    count = places.shape[0]
    read, place, written = T.buffer_proxy(grad), T.buffer_proxy(places), T.buffer_proxy(result)
    with IRBuilder() as builder:
        with T.seq_scope():
            with _Threads(before * rows * after) as number:
                written[number] = tirx.const(0, data.dtype)
            with _Threads(before * after) as number:
                outer, inner = number // after, number % after
                with T.serial(0, count) as row:
                    there = (outer * rows + tirx.Cast("int64", place[row])) * after + inner
                    written[there] = written[there] + read[(outer * count + row) * after + inner]
        return builder.get()


class _Threads:
    """A context of one thread for each number below a bound; it gives the number."""

    def __init__(self, bound: Any) -> None:
        self._bound = tvm.tirx.Cast("int64", bound) if isinstance(bound, tirx.Expr) else tirx.IntImm("int64", bound)
        self._frames: list[Any] = []

    def __enter__(self) -> Any:
        block, thread = te.thread_axis("blockIdx.x"), te.thread_axis("threadIdx.x")
        blocks = tirx.Cast("int32", (self._bound + THREADS - 1) // THREADS)
        number = tirx.Cast("int64", block) * THREADS + tirx.Cast("int64", thread)
        frames = [T.attr(block, "thread_extent", blocks), T.attr(thread, "thread_extent", THREADS)]
        self._frames = [T.frame_scope(frames), T.If(number < self._bound), T.Then()]
        for frame in self._frames:
            frame.__enter__()
        return number

    def __exit__(self, *error: object) -> None:
        for frame in reversed(self._frames):
            frame.__exit__(*error)


def _product(extents: Any) -> Any:
    return math.prod(extents, start=tirx.IntImm("int64", 1))


__all__ = ["legalize_take_backward"]
