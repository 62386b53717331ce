# SPDX-License-Identifier: Apache-2.0
"""Translations of PyTorch's operators to Relax that replace those of TVM's importer, or that it lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from tvm import relax
from tvm.relax import op

from relax_ops.by_mode import by_mode
from relax_ops.rules.near_zero import erfc, expm1, log1p
from tvm_convgrad.training.frontends.activations import bounded, elu
from tvm_convgrad.training.frontends.torch_export.dropout import BY_MODE, STOP_GRADIENT
from tvm_convgrad.training.frontends.torch_export.operators.arithmetic import (
    clamp,
    clamp_by_tensors,
    differs,
    divide,
    equals,
    floor_divide,
    is_any,
    or_logical,
    reversed_difference,
)
from tvm_convgrad.training.frontends.torch_export.operators.convolutions import convolution
from tvm_convgrad.training.frontends.torch_export.operators.extents import EXTENT, extent
from tvm_convgrad.training.frontends.torch_export.operators.fourier import WAVES, waves
from tvm_convgrad.training.frontends.torch_export.operators.indexing import (
    embedding,
    index,
    index_put,
    index_select,
    part,
    select,
    triangle,
    written_part,
)
from tvm_convgrad.training.frontends.torch_export.operators.norms import (
    batch_norm_training,
    group_norm,
    layer_norm,
    variance,
)
from tvm_convgrad.training.frontends.torch_export.operators.pools import average_pool, max_pool
from tvm_convgrad.training.frontends.torch_export.operators.products import added_product, batched_product, product
from tvm_convgrad.training.frontends.torch_export.operators.repeats import NUMBERS, numbers
from tvm_convgrad.training.frontends.torch_export.operators.resize import RESIZES, resize
from tvm_convgrad.training.frontends.torch_export.operators.scatter import (
    as_strided,
    as_strided_scatter,
    index_reduce,
    scatter,
    scatter_add,
    scatter_reduce,
)
from tvm_convgrad.training.frontends.torch_export.places import type_name
from tvm_convgrad.training.ir.graph import element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

    Convert: TypeAlias = Callable[[torch.fx.Node, ExportedProgramImporter], relax.Expr]


def converters() -> dict[str, Convert]:
    """The translations, by operator."""
    return {
        "dropout.default": _dropout,
        "native_dropout.default": _native_dropout,
        "_native_batch_norm_legit_functional.default": batch_norm_training,
        STOP_GRADIENT: lambda node, importer: importer.block_builder.emit(op.grad.no_grad(importer.env[node.args[0]])),
        BY_MODE: lambda node, importer: importer.block_builder.emit(
            by_mode(*(importer.env[each] for each in node.args))
        ),
        WAVES: waves,
        NUMBERS: numbers,
        EXTENT: extent,
        "select.int": select,
        "slice.Tensor": part,
        "slice_scatter.default": written_part,
        "index.Tensor": index,
        "index_select.default": index_select,
        "index_put.default": index_put,
        "embedding.default": embedding,
        "scatter.src": scatter,
        "scatter_add.default": scatter_add,
        "scatter_reduce.two": scatter_reduce,
        "scatter.reduce": scatter_reduce,
        "index_reduce.default": index_reduce,
        "as_strided.default": as_strided,
        "as_strided_scatter.default": as_strided_scatter,
        "argmax.default": lambda node, importer: _place(node, importer, importer._argmax_argmin(op.argmax)),
        "argmin.default": lambda node, importer: _place(node, importer, importer._argmax_argmin(op.argmin)),
        "amax.default": lambda node, importer: _reduced(node, importer, op.max),
        "amin.default": lambda node, importer: _reduced(node, importer, op.min),
        "ne.Tensor": differs,
        "ne.Scalar": differs,
        "eq.Tensor": equals,
        "any.default": is_any,
        "any.dim": is_any,
        "any.dims": is_any,
        "cat.default": _concat,
        "squeeze.default": _squeeze,
        "squeeze.dim": _squeeze,
        "squeeze.dims": _squeeze,
        "add.Tensor": lambda node, importer: or_logical(node, importer, op.add, op.logical_or),
        "mul.Tensor": lambda node, importer: or_logical(node, importer, op.multiply, op.logical_and),
        "rsub.Tensor": reversed_difference,
        "rsub.Scalar": reversed_difference,
        "mm.default": product,
        "addmm.default": added_product,
        "bmm.default": batched_product,
        "convolution.default": convolution,
        "triu_indices.default": lambda node, _importer: triangle(node, np.triu_indices),
        "tril_indices.default": lambda node, _importer: triangle(node, np.tril_indices),
        "native_group_norm.default": group_norm,
        "native_layer_norm.default": layer_norm,
        "var.correction": variance,
        "hardtanh.default": _hardtanh,
        "elu.default": _elu,
        "celu.default": _celu,
        "log1p.default": _of_one(log1p),
        "expm1.default": _of_one(expm1),
        "erfc.default": _of_one(erfc),
        "softplus.default": _softplus,
        "clamp.default": clamp,
        "clamp.Tensor": clamp_by_tensors,
        "floor_divide.default": floor_divide,
        "div.Tensor_mode": divide,
        **{f"{name}.{overload}": resize for name in RESIZES for overload in ("vec", "default")},
        "max_pool2d.default": lambda node, importer: max_pool(node, importer, importer._max_pool2d),
        "max_pool3d.default": lambda node, importer: max_pool(node, importer, importer._max_pool3d),
        "max_pool2d_with_indices.default": lambda node, importer: max_pool(
            node, importer, importer._max_pool2d_with_indices
        ),
        "max_pool3d_with_indices.default": lambda node, importer: max_pool(
            node, importer, importer._max_pool3d_with_indices
        ),
        "avg_pool2d.default": lambda node, importer: average_pool(node, importer, importer._avg_pool2d),
        "avg_pool3d.default": lambda node, importer: average_pool(node, importer, importer._avg_pool3d),
    }


def _dropout(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    data, rate = importer.env[node.args[0]], float(node.args[1])
    return importer.block_builder.emit(_dropped(importer, data, rate)[0])


def _native_dropout(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    return _dropped(importer, importer.env[node.args[0]], float(node.args[1]))


def _dropped(importer: ExportedProgramImporter, data: relax.Expr, rate: float) -> relax.Expr:
    return importer.block_builder.emit(op.nn.dropout(data, rate))


def _reduced(node: torch.fx.Node, importer: ExportedProgramImporter, reduce: Callable[..., relax.Expr]) -> relax.Expr:
    x, *rest = importer.retrieve_args(node)
    axes = rest[0] if rest and rest[0] not in ([], ()) else None
    keep = bool(rest[1]) if len(rest) > 1 else bool(node.kwargs.get("keepdim", False))
    return importer.block_builder.emit(reduce(x, axes, keepdims=keep))


def _squeeze(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """Without the axes of one element, or those of them that are named; a free extent is not one."""
    x, *given = importer.retrieve_args(node)
    shape = static_shape(x)
    named = given[0] if given else node.kwargs.get("dim", node.kwargs.get("dims"))
    axes = range(len(shape)) if named is None else [named] if isinstance(named, int) else named
    wanted = sorted({int(axis) % len(shape) for axis in axes}) if shape else []
    ones = [axis for axis in wanted if isinstance(shape[axis], int) and shape[axis] == 1]
    return importer.block_builder.emit(op.squeeze(x, ones)) if ones else x


def _concat(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The concatenation of tensors; those without elements, of which TVM keeps no constants, are omitted."""
    given, *axis = importer.retrieve_args(node)
    filled = [tensor for tensor in given if 0 not in static_shape(tensor)]
    if len(filled) in (0, len(given)):
        return importer._cat(node)
    return importer.block_builder.emit(op.concat(filled, axis[0] if axis else node.kwargs.get("dim", 0)))


