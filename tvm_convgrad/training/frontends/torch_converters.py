# SPDX-License-Identifier: Apache-2.0
"""Translations of PyTorch's operators to Relax that replace those of TVM's importer, or that it lacks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import tvm
from tvm import relax
from tvm.relax import op

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_random import STOP_GRADIENT
from tvm_convgrad.training.ir.graph import element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    Convert: TypeAlias = Callable[[torch.fx.Node, ExportedProgramImporter], relax.Expr]

_LOWEST = -60000.0
"""Below all arguments for which exp is not 0, in any float type."""


def converters() -> dict[str, Convert]:
    """The translations, by operator."""
    return {
        "dropout.default": _dropout,
        "native_dropout.default": _native_dropout,
        "_native_batch_norm_legit_functional.default": _batch_norm_training,
        STOP_GRADIENT: lambda node, importer: importer.block_builder.emit(op.grad.no_grad(importer.env[node.args[0]])),
        "select.int": _select,
        "index.Tensor": _index,
        "index_select.default": _index_select,
        "index_put.default": _index_put,
        "embedding.default": _embedding,
        "scatter_add.default": _scatter_add,
        "amax.default": lambda node, importer: _reduced(node, importer, op.max),
        "amin.default": lambda node, importer: _reduced(node, importer, op.min),
        "convolution.default": _convolution,
        "native_group_norm.default": _group_norm,
        "elu.default": _elu,
        "celu.default": lambda node, importer: _elu_of(node, importer, *_celu(*node.args[1:])),
        "softplus.default": _softplus,
        "clamp.default": _clamp,
        "floor_divide.default": _floor_divide,
        "div.Tensor_mode": _divide,
        "div.Tensor": _quotient,
        "upsample_nearest2d.vec": _nearest,
        "_upsample_bilinear2d_aa.vec": lambda node, importer: _separable(node, importer, "bilinear"),
        "_upsample_bilinear2d_aa.default": lambda node, importer: _separable(node, importer, "bilinear"),
        "_upsample_bicubic2d_aa.vec": lambda node, importer: _separable(node, importer, "bicubic"),
        "_upsample_bicubic2d_aa.default": lambda node, importer: _separable(node, importer, "bicubic"),
        "max_pool2d.default": lambda node, importer: _max_pool(node, importer, importer._max_pool2d),
        "max_pool3d.default": lambda node, importer: _max_pool(node, importer, importer._max_pool3d),
        "max_pool2d_with_indices.default": lambda node, importer: _max_pool(
            node, importer, importer._max_pool2d_with_indices
        ),
        "max_pool3d_with_indices.default": lambda node, importer: _max_pool(
            node, importer, importer._max_pool3d_with_indices
        ),
        "avg_pool2d.default": lambda node, importer: _average(node, importer, importer._avg_pool2d),
        "avg_pool3d.default": lambda node, importer: _average(node, importer, importer._avg_pool3d),
    }


def _dropout(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    data, rate = importer.env[node.args[0]], float(node.args[1])
    return importer.block_builder.emit(_dropped(importer, data, rate)[0])


def _native_dropout(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    return _dropped(importer, importer.env[node.args[0]], float(node.args[1]))


def _dropped(importer: ExportedProgramImporter, data: relax.Expr, rate: float) -> relax.Expr:
    return importer.block_builder.emit(op.nn.dropout(data, rate))


def _batch_norm_training(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """(output, saved mean, saved deviation, new running mean, new running variance)."""
    result = importer._batch_norm(node, training=True, return_tuple=True)
    emit = importer.block_builder.emit
    output, mean, variance = (emit(relax.TupleGetItem(result, index)) for index in range(3))
    return emit(relax.Tuple([output, mean, variance, mean, variance]))


def _select(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x[..., index, ...] as a slice of one element; TVM's importer makes a `take`, which reads out of bounds at -1."""
    x, axis, index = importer.retrieve_args(node)
    emit, shape = importer.block_builder.emit, static_shape(x)
    axis %= len(shape)
    begin = shape[axis] + index if isinstance(index, int) and index < 0 else index
    return emit(op.squeeze(emit(op.strided_slice(x, [axis], [begin], [begin + 1], assume_inbound=True)), [axis]))


