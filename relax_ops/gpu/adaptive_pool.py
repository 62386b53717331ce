# SPDX-License-Identifier: Apache-2.0
"""Adaptive average pools on GPUs: the extents of TVM's windows depend on the place, which no schedule of its takes."""

from __future__ import annotations

from typing import Any

from tvm import relax, te, tirx, topi

from relax_ops.gpu.scheduled import one_thread_each
from relax_ops.ir import constant_extents
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.geometry import SPATIAL


def covers(call: relax.Call) -> bool:
    """Whether a call is of floats in a plain layout, with extents that are numbers."""
    x, attrs = call.args[0], call.attrs
    rank = len(constant_extents(x) or ()) - 2
    plain = str(attrs.out_layout) in ("", str(attrs.layout)) and rank in SPATIAL
    return plain and sorted(str(attrs.layout)) == sorted("NC" + SPATIAL[rank]) and constant_extents(call) is not None


def legalize_adaptive_pool(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """FLegalize: a thread averages a window, from ⌊o·n/m⌋ to ⌈(o+1)·n/m⌉ − 1 along each axis, in float32 at least."""
    source, result = constant_extents(call.args[0]), constant_extents(call)
    assert source is not None
    assert result is not None
    axes = [str(call.attrs.layout).index(letter) for letter in SPATIAL[len(source) - 2]]
    dtype = str(call.ty.dtype)
    sum_dtype = wide_dtype(dtype)

    def mean(data: te.Tensor) -> te.Tensor:
        spans = [_longest(source[axis], result[axis]) for axis in axes]
        offsets = [te.reduce_axis((0, span), name=f"w{i}") for i, span in enumerate(spans)]

        def element(*place: tirx.Expr) -> tirx.Expr:
            at, inside, count = list(place), [], tirx.const(1, "int64")
            for axis, offset in zip(axes, offsets, strict=True):
                begin, end = _window(place[axis], source[axis], result[axis])
                at[axis] = begin + offset
                inside.append(at[axis] < end)
                count = count * (end - begin)
            share = data(*at).astype(sum_dtype) / count.astype(sum_dtype)
            return te.sum(tirx.if_then_else(tirx.all(*inside), share, tirx.const(0, sum_dtype)), axis=offsets)

        return te.compute(result, element, name="adaptive_avg_pool")

    found = block_builder.call_te(mean, call.args[0], primfunc_name_hint="adaptive_avg_pool")
    found = one_thread_each(block_builder, found)
    return found if sum_dtype == dtype else block_builder.call_te(topi.cast, block_builder.emit(found), dtype)


def _window(place: Any, source: int, result: int) -> tuple[Any, Any]:
    """Where the window of a place of the result begins in the data, and where it has ended."""
    place = place.astype("int64") if isinstance(place, tirx.Expr) else place
    return place * source // result, ((place + 1) * source + result - 1) // result


def _longest(source: int, result: int) -> int:
    """The extent of the longest window along an axis."""
    return max(end - begin for begin, end in (_window(place, source, result) for place in range(result)))


__all__ = ["covers", "legalize_adaptive_pool"]