def _place(
    node: torch.fx.Node, importer: ExportedProgramImporter, convert: Callable[[torch.fx.Node], relax.Expr]
) -> relax.Expr:
    """The index of an extremum; where no element is finite, TVM's is -1 and PyTorch's the first."""
    found = convert(node)
    return importer.block_builder.emit(op.maximum(found, relax.const(0, element_type(found))))


def _elu(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    given = [float(number) for number in node.args[1:]]
    return elu(importer.block_builder, importer.env[node.args[0]], *given)


def _hardtanh(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The bounds of x, with no gradient on them, where torch.clamp has one."""
    x, *given = importer.retrieve_args(node)
    bounds = [*given, *(-1.0, 1.0)[len(given) :]]
    low, high = float(node.kwargs.get("min_val", bounds[0])), float(node.kwargs.get("max_val", bounds[1]))
    return bounded(importer.block_builder, x, low, high)


def _celu(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    alpha = float(node.args[1]) if len(node.args) > 1 else 1.0
    return elu(importer.block_builder, importer.env[node.args[0]], alpha, 1.0, 1.0 / alpha)


def _of_one(make: Callable[[relax.Expr], relax.Call]) -> Convert:
    """An operator of one tensor; of integers it is that of the result's type, as in PyTorch."""

    def convert(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
        emit, x = importer.block_builder.emit, importer.env[node.args[0]]
        dtype = type_name(node.meta["val"].dtype)
        return emit(make(x if element_type(x) == dtype else emit(op.astype(x, dtype))))

    return convert


def _softplus(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    x, *given = importer.retrieve_args(node)
    beta, threshold = [*(float(number) for number in given), *(1.0, 20.0)[len(given) :]]
    return importer.block_builder.emit(op.nn.softplus(x, beta, threshold))
