# SPDX-License-Identifier: Apache-2.0
"""Sums and products of ONNX along axes: CumSum, CumProd, ReduceProd, norms, old softmax and Einsum."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.ir.graph import Extent


def cumulative_sum(node: Node) -> relax.Expr | None:
    """CumSum, from either end."""
    axis, data = node.value(1), node.tensor()
    if axis is None or axis.size != 1:
        return None
    exclusive, along = bool(node.integer("exclusive", 0)), int(axis.item()) % data.ty.ndim
    if not node.integer("reverse", 0):
        return op.cumsum(data, along, exclusive=exclusive)
    summed = node.emit(op.cumsum(node.emit(op.flip(data, along)), along, exclusive=exclusive))
    return op.flip(summed, along)


def cumulative_product(node: Node) -> relax.Expr:
    """CumProd: products with what stands 1, 2, 4, ... before, so that zeros do no harm to the gradient."""
    axis, data = node.value(1), node.tensor()
    if axis is None or axis.size != 1:
        raise node.refusal("its axis must be a constant; export the model with a fixed axis")
    along = int(axis.item()) % data.ty.ndim
    extent = _number(node, data, along)
    reverse = bool(node.integer("reverse", 0))
    total = node.emit(op.flip(data, along)) if reverse else data
    if node.integer("exclusive", 0):
        one = node.emit(op.ones_like(_part(node, total, along, 0, 1)))
        total = node.emit(op.concat([one, _part(node, total, along, 0, extent - 1)], along)) if extent > 1 else one
    shift = 1
    while shift < extent:
        product = op.multiply(_part(node, total, along, shift, extent), _part(node, total, along, 0, extent - shift))
        total = node.emit(op.concat([_part(node, total, along, 0, shift), node.emit(product)], along))
        shift *= 2
    return op.flip(total, along) if reverse else total


def product(node: Node) -> relax.Expr:
    """ReduceProd as a tree of products of halves, whose gradient is right beside zeros, too."""
    data, reduced = node.tensor(), _reduced_axes(node)
    for axis in reduced:
        extent = _number(node, data, axis)
        while extent > 1:
            half = extent // 2
            both = op.multiply(_part(node, data, axis, 0, half), _part(node, data, axis, half, 2 * half))
            rest = [_part(node, data, axis, extent - 1, extent)] if extent % 2 else []
            data = node.emit(op.concat([node.emit(both), *rest], axis)) if rest else node.emit(both)
            extent = half + len(rest)
    return data if node.integer("keepdims", 1) or not reduced else op.squeeze(data, reduced)


def _reduced_axes(node: Node) -> list[int]:
    """The axes of a reduction, which an attribute or an operand names."""
    axes = node.value(1)
    if not node.is_constant(1):
        raise node.refusal("its axes must be constants; export the model with fixed axes")
    stated = node.integers("axes", ()) if axes is None else tuple(int(axis) for axis in axes.reshape(-1))
    rank = node.tensor().ty.ndim
    if not stated and node.integer("noop_with_empty_axes", 0):
        return []
    return sorted({axis % rank for axis in stated}) or list(range(rank))


def euclidean(node: Node) -> relax.Expr | None:
    """ReduceL2 with gradient 0 where the norm is, as PyTorch's has it."""
    if not node.is_float():
        return None
    data, axes = node.tensor(), _reduced_axes(node)
    squares = node.emit(op.multiply(data, data))
    total = node.emit(op.sum(squares, axes, keepdims=bool(node.integer("keepdims", 1)))) if axes else squares
    zero = node.emit(op.equal(total, node.scalar(0)))
    root = node.emit(op.sqrt(node.emit(op.where(zero, op.ones_like(total), total))))
    return op.where(zero, op.zeros_like(total), root)


def _number(node: Node, data: relax.Expr, axis: int) -> int:
    extent = known_extents(data)[axis]
    if not isinstance(extent, int):
        raise node.refusal(f"the extent of axis {axis} is {extent}; a product needs one that is fixed")
    return extent


def _part(node: Node, data: relax.Expr, axis: int, begin: int, end: int) -> relax.Expr:
    return node.emit(op.strided_slice(data, [axis], [begin], [end], assume_inbound=True))


def softmax(node: Node) -> relax.Expr | None:
    """Softmax and log-softmax of before opset 13: over all axes from `axis` on, as one."""
    data, axis = node.tensor(), node.integer("axis", 1)
    rank = data.ty.ndim
    axis %= rank
    if node.opset >= 13 or axis == rank - 1:
        return None
    extents = list(node.extents())
    size: Extent = 1
    for extent in extents[axis:]:
        size = size * extent
    make = {"Softmax": op.nn.softmax, "LogSoftmax": op.nn.log_softmax}[node.kind]
    return op.reshape(node.emit(make(node.reshaped(data, [*extents[:axis], size]), -1)), relax.ShapeExpr(extents))


def lp_normalization(node: Node) -> relax.Expr:
    """x divided by its norm along an axis; 0 where the norm is."""
    data, axis, p = node.tensor(), node.integer("axis", -1), node.integer("p", 2)
    terms = op.abs(data) if p == 1 else op.multiply(data, data)
    total = node.emit(op.sum(node.emit(terms), [axis], keepdims=True))
    zero = node.emit(op.equal(total, node.scalar(0)))
    total = node.emit(op.where(zero, op.ones_like(total), total))
    return op.divide(data, total if p == 1 else node.emit(op.sqrt(total)))


