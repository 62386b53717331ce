# SPDX-License-Identifier: Apache-2.0
"""Expressions and small programs for a direction of a ConvProblem: what rules, evaluate and the fuzzer build from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import relax

from relax_ops.ir import dtype_of, spec_of
from relax_ops.ops import make_call
from tvm_convgrad.core.catalogue import BACKWARD_DATA, FORWARD, Direction, OpEntry
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, flat_padding, kernel_layout_of, output_extent
from tvm_convgrad.core.problem import ConvProblem

_STOCK = {1: relax.op.nn.conv1d, 2: relax.op.nn.conv2d, 3: relax.op.nn.conv3d}


def forward_call(
    builder: relax.BlockBuilder,
    data: relax.Expr,
    weight: relax.Expr,
    *,
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
    data_layout: str,
    kernel_layout: str,
    grad_layout: str,
    out_dtype: str | None,
    is_direct: bool = False,
) -> Any:
    """A stock convolution, with what stock lacks around it.

    Operands of two types are cast to a common one (stock takes one type only), products of 16-bit operands are summed
    in float32, a result layout other than the data's is made by a transpose (stock does not legalize it), and so is an
    order of spatial axes other than DHW (stock's kernels then give each axis another one's stride and padding), and so
    are zeros where a tensor has no element (stock has no empty loops).

    Args:
        builder: a BlockBuilder; all but the last operation are emitted into it.
        data, weight: Relax tensors.
        out_dtype: of the result; None leaves the type of the sum.
        is_direct: whether the operator itself has `out_dtype`, for a library that sums 16-bit operands in float32 and
            rounds once; else a cast follows it.
    """
    dtypes = {dtype_of(builder.normalize(operand).ty) for operand in (data, weight)}
    operand_dtype = dtypes.pop() if len(dtypes) == 1 else "float64" if "float64" in dtypes else "float32"
    data, weight = (
        operand if dtype_of(builder.normalize(operand).ty) == operand_dtype else relax.op.astype(operand, operand_dtype)
        for operand in (data, weight)
    )
    rank = len(strides)
    sum_dtype = wide_dtype(operand_dtype) if operand_dtype else None
    if is_direct and out_dtype is not None:
        sum_dtype = out_dtype
    empty = _empty_result(builder, data, weight, (data_layout, kernel_layout, grad_layout), strides, padding, dilation)
    if empty is not None:
        return relax.op.zeros(relax.ShapeExpr(empty), out_dtype or sum_dtype)
    if not all(_spatial(layout) == SPATIAL[rank] for layout in (data_layout, kernel_layout)):
        data = builder.emit(relax.op.permute_dims(data, [data_layout.index(a) for a in data_layout_of(rank)]))
        weight = builder.emit(relax.op.permute_dims(weight, [kernel_layout.index(a) for a in kernel_layout_of(rank)]))
        data_layout, kernel_layout = data_layout_of(rank), kernel_layout_of(rank)
    result = _STOCK[rank](
        data,
        weight,
        strides=list(strides),
        padding=list(flat_padding(padding)),
        dilation=list(dilation),
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=sum_dtype,
    )
    if data_layout != grad_layout:
        result = relax.op.permute_dims(builder.emit(result), [data_layout.index(letter) for letter in grad_layout])
    if out_dtype not in (None, sum_dtype):
        result = relax.op.astype(builder.emit(result), out_dtype)
    return result


def _empty_result(
    builder: relax.BlockBuilder,
    data: relax.Expr,
    weight: relax.Expr,
    layouts: tuple[str, str, str],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
) -> list[Any] | None:
    """The shape of the result if it, or an operand, is known to have no element; layouts of data, weight, result."""
    shapes = [spec_of(builder.normalize(operand), "operand", "forward").shape for operand in (data, weight)]
    if None in shapes:
        return None
    x, w = (dict(zip(layout, shape or (), strict=True)) for layout, shape in zip(layouts, shapes, strict=False))
    y = {"N": x["N"], "C": w["O"]}
    for axis, s, d, (low, high) in zip(SPATIAL[len(strides)], strides, dilation, padding, strict=True):
        y[axis] = output_extent(x[axis], w[axis], s, d, low, high)
    is_empty = any(isinstance(e, int) and e == 0 for e in (*x.values(), *w.values(), *y.values()))
    return [y[letter] for letter in layouts[2]] if is_empty else None


def _spatial(layout: str) -> str:
    return "".join(letter for letter in layout if letter in "DHW")


@dataclass(frozen=True)
class Convolution:
    """A convolution of the family, whichever direction is computed: geometry, layouts, extents of kernel and data.

    Attributes:
        layouts: of "grad", "data" and "weight".
        data_shape: ints or expressions, in the layout of data.
    """

    rank: int
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    layouts: Mapping[str, str]
    kernel: tuple[int, ...]
    data_shape: Any

    def call(
        self, direction: Direction, first: Any, second: Any, out_dtype: str | None, builder: relax.BlockBuilder
    ) -> relax.Expr:
        """An expression for another direction of the same convolution, of type `out_dtype`."""
        geometry: dict[str, Any] = {
            "strides": self.strides,
            "padding": self.padding,
            "dilation": self.dilation,
            "groups": self.groups,
            "grad_layout": self.layouts["grad"],
            "data_layout": self.layouts["data"],
            "kernel_layout": self.layouts["weight"],
            "out_dtype": out_dtype,
        }
        if direction is FORWARD:
            return forward_call(builder, first, second, **geometry)
        own = {"data_shape": self.data_shape} if direction is BACKWARD_DATA else {"kernel_size": self.kernel}
        return make_call(OpEntry(direction, self.rank), first, second, **own, **geometry)


def direction_call(
    builder: relax.BlockBuilder,
    direction: Direction,
    problem: ConvProblem,
    first: Any,
    second: Any,
    *,
    is_direct: bool = False,
) -> relax.Expr:
    """The call that computes `direction` of a static problem from two operands of its shapes, layouts and types.

    `is_direct` is that of `forward_call`; gradients have their type themselves.
    """
    geometry: dict[str, Any] = {
        "strides": problem.strides,
        "padding": problem.padding,
        "dilation": problem.dilation,
        "groups": problem.groups,
        "grad_layout": problem.grad_layout,
        "data_layout": problem.data_layout,
        "kernel_layout": problem.kernel_layout,
    }
    if direction is FORWARD:
        return forward_call(builder, first, second, out_dtype=problem.grad_dtype, is_direct=is_direct, **geometry)
    own = {"data_shape": problem.data_shape} if direction is BACKWARD_DATA else {"kernel_size": problem.kernel}
    out_dtype = problem.tensors[direction.result][1]
    return make_call(OpEntry(direction, problem.rank), first, second, out_dtype=out_dtype, **own, **geometry)


def directions_module(directions: Iterable[tuple[str, Direction, ConvProblem]], *, is_direct: bool = False) -> Any:
    """An IRModule with a function for each (function name, direction, static problem), of its operands.

    `is_direct` is that of `forward_call`.
    """
    builder = relax.BlockBuilder()
    for name, direction, problem in directions:
        problem.require_static("running")
        operands = [relax.Var(operand, relax.TensorType(*problem.tensors[operand])) for operand in direction.operands]
        with builder.function(name, operands):
            with builder.dataflow():
                result = direction_call(builder, direction, problem, *operands, is_direct=is_direct)
                result = builder.emit_output(result)
            builder.emit_func_output(result)
    return builder.get()