def _wrapped(importer: ExportedProgramImporter, places: relax.Expr, extent: Any) -> relax.Expr:
    """Places that count from the end below zero, as places from the front."""
    emit, dtype = importer.block_builder.emit, element_type(places)
    if not isinstance(extent, int):
        raise UnsupportedError(
            f"indexing by a tensor needs a fixed extent, not {extent}; export without dynamic shapes"
        )
    last = emit(op.add(places, relax.const(extent, dtype)))
    return emit(op.where(emit(op.less(places, relax.const(0, dtype))), last, places))


def _index_select(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    x, axis, places = importer.retrieve_args(node)
    return importer.block_builder.emit(op.take(x, places, axis))


def _embedding(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    table, places = importer.retrieve_args(node)[:2]
    return importer.block_builder.emit(op.take(table, places, 0))


class _Indexing:
    """x[places of some axes, broadcast against each other]: those axes brought together and flattened to one.

    `front` is the permutation that brings them together, at `axis`; `places` are numbers along the flattened one.
    """

    def __init__(
        self, importer: ExportedProgramImporter, x: relax.Expr, given: Sequence[relax.Expr | None], operator: str
    ) -> None:
        emit, shape = importer.block_builder.emit, static_shape(x)
        indexed = [axis for axis, places in enumerate(given) if places is not None]
        tensors = [places for places in given if places is not None]
        if any(element_type(places) == "bool" for places in tensors):
            raise UnsupportedError(
                f"aten.{operator} by a mask has a result whose extents depend on the data; use torch.where or multiply "
                "by the mask"
            )
        together = indexed == list(range(indexed[0], indexed[-1] + 1))
        self.axis = indexed[0] if together else 0
        rest = [axis for axis in range(len(shape)) if axis not in indexed]
        self.front = [*rest[: self.axis], *indexed, *rest[self.axis :]]
        self.shape, self.extents = shape, [shape[axis] for axis in self.front]
        self.rest = (self.extents[: self.axis], self.extents[self.axis + len(indexed) :])
        self.places = _wrapped(importer, tensors[0], shape[indexed[0]])
        for axis, places in zip(indexed[1:], tensors[1:], strict=True):
            scale = relax.const(shape[axis], element_type(self.places))
            more = emit(op.astype(_wrapped(importer, places, shape[axis]), element_type(self.places)))
            self.places = emit(op.add(emit(op.multiply(self.places, scale)), more))
        self.count = int(np.prod([int(shape[axis]) for axis in indexed]))
        self._emit = emit

    def flattened(self, x: relax.Expr) -> relax.Expr:
        """The tensor with the indexed axes as one."""
        if self.front != sorted(self.front):
            x = self._emit(op.permute_dims(x, self.front))
        before, after = self.rest
        wide = [*before, self.count, *after]
        return x if len(wide) == len(self.shape) else self._emit(op.reshape(x, relax.ShapeExpr(wide)))

    def restored(self, x: relax.Expr) -> relax.Expr:
        """The reverse of `flattened`."""
        x = self._emit(op.reshape(x, relax.ShapeExpr(self.extents)))
        return self._emit(op.permute_dims(x, [int(place) for place in np.argsort(self.front)]))


def _index(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """TVM's importer takes an outer product of the places where they belong together, as those of an unfold do."""
    x, given = importer.retrieve_args(node)
    indexing = _Indexing(importer, x, given, "index.Tensor")
    return importer.block_builder.emit(op.take(indexing.flattened(x), indexing.places, indexing.axis))


def _index_put(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    x, given, values, *accumulate = importer.retrieve_args(node)
    emit = importer.block_builder.emit
    mask = given[0]
    if len(given) == 1 and element_type(mask) == "bool" and all(extent == 1 for extent in static_shape(values)):
        return _where_masked(importer, x, mask, values, bool(accumulate and accumulate[0]))
    indexing = _Indexing(importer, x, given, "index_put.default")
    before, after = indexing.rest
    places = static_shape(indexing.places)
    values = emit(op.broadcast_to(values, relax.ShapeExpr([*before, *places, *after])))
    count = int(np.prod([int(extent) for extent in places]))
    values = emit(op.reshape(values, relax.ShapeExpr([*before, count, *after])))
    axis, ndim = indexing.axis, len(before) + 1 + len(after)
    order = [axis, *(other for other in range(ndim) if other != axis)]
    data, values = (emit(op.permute_dims(each, order)) for each in (indexing.flattened(x), values))
    # index_put of TVM wants a place for each axis: everything is one axis here.
    row = int(np.prod([int(extent) for extent in (*before, *after)]))
    dtype = element_type(indexing.places)
    rows = emit(op.reshape(emit(op.multiply(indexing.places, relax.const(row, dtype))), relax.ShapeExpr([count, 1])))
    flat = emit(op.reshape(emit(op.add(rows, relax.const(np.arange(row), dtype))), relax.ShapeExpr([-1])))
    line, written = (emit(op.reshape(each, relax.ShapeExpr([-1]))) for each in (data, values))
    found = emit(op.index_put(line, relax.Tuple([flat]), written, bool(accumulate and accumulate[0])))
    found = emit(op.reshape(found, relax.ShapeExpr(list(static_shape(data)))))
    return indexing.restored(emit(op.permute_dims(found, [int(place) for place in np.argsort(order)])))


def _where_masked(
    importer: ExportedProgramImporter, x: relax.Expr, mask: relax.Expr, value: relax.Expr, accumulate: bool
) -> relax.Expr:
    """x with one value where a mask of its leading axes is true, as `x[mask] = 0`, or with that added there."""
    emit = importer.block_builder.emit
    shape, ndim = static_shape(mask), len(static_shape(x))
    wide = emit(op.reshape(mask, relax.ShapeExpr([*shape, *[1] * (ndim - len(shape))])))
    value = emit(op.reshape(value, relax.ShapeExpr([])))
    return emit(op.where(wide, emit(op.add(x, value)) if accumulate else value, x))


def _scatter_add(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    x, axis, places, values = importer.retrieve_args(node)
    extents = list(static_shape(places))
    if list(static_shape(values)) != extents:
        ones = [1] * len(extents)
        values = importer.block_builder.emit(
            op.strided_slice(values, list(range(len(extents))), [0] * len(extents), extents, ones)
        )
    return importer.block_builder.emit(op.scatter_elements(x, places, values, axis, "add"))


def _reduced(node: torch.fx.Node, importer: ExportedProgramImporter, reduce: Callable[..., relax.Expr]) -> relax.Expr:
    x, *rest = importer.retrieve_args(node)
    axes = rest[0] if rest and rest[0] not in ([], ()) else None
    keep = bool(rest[1]) if len(rest) > 1 else bool(node.kwargs.get("keepdim", False))
    return importer.block_builder.emit(reduce(x, axes, keepdims=keep))


def _convolution(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    x, weight, bias, strides, padding, dilation, transposed, output_padding, groups = importer.retrieve_args(node)
    if not (transposed and len(static_shape(x)) == 5):
        return importer._convolution(node)
    emit = importer.block_builder.emit
    y = emit(
        op.nn.conv3d_transpose(
            x,
            weight,
            strides=strides,
            padding=padding,
            output_padding=output_padding,
            dilation=dilation,
            groups=groups,
            data_layout="NCDHW",
            kernel_layout="IODHW",
        )
    )
    return y if bias is None else emit(op.add(y, emit(op.reshape(bias, (1, -1, 1, 1, 1)))))


def _max_pool(
    node: torch.fx.Node, importer: ExportedProgramImporter, pool: Callable[[torch.fx.Node], relax.Expr]
) -> relax.Expr:
    """A max pool; an empty list of strides, which TVM's importer hands on, stands for the extents of the window."""
    if len(node.args) > 2 and not node.args[2]:
        node.update_arg(2, node.args[1])
    return pool(node)


def _average(
    node: torch.fx.Node, importer: ExportedProgramImporter, pool: Callable[[torch.fx.Node], relax.Expr]
) -> relax.Expr:
    """An average pool; a divisor of its own, which TVM's importer forgets, stands for the number of its elements."""
    divisor = node.args[6] if len(node.args) > 6 else node.kwargs.get("divisor_override")
    if divisor is None:
        return pool(node)
    kernel, *others = node.args[1:6]
    if np.any(others[2]):
        raise UnsupportedError(
            f"aten.{node.target.__name__}: divisor_override={divisor} with ceil_mode is not imported; multiply the "
            "result of a pool without it"
        )
    if len(node.args) > 5:
        node.update_arg(5, True)  # all windows are divided by their number of elements
    pooled = pool(node)
    rank = len(static_shape(pooled)) - 2
    elements = float(np.prod(np.broadcast_to(kernel, rank)))
    return importer.block_builder.emit(op.multiply(pooled, relax.const(elements / divisor, element_type(pooled))))


def _group_norm(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """(output,), with ones and zeros for a weight and a bias that are None."""
    x, weight, bias, _, channels, _, groups, epsilon = importer.retrieve_args(node)
    dtype = element_type(x)
    weight = relax.const(np.ones(int(channels), dtype)) if weight is None else weight
    bias = relax.const(np.zeros(int(channels), dtype)) if bias is None else bias
    axes = list(range(2, len(static_shape(x))))
    return importer.block_builder.emit(op.nn.group_norm(x, weight, bias, groups, 1, axes, epsilon))


def _elu(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    given = [float(number) for number in node.args[1:]]
    return _elu_of(node, importer, *given, *(1.0, 1.0, 1.0)[len(given) :])


def _celu(alpha: float = 1.0) -> tuple[float, float, float]:
    """alpha, scale and input scale of elu."""
    return float(alpha), 1.0, 1.0 / float(alpha)


def _elu_of(
    node: torch.fx.Node, importer: ExportedProgramImporter, alpha: float, scale: float, input_scale: float
) -> relax.Expr:
    """scale·x above 0, scale·alpha·(exp(input_scale·x) − 1) below; exp is not computed of what would overflow."""
    emit, x = importer.block_builder.emit, importer.env[node.args[0]]
    dtype = element_type(x)
    low = emit(op.clip(emit(op.multiply(x, relax.const(input_scale, dtype))), _LOWEST, 0.0))
    low = emit(op.subtract(emit(op.exp(low)), relax.const(1.0, dtype)))
    low = emit(op.multiply(low, relax.const(alpha * scale, dtype)))
    high = x if scale == 1 else emit(op.multiply(x, relax.const(scale, dtype)))
    return emit(op.where(emit(op.greater(x, relax.const(0.0, dtype))), high, low))


def _softplus(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    x, *given = importer.retrieve_args(node)
    beta, threshold = [*(float(number) for number in given), *(1.0, 20.0)[len(given) :]]
    return importer.block_builder.emit(op.nn.softplus(x, beta, threshold))


def _clamp(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Integers are clamped by comparisons: TVM's importer gives them an infinite bound where there is none."""
    x, *given = importer.retrieve_args(node)
    low, high = (given[at] if len(given) > at else node.kwargs.get(name) for at, name in enumerate(("min", "max")))
    emit, dtype = importer.block_builder.emit, element_type(x)
    if "int" not in dtype:
        return importer._clamp(node)
    x = x if low is None else emit(op.maximum(x, relax.const(int(low), dtype)))
    return x if high is None else emit(op.minimum(x, relax.const(int(high), dtype)))


def _divide(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Quotients, rounded down, to zero or not at all."""
    mode = node.kwargs.get("rounding_mode")
    if mode == "floor":
        return _floor_divide(node, importer)
    emit = importer.block_builder.emit
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    inner = dtype if "float" in dtype else "float64"
    quotient = emit(op.divide(*_as(importer, importer.retrieve_args(node), inner)))
    quotient = quotient if mode is None else emit(op.trunc(quotient))
    return quotient if inner == dtype else emit(op.astype(quotient, dtype))


def _quotient(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """x / n for a symbolic extent n, as kl_div(reduction="batchmean") has it, by a sum of n ones; n is below 2**24."""
    emit, (x, divisor) = importer.block_builder.emit, importer.retrieve_args(node)
    if isinstance(divisor, tvm.tirx.Var) and not hasattr(divisor.ty, "shape"):
        return emit(op.divide(x, emit(op.sum(emit(op.ones(relax.ShapeExpr([divisor]), element_type(x)))))))
    return importer._binary_op(op.divide, operator.truediv)(node)


def _as(importer: ExportedProgramImporter, operands: Sequence[Any], dtype: str) -> list[relax.Expr]:
    """Tensors and numbers as tensors of a type."""
    return [
        importer.block_builder.emit(op.astype(operand, dtype))
        if isinstance(operand, relax.Var)
        else relax.const(operand, dtype)
        for operand in operands
    ]


def _nearest(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Places floor(i·in/out) of each axis; TVM's importer rounds where the quotient is no whole number."""
    x = importer.env[node.args[0]]
    before, after = static_shape(x)[2:], tuple(node.meta["val"].shape[2:])
    if all(isinstance(extent, int) and isinstance(new, int) for extent, new in zip(before, after, strict=True)):
        if all(new % extent == 0 for extent, new in zip(before, after, strict=True)):
            return importer._upsample_nearest2d(node)
        scales = node.args[2] if len(node.args) > 2 and node.args[2] else (None, None)
        for axis, (extent, new, scale) in enumerate(zip(before, after, scales, strict=True), 2):
            step = np.float32(1 / scale) if scale else np.float32(extent) / np.float32(new)
            places = np.minimum(np.floor(np.arange(new, dtype="float32") * step), extent - 1).astype("int64")
            x = importer.block_builder.emit(op.take(x, relax.const(places, "int64"), axis))
        return x
    raise UnsupportedError("aten.upsample_nearest2d.vec needs fixed extents; export with a dynamic batch only")


def _separable(node: torch.fx.Node, importer: ExportedProgramImporter, mode: str) -> relax.Expr:
    """A linear resize, an axis at a time: the products with what PyTorch makes of the unit matrices."""
    import torch  # optional; loaded, since there is a node

    emit, x = importer.block_builder.emit, importer.env[node.args[0]]
    aligned = bool(node.args[2])
    for axis, new in zip((2, 3), node.meta["val"].shape[2:], strict=True):
        extent = static_shape(x)[axis]
        unit = torch.eye(extent, dtype=torch.float64)[None, None]
        weights = torch.nn.functional.interpolate(
            unit, (int(new), extent), mode=mode, align_corners=aligned, antialias=True
        )[0, 0]
        if axis == 2:
            x = emit(op.matmul(relax.const(weights.numpy(), element_type(x)), x))
        else:
            x = emit(op.matmul(x, relax.const(weights.T.contiguous().numpy(), element_type(x))))
    return x


def _floor_divide(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Operands of different types, or numbers, brought to the type of the result."""
    emit, operands = importer.block_builder.emit, importer.retrieve_args(node)
    if not any(isinstance(operand, relax.Expr) and hasattr(operand.ty, "shape") for operand in operands):
        return operands[0] // operands[1]
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    return emit(op.floor_divide(*_as(importer, operands, dtype)))
