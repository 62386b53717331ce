# SPDX-License-Identifier: Apache-2.0
"""Batch, group and layer norms, with the statistics that they return beside the result."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.frontends.torch_export.places import name_of
from tvm_convgrad.training.ir.counting import count_of
from tvm_convgrad.training.ir.graph import element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter


def batch_norm_training(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """(output, saved mean, saved deviation, new running mean, new running variance)."""
    result = importer._batch_norm(node, training=True, return_tuple=True)
    emit = importer.block_builder.emit
    output, mean, variance = (emit(relax.TupleGetItem(result, index)) for index in range(3))
    return emit(relax.Tuple([output, mean, variance, mean, variance]))


def group_norm(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The result alone, or (result, means, reciprocal deviations of the groups) if those are used.

    Weight and bias that are None stand for ones and zeros.
    """
    x, weight, bias, _, channels, _, groups, epsilon = importer.retrieve_args(node)
    dtype = element_type(x)
    weight = relax.const(np.ones(int(channels), dtype)) if weight is None else weight
    bias = relax.const(np.zeros(int(channels), dtype)) if bias is None else bias
    emit, shape = importer.block_builder.emit, static_shape(x)
    result = emit(op.nn.group_norm(x, weight, bias, groups, 1, list(range(2, len(shape))), epsilon))
    if not _has_used_statistics(node):
        return result
    parts = emit(op.reshape(x, relax.ShapeExpr([shape[0], groups, -1])))
    return emit(relax.Tuple([result, *_statistics(importer, parts, [2], epsilon, keepdims=False)]))


def layer_norm(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The result alone, or (result, means, reciprocal deviations) if those are used, which have no gradient."""
    result = importer._native_layer_norm(node)
    if not _has_used_statistics(node):
        return result
    x, normalized, *_, epsilon = importer.retrieve_args(node)
    axes = list(range(-len(normalized), 0))
    emit = importer.block_builder.emit
    statistics = _statistics(importer, emit(op.grad.no_grad(x)), axes, epsilon, keepdims=True)
    return emit(relax.Tuple([result, *statistics]))


def variance(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The sum of squared deviations by the count less the correction, 1 unless given; the count may be symbolic."""
    x, *rest = importer.retrieve_args(node)
    shape, emit, dtype = static_shape(x), importer.block_builder.emit, element_type(x)
    given = rest[0] if rest else node.kwargs.get("dim")
    axes = [int(axis) % len(shape) for axis in given] if given else list(range(len(shape)))
    if all(isinstance(shape[axis], int) for axis in axes):
        return importer._var_correction(node)
    correction, keepdims = node.kwargs.get("correction"), bool(node.kwargs.get("keepdim", False))
    centred = emit(op.subtract(x, emit(op.mean(x, axes, keepdims=True))))
    total = emit(op.sum(emit(op.multiply(centred, centred)), axes, keepdims=keepdims))
    left = op.subtract(
        count_of(importer.block_builder, x, axes), relax.const(1.0 if correction is None else correction, dtype)
    )
    return emit(op.divide(total, emit(op.maximum(emit(left), relax.const(0.0, dtype)))))


def _has_used_statistics(node: torch.fx.Node) -> bool:
    """Whether the graph reads another result of a norm than the first, which TVM's importer knows alone."""
    return any(name_of(user) == "getitem" and user.args[1] > 0 and user.users for user in node.users)


def _statistics(
    importer: ExportedProgramImporter, x: relax.Expr, axes: list[int], epsilon: float, *, keepdims: bool
) -> tuple[relax.Expr, relax.Expr]:
    """Means over axes, and 1 / sqrt(variance + epsilon)."""
    emit = importer.block_builder.emit
    centred = emit(op.subtract(x, emit(op.mean(x, axes, keepdims=True))))
    variance = emit(op.mean(emit(op.multiply(centred, centred)), axes, keepdims=keepdims))
    deviation = emit(op.add(variance, relax.const(epsilon, element_type(x))))
    return emit(op.mean(x, axes, keepdims=keepdims)), emit(op.rsqrt(deviation))


__all__ = ["batch_norm_training", "group_norm", "layer_norm", "variance"]
