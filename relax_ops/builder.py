# SPDX-License-Identifier: Apache-2.0
"""The legalize.Builder on Relax: every operation is a stock Relax op emitted into a BlockBuilder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, te, topi

from legalize.builder import Extent, Value
from relax_ops.compat import arithmetic
from relax_ops.ir import AnalyzerProver, dtype_of, part, spec_of
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, flat_padding, kernel_layout_of

_CONVOLUTIONS = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}
_TRANSPOSED = {1: relax.op.nn.conv1d_transpose, 2: relax.op.nn.conv2d_transpose, 3: relax.op.nn.conv3d_transpose}


class RelaxBuilder:
    """Emits stock Relax operations through `block_builder`."""

    def __init__(self, block_builder: relax.BlockBuilder) -> None:
        self._bb = block_builder

    def shape(self, value: Value) -> tuple[Extent, ...]:
        """Extents of `value`, ints wherever they are constants.

        Raises:
            UnsupportedError: the shape is not known at compile time.
        """
        shape = spec_of(value, "operand", "composition").shape
        if shape is None:
            raise UnsupportedError(f"composition: the shape of {value} is not known; give it by R.match_cast")
        return shape

    def zeros(self, shape: Sequence[Extent], dtype: str) -> Value:
        """relax.zeros."""
        return self._emit(relax.op.zeros(relax.ShapeExpr(list(shape)), dtype))

    def cast(self, value: Value, dtype: str) -> Value:
        """`value` as `dtype`."""
        return value if dtype_of(value.ty) == dtype else self._emit(relax.op.astype(value, dtype))

    def transpose(self, value: Value, permutation: Sequence[int]) -> Value:
        """relax.permute_dims, unless it changes nothing."""
        if list(permutation) == list(range(len(permutation))):
            return value
        shape = self.shape(value)
        if _is_empty(shape):  # which RewriteDataflowReshape takes for a reshape, with an extent of 0
            return self.zeros([shape[i] for i in permutation], str(dtype_of(value.ty)))
        unknown = [i for i, extent in enumerate(shape) if not isinstance(extent, int)]
        if len(unknown) != 1 or isinstance(arithmetic.Analyzer().simplify(shape[unknown[0]]), tvm.tirx.Var):
            return self._emit(relax.op.permute_dims(value, list(permutation)))
        # TVM's RewriteDataflowReshape raises an internal error at stock's transpose of a tensor like (2, 4, h - 2, 4),
        # whose one symbolic extent is a formula; at (2, 4, extent, 4) it does not, so this one is written for any
        # extent. (A match_cast would name it as well, but TVM 0.26 gives the memory of what was cast away too early.)
        dtype = dtype_of(value.ty)
        data = te.placeholder([_name_or_constant(extent) for extent in shape], dtype, "data")
        function = te.create_prim_func([data, topi.transpose(data, list(permutation))]).without_attr("global_symbol")
        variable = self._bb.add_func(function.with_attr("tirx.noalias", True), "transpose")
        result = relax.TensorType([shape[i] for i in permutation], dtype)
        return self._emit(relax.op.call_tir(variable, [value], result))

    def reshape(self, value: Value, shape: Sequence[Extent]) -> Value:
        """relax.reshape, or zeros where there are no elements: relax.reshape takes an extent of 0 for the operand's."""
        if _is_empty(shape):
            return self.zeros(shape, str(dtype_of(value.ty)))
        return self._emit(relax.op.reshape(value, relax.ShapeExpr(list(shape))))

    def tile(self, value: Value, times: Sequence[int]) -> Value:
        """relax.tile."""
        return value if all(t == 1 for t in times) else self._emit(relax.op.tile(value, list(times)))

    def pad(self, value: Value, pairs: Sequence[tuple[int, int]]) -> Value:
        """relax.nn.pad with zeros."""
        if not any(any(pair) for pair in pairs):
            return value
        return self._emit(relax.op.nn.pad(value, [p for pair in pairs for p in pair]))

    def slice(self, value: Value, begin: Sequence[Extent], end: Sequence[Extent]) -> Value:
        """relax.strided_slice over the axes that it makes shorter."""
        shape = self.shape(value)
        prover = AnalyzerProver()
        sliced = [
            i
            for i, (b, e) in enumerate(zip(begin, end, strict=True))
            if not (_is(b, 0) and prover.equal(e, shape[i]) is True)
        ]
        if not sliced:
            return value
        return self._emit(
            relax.op.strided_slice(
                value, axes=sliced, begin=[begin[i] for i in sliced], end=[end[i] for i in sliced], assume_inbound=True
            )
        )

    def flip(self, value: Value, axes: Sequence[int]) -> Value:
        """relax.flip, an axis at a time, where there is more than one element."""
        shape = self.shape(value)
        for axis in axes:
            if not _is(shape[axis], 1):
                value = self._emit(relax.op.flip(value, axis))
        return value

    def sum(self, value: Value, axis: int) -> Value:
        """relax.sum over one axis."""
        return self._emit(relax.op.sum(value, axis))

    def convolution(
        self,
        data: Value,
        weight: Value,
        *,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        dilation: Sequence[int],
        groups: int,
        out_dtype: str,
    ) -> Value:
        """relax.nn.conv{1,2,3}d."""
        rank = len(strides)
        call = _CONVOLUTIONS[rank](
            data,
            weight,
            strides=list(strides),
            padding=list(flat_padding(padding)),
            dilation=list(dilation),
            groups=groups,
            data_layout=data_layout_of(rank),
            kernel_layout=kernel_layout_of(rank),
            out_dtype=out_dtype,
        )
        return self._emit(part(call))

    def transposed_convolution(
        self,
        data: Value,
        weight: Value,
        *,
        strides: Sequence[int],
        padding: Sequence[tuple[int, int]],
        output_padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
        out_dtype: str,
    ) -> Value:
        """relax.nn.conv{1,2,3}d_transpose."""
        rank = len(strides)
        call = _TRANSPOSED[rank](
            data,
            weight,
            strides=list(strides),
            padding=list(flat_padding(padding)),
            output_padding=list(output_padding),
            dilation=list(dilation),
            groups=groups,
            data_layout=data_layout_of(rank),
            kernel_layout="IO" + SPATIAL[rank],
            out_dtype=out_dtype,
        )
        return self._emit(part(call))

    def _emit(self, expr: Value) -> Value:
        return self._bb.emit(expr)


def _is_empty(shape: Sequence[Extent]) -> bool:
    """Whether a tensor of this shape has no elements, whatever its symbolic extents are."""
    return any(isinstance(extent, int) and extent == 0 for extent in shape)


def _is(extent: Extent, want: Extent) -> bool:
    return isinstance(extent, int) and isinstance(want, int) and extent == want


def _name_or_constant(extent: Extent) -> Any:
    """A constant as an int64, a formula as a new name."""
    return tvm.tirx.IntImm("int64", extent) if isinstance(extent, int) else tvm.tirx.Var("extent", "int64")


def checked_view(block_builder: relax.BlockBuilder, value: Value, shape: Sequence[Extent]) -> Value:
    """The tensor `value` typed as of `shape`; whether it has that shape is checked when the program runs.

    A match_cast of its shape and a view, not a match_cast of itself: TVM 0.26 plans the memory of a tensor as free
    once it has been cast (apache/tvm#20190), without a word.
    """
    found = block_builder.emit(relax.op.shape_of(value))
    checked = block_builder.match_cast(found, relax.ShapeType(list(shape)))
    return block_builder.emit(relax.op.memory.view(value, checked))
