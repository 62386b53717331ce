# SPDX-License-Identifier: Apache-2.0
"""Two operators for what stock pooling gradients lack: max_pool_backward and avg_pool_backward, of any rank.

Stock TVM has gradients of 2-D pools without dilation only, and counts windows wrongly in avg_pool2d with ceil_mode and
count_include_pad. These serve 1-D to 3-D, dilation, ceil_mode, both ways of counting, any layout, symbolic extents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import tvm
from tvm import relax, te, tirx, topi
from tvm_ffi.dataclasses import py_class

from relax_ops.declaration import declare_operator
from relax_ops.gpu.scheduled import lowers_for_gpu, one_thread_each
from tvm_convgrad.codegen.extrema import is_nan, maximum
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.errors import DTypeError, ProblemError
from tvm_convgrad.core.geometry import SPATIAL

MAX = "relax.nn.max_pool_backward"
AVG = "relax.nn.avg_pool_backward"
Pair: TypeAlias = "tuple[tirx.Expr, tirx.Expr]"
"""The number of a place in its window, and the value there."""


@py_class("relax.attrs.PoolBackwardAttrs", frozen=True, structural_eq="tree")
class PoolBackwardAttrs(tvm.ir.Attrs):
    """Attributes of the forward pool; padding is flat, all low sides before all high sides."""

    pool_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    count_include_pad: bool
    layout: str


def max_pool_backward(
    grad: relax.Expr,
    data: relax.Expr,
    *,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: str,
    count_include_pad: bool = False,
) -> relax.Expr:
    """dX of a max pool: dY goes to the first maximum of each window in scan order, or to its last NaN, as in PyTorch.

    Args:
        grad: dY, in `layout`.
        data: X, in `layout`, of the same dtype.
        pool_size, strides, dilation: one entry for each spatial axis.
        padding: all low sides, then all high sides; padded places never win.
        layout: a permutation of N, C and the spatial letters (W, HW or DHW).
        count_include_pad: without meaning here.
    """
    return _call(MAX, grad, data, pool_size, strides, padding, dilation, layout, count_include_pad)


def avg_pool_backward(
    grad: relax.Expr,
    data: relax.Expr,
    *,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: str,
    count_include_pad: bool = False,
) -> relax.Expr:
    """dX of an average pool: dY over the window's count, summed over the windows that a place is in.

    Args as those of max_pool_backward; `count_include_pad` counts padded places (but not those that ceil_mode adds
    beyond the padding). Of `data` only the shape is read.
    """
    return _call(AVG, grad, data, pool_size, strides, padding, dilation, layout, count_include_pad)


def _call(
    name: str,
    grad: relax.Expr,
    data: relax.Expr,
    pool_size: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    layout: str,
    count_include_pad: bool,
) -> relax.Expr:
    attrs = PoolBackwardAttrs(
        pool_size=tuple(int(v) for v in pool_size),
        strides=tuple(int(v) for v in strides),
        padding=tuple(int(v) for v in padding),
        dilation=tuple(int(v) for v in dilation),
        count_include_pad=bool(count_include_pad),
        layout=str(layout),
    )
    return relax.Call(tvm.ir.Op.get(name), [grad, data], attrs)


def infer_type(call: relax.Call, _block_builder: relax.BlockBuilder) -> relax.TensorType:
    """FInferType: the type of `data`, after checks of ranks, dtypes and attributes."""
    name, attrs = str(call.op.name).removeprefix("relax.nn."), call.attrs
    grad, data = (argument.ty for argument in call.args)
    for tensor, what in ((grad, "grad"), (data, "data")):
        if not isinstance(tensor, relax.TensorType):
            raise DTypeError(f"{name}: {what} must be a tensor, but is {tensor}")
    rank = len(attrs.pool_size)
    letters = SPATIAL.get(rank)
    if letters is None or sorted(str(attrs.layout)) != sorted("NC" + letters):
        raise ProblemError(
            f"{name}: layout {attrs.layout!r} must be a permutation of N, C and the letters of {rank} spatial axes"
        )
    for key, length in (("strides", rank), ("dilation", rank), ("padding", 2 * rank)):
        if len(getattr(attrs, key)) != length:
            raise ProblemError(f"{name}: {key} needs {length} entries, but has {len(getattr(attrs, key))}")
    if grad.dtype != data.dtype:
        raise DTypeError(f"{name}: grad is {grad.dtype} and data {data.dtype}; cast one with relax.astype")
    for tensor, what in ((grad, "grad"), (data, "data")):
        if tensor.ndim not in (-1, rank + 2):
            raise ProblemError(f"{name}: {what} must have {rank + 2} axes ({attrs.layout}), but has {tensor.ndim}")
    return data


def legalize(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """FLegalize: tensor expressions, for any target; a max pool first finds the winner of each window."""
    attrs, operands = call.attrs, list(call.args)
    if str(call.op.name) != AVG:
        # A function of its own: within one function, TVM's analysis of the buffer between takes seconds for 3-D pools.
        found = block_builder.call_te(
            lambda grad, data: _Pool(attrs, grad.shape, data).winners(), *operands, primfunc_name_hint="max_pool_winner"
        )
        winners = block_builder.emit(one_thread_each(block_builder, found))
        operands.append(block_builder.emit(relax.TupleGetItem(winners, 0)))

    def gradient(grad: te.Tensor, data: te.Tensor, *winner: te.Tensor) -> te.Tensor:
        return _Pool(attrs, grad.shape, data).gradient(grad, *winner)

    dtype, name = str(call.ty.dtype), "avg_pool_backward" if str(call.op.name) == AVG else "max_pool_backward"
    total = one_thread_each(block_builder, block_builder.call_te(gradient, *operands, primfunc_name_hint=name))
    total = block_builder.normalize(total)
    return total if str(total.ty.dtype) == dtype else block_builder.call_te(topi.cast, block_builder.emit(total), dtype)


def legalize_max_pool(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """The lowering of a max pool of a plain layout and any extents: NaN stays, and so does -inf, which TVM loses."""
    shape = call.ty.shape.values
    found = block_builder.call_te(
        lambda data: _Pool(call.attrs, shape, data).largest(), call.args[0], primfunc_name_hint="max_pool"
    )
    return one_thread_each(block_builder, found)


class _Pool:
    """The geometry of one pool on tensor expressions; `windows` are the extents of its result."""

    def __init__(self, attrs: tvm.ir.Attrs, windows: Sequence[tirx.Expr], data: te.Tensor) -> None:
        rank = len(attrs.pool_size)
        self.windows, self.data = list(windows), data
        self.axes = [str(attrs.layout).index(letter) for letter in SPATIAL[rank]]
        self.kernel = [int(v) for v in attrs.pool_size]
        self.strides = [int(v) for v in attrs.strides]
        self.low = [int(v) for v in attrs.padding[:rank]]
        self.high = [int(v) for v in attrs.padding[rank:]]
        self.dilation = [int(v) for v in attrs.dilation]
        self.with_padding = bool(attrs.count_include_pad)
        dtype = str(data.dtype)
        self.wide = wide_dtype(dtype)  # to compare and sum in

    def gradient(self, grad: te.Tensor, winner: te.Tensor | None = None) -> te.Tensor:
        """dX[i] = Σ_k dY[o]·share(o, k) over the kernel offsets k for which a window o reads place i.

        The share is 1 or 0 by `winner` where it is given, else 1/count of the window. For a GPU the type is that of the
        sum: its function holds no tensor to cast from.
        """
        offsets = [te.reduce_axis((0, k), name=f"k{i}") for i, k in enumerate(self.kernel)]
        dtype, sum_dtype = str(self.data.dtype), self.wide

        def element(*place: tirx.Expr) -> tirx.Expr:
            at, conditions = list(place), []
            for axis, k, stride, low, dilation in zip(
                self.axes, offsets, self.strides, self.low, self.dilation, strict=True
            ):
                # low, dilation and stride make this a division of a number that may be negative: test before.
                shifted = place[axis] + low - k * dilation
                window = tirx.floordiv(shifted, stride)
                conditions += [shifted >= 0, window < self.windows[axis]]
                if stride > 1:
                    conditions.append(tirx.floormod(shifted, stride) == 0)
                at[axis] = window
            value = grad(*at).astype(sum_dtype)
            if winner is None:
                value = value / self._count(at).astype(sum_dtype)
            else:
                value = tirx.if_then_else(winner(*at) == self._flat(offsets), value, tirx.const(0, sum_dtype))
            value = tirx.if_then_else(tirx.all(*conditions), value, tirx.const(0, sum_dtype))
            return te.sum(value, axis=offsets)

        total = te.compute(self.data.shape, element, name="pool_gradient")
        if sum_dtype == dtype or lowers_for_gpu():
            return total
        return te.compute(self.data.shape, lambda *i: total(*i).astype(dtype), name="pool_gradient_cast")

    def _flat(self, offsets: Sequence[tirx.Expr]) -> tirx.Expr:
        number: Any = tirx.const(0, "int32")
        for offset, extent in zip(offsets, self.kernel, strict=True):
            number = number * extent + tirx.Cast("int32", offset.var)
        return number

    def winners(self) -> list[te.Tensor]:
        """For each window, the number of the kernel offset of its first maximum, or of its last NaN; and its value.

        Both are results: a function for a GPU cannot hold a tensor of its own, as the unused value would be.
        """
        outside = math.prod(self.kernel)

        def better(left: Pair, right: Pair) -> Pair:
            earlier = tirx.all(right[1] == left[1], right[0] < left[0])
            later_nan = tirx.all(is_nan(right[1]), tirx.any(tirx.Not(is_nan(left[1])), right[0] > left[0]))
            right_wins = tirx.any(right[1] > left[1], earlier, later_nan)
            return tirx.Select(right_wins, right[0], left[0]), tirx.Select(right_wins, right[1], left[1])

        def nothing(number: str, value: str) -> Pair:
            return tirx.const(outside, number), tirx.const(float("-inf"), value)

        argmax = te.comm_reducer(better, nothing, name="first_max")
        offsets = self._offsets()
        padded = self._padded(self.wide)

        def element(*window: tirx.Expr) -> tirx.Expr:
            at = self._place(window, offsets)
            inside = tirx.all(*self._inside(at))
            number = tirx.if_then_else(inside, self._flat(offsets), tirx.const(outside, "int32"))
            return argmax((number, padded(*at)), axis=offsets)

        return list(te.compute(self.windows, element, name="winner"))

    def largest(self) -> te.Tensor:
        """The largest value of each window, or NaN if it has one.

        A GPU compares values of 16 bits themselves, as its function holds no tensor to cast from.
        """
        dtype = str(self.data.dtype)
        compared = dtype if lowers_for_gpu() else self.wide
        reduce = te.comm_reducer(maximum, lambda dtype: tirx.const(float("-inf"), dtype), name="max")
        offsets, padded = self._offsets(), self._padded(compared)
        result = te.compute(
            self.windows, lambda *window: reduce(padded(*self._place(window, offsets)), axis=offsets), name="max_pool"
        )
        if compared == dtype:
            return result
        return te.compute(self.windows, lambda *window: result(*window).astype(dtype), name="max_pool_cast")

    def _offsets(self) -> list[tirx.Expr]:
        return [te.reduce_axis((0, k), name=f"w{i}") for i, k in enumerate(self.kernel)]

    def _place(self, window: Sequence[tirx.Expr], offsets: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """Where a kernel offset of a window lies in the padded data."""
        at = list(window)
        for axis, k, stride, dilation in zip(self.axes, offsets, self.strides, self.dilation, strict=True):
            at[axis] = window[axis] * stride + k * dilation
        return at

    def _inside(self, place: Sequence[tirx.Expr]) -> list[tirx.Expr]:
        """The conditions under which a place of the padded data is one of the data."""
        return [
            condition
            for axis, low in zip(self.axes, self.low, strict=True)
            for condition in (place[axis] - low >= 0, place[axis] - low < self.data.shape[axis])
        ]

    def _padded(self, dtype: str) -> te.Tensor:
        """The data, as a type, with −inf around it, as far as the last window reaches."""
        shape = list(self.data.shape)
        for i, axis in enumerate(self.axes):
            reach = (self.kernel[i] - 1) * self.dilation[i] + 1
            shape[axis] = (self.windows[axis] - 1) * self.strides[i] + reach

        def element(*place: tirx.Expr) -> tirx.Expr:
            at = list(place)
            for axis, low in zip(self.axes, self.low, strict=True):
                at[axis] = place[axis] - low
            value = self.data(*at)
            cast = value if dtype == str(self.data.dtype) else value.astype(dtype)
            return tirx.if_then_else(tirx.all(*self._inside(place)), cast, tirx.const(float("-inf"), dtype))

        return te.compute(shape, element, name="padded")

    def _count(self, window: Sequence[tirx.Expr]) -> tirx.Expr:
        """How many places the window averages: those inside the image, or inside the padded image."""
        number: Any = 1
        for i, axis in enumerate(self.axes):
            start = window[axis] * self.strides[i] - self.low[i]
            extent = self.data.shape[axis]
            last_place = extent + self.high[i] - 1 if self.with_padding else extent - 1
            last = tirx.min(tirx.floordiv(last_place - start, self.dilation[i]), self.kernel[i] - 1)
            first: Any = 0
            if not self.with_padding and self.low[i] > 0:
                first = tirx.max(tirx.floordiv(self.dilation[i] - 1 - start, self.dilation[i]), 0)
            number = number * (last - first + 1)
        return tirx.max(number, 1)


def declare() -> None:
    """Register both operators; repeating is harmless."""
    for name, function in ((MAX, max_pool_backward), (AVG, avg_pool_backward)):
        declare_operator(name, "Gradient of a pool in its data", infer_type)
        setattr(relax.op.nn, function.__name__, function)
