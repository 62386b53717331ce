# SPDX-License-Identifier: Apache-2.0
"""Typed attributes of the six operators, as TVM objects: printed, parsed, compared and saved with the program."""

from __future__ import annotations

import tvm
from tvm_ffi.dataclasses import py_class


@py_class("relax.attrs.ConvBackwardWeightAttrs", frozen=True, structural_eq="tree")
class ConvBackwardWeightAttrs(tvm.ir.Attrs):
    """Attributes of conv{1,2,3}d_backward_weight; padding is flat, all low sides before all high sides."""

    kernel_size: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    grad_layout: str
    data_layout: str
    kernel_layout: str
    out_dtype: str


@py_class("relax.attrs.ConvBackwardDataAttrs", frozen=True, structural_eq="tree")
class ConvBackwardDataAttrs(tvm.ir.Attrs):
    """Attributes of conv{1,2,3}d_backward_data; the shape of the data is an argument, so that it may be symbolic."""

    strides: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    grad_layout: str
    data_layout: str
    kernel_layout: str
    out_dtype: str


ATTRS = {"backward_weight": ConvBackwardWeightAttrs, "backward_data": ConvBackwardDataAttrs}
"""The attribute class of each direction."""