def einsum(node: Node) -> relax.Expr:
    """Einsum as products of matrices: operands are combined from left to right."""
    given, _, stated = node.text("equation", "").replace(" ", "").partition("->")
    operands = [_Labelled.of(node, node.tensor(place), labels) for place, labels in enumerate(given.split(","))]
    every = [label for operand in operands for label in operand.labels]
    free = sorted({label for label in every if label.startswith("...")})
    if "->" in node.text("equation", ""):
        before, dots, after = stated.partition("...")
        result = [*before, *(free if dots else []), *after]
    else:
        result = free + sorted(label for label in set(every) - set(free) if every.count(label) == 1)
    total = operands[0].diagonal(node)
    for place, operand in enumerate(operands[1:], 1):
        later = {label for each in operands[place + 1 :] for label in each.labels}
        total = _combined(node, total, operand.diagonal(node), later | set(result))
    total = total.summed(node, result)
    order = [total.labels.index(label) for label in result]
    return total.data if order == sorted(order) else op.permute_dims(total.data, order)


class _Labelled:
    """A tensor and the letters of its axes; those of an ellipsis are "...99" (the last one), "...98" and so on."""

    def __init__(self, data: relax.Expr, labels: Sequence[str]) -> None:
        self.data, self.labels = data, list(labels)

    @classmethod
    def of(cls, node: Node, data: relax.Expr, text: str) -> _Labelled:
        before, dots, after = text.partition("...")
        count = data.ty.ndim - len(before) - len(after)
        if count < 0 or (count and not dots):
            raise node.refusal(f"{text!r} in its equation does not fit an operand of {data.ty.ndim} axes")
        # Two digits, so that names sort as the axes stand.
        hidden = [f"...{99 - place:02}" for place in reversed(range(count))]
        return cls(data, [*before, *hidden, *after])

    def extent(self, label: str) -> Extent:
        return known_extents(self.data)[self.labels.index(label)]

    def diagonal(self, node: Node) -> _Labelled:
        """With each letter once."""
        labels, data = self.labels, self.data
        while len(set(labels)) < len(labels):
            label = next(label for label in labels if labels.count(label) > 1)
            first, second = [axis for axis, each in enumerate(labels) if each == label][:2]
            extents = known_extents(data)
            extent = extents[first]
            if not isinstance(extent, int):
                raise node.refusal(f"the diagonal over {label!r} needs a fixed extent, not {extent}")
            shape = [extent if axis in (first, second) else 1 for axis in range(len(labels))]
            unit = relax.const(np.eye(extent).reshape(shape).astype(str(data.ty.dtype)))
            data = node.emit(op.sum(node.emit(op.multiply(data, unit)), [second]))
            labels = labels[:second] + labels[second + 1 :]
        return _Labelled(data, labels)

    def summed(self, node: Node, kept: Sequence[str] | set[str]) -> _Labelled:
        """The sum over all letters but these."""
        axes = [axis for axis, label in enumerate(self.labels) if label not in kept]
        if not axes:
            return self
        return _Labelled(node.emit(op.sum(self.data, axes)), [label for label in self.labels if label in kept])

    def grouped(self, node: Node, groups: Sequence[Sequence[str]], flat: Sequence[Sequence[str]]) -> relax.Expr:
        """The tensor with axes in the order of `groups`, and each group of `flat` behind them as one axis."""
        order = [self.labels.index(label) for group in (*groups, *flat) for label in group]
        data = self.data if order == sorted(order) else node.emit(op.permute_dims(self.data, order))
        extents = [self.extent(label) for group in groups for label in group]
        for group in flat:
            size: Extent = 1
            for label in group:
                size = size * self.extent(label)
            extents.append(size)
        return node.reshaped(data, extents)


def _combined(node: Node, left: _Labelled, right: _Labelled, needed: set[str]) -> _Labelled:
    """The product of two tensors, summed over the letters that nothing else needs."""
    left, right = left.summed(node, needed | set(right.labels)), right.summed(node, needed | set(left.labels))
    both = [label for label in left.labels if label in right.labels]
    batch = [label for label in both if label in needed]
    inner = [label for label in both if label not in needed]
    rows = [label for label in left.labels if label not in both]
    columns = [label for label in right.labels if label not in both]
    product = node.emit(
        op.matmul(left.grouped(node, [batch], [rows, inner]), right.grouped(node, [batch], [inner, columns]))
    )
    extents = list(known_extents(product))[: len(batch)]
    extents += [left.extent(label) for label in rows] + [right.extent(label) for label in columns]
    return _Labelled(node.reshaped(product, extents), [*batch, *rows, *columns])


CONVERTERS: dict[str, Converter] = {
    "CumProd": cumulative_product,
    "CumSum": cumulative_sum,
    "Einsum": einsum,
    "LogSoftmax": softmax,
    "LpNormalization": lp_normalization,
    "ReduceL2": euclidean,
    "ReduceProd": product,
    "Softmax": softmax,
}
"""By operator of ONNX."""
