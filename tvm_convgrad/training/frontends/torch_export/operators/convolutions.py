# SPDX-License-Identifier: Apache-2.0
"""Convolutions. TVM's importer lacks transposed ones of rank 3, output padding as wide as the stride, and float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tvm import relax
from tvm.relax import op

from tvm_convgrad.training.ir.graph import element_type, static_shape

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

_PLAIN = {1: op.nn.conv1d, 2: op.nn.conv2d, 3: op.nn.conv3d}
_TRANSPOSED = {1: op.nn.conv1d_transpose, 2: op.nn.conv2d_transpose, 3: op.nn.conv3d_transpose}


def convolution(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """A convolution or a transposed one, with a bias or None.

    Output padding extends the result at its end. What is added is first what the padding crops there, then zeros.
    """
    x, weight, bias, strides, padding, dilation, transposed, output_padding, groups = importer.retrieve_args(node)
    rank = len(static_shape(x)) - 2
    low, steps, more = (_each(given, rank) for given in (padding, strides, output_padding))
    is_wide = any(extent >= step for extent, step in zip(more, steps, strict=True))
    is_double = element_type(x) == "float64"
    if not is_double and (not transposed or (rank < 3 and not is_wide)):
        return importer._convolution(node)
    emit, space = importer.block_builder.emit, "DHW"[-rank:]
    if not transposed:
        y = emit(
            _PLAIN[rank](
                x,
                weight,
                strides=steps,
                padding=[*low, *low],
                dilation=_each(dilation, rank),
                groups=groups,
                data_layout=f"NC{space}",
                kernel_layout=f"OI{space}",
            )
        )
        return _biased(importer, y, bias)
    zeros = [0] * rank
    high = low
    if is_wide:
        zeros = [max(extent - cropped, 0) for extent, cropped in zip(more, low, strict=True)]
        high = [max(cropped - extent, 0) for extent, cropped in zip(more, low, strict=True)]
        more = [0] * rank
    y = emit(
        _TRANSPOSED[rank](
            x,
            weight,
            strides=steps,
            padding=[*low, *high],
            output_padding=more,
            dilation=_each(dilation, rank),
            groups=groups,
            data_layout=f"NC{space}",
            kernel_layout=f"IO{space}",
        )
    )
    if any(zeros):
        y = emit(op.nn.pad(y, [0] * 4 + [width for after in zeros for width in (0, after)]))
    return _biased(importer, y, bias)


def _biased(importer: ExportedProgramImporter, y: relax.Expr, bias: relax.Expr | None) -> relax.Expr:
    """A tensor plus a number for each channel."""
    if bias is None:
        return y
    emit, rank = importer.block_builder.emit, len(static_shape(y)) - 2
    return emit(op.add(y, emit(op.reshape(bias, (1, -1, *[1] * rank)))))


def _each(given: Sequence[int], rank: int) -> list[int]:
    """One number for each axis, of a list that may have one for all."""
    return [*given] * (rank // len(given))


__all__ = ["convolution"]
