# SPDX-License-Identifier: Apache-2.0
"""Layout conversion of the six operators in Relay: FInferCorrectLayout and FTVMConvertOpLayout.

In the argument of relay.transform.ConvertLayout an entry reads as one of a stock convolution does, and as upstream's of
nn.conv2d_backward_weight: first the layout of the data and of grad, then that of the kernel; an optional third one is
grad's, if it differs from the data's.

    {"nn.conv2d": ["NHWC", "OHWI"], "nn.conv2d_backward_weight": ["NHWC", "OHWI"],
     "nn.conv2d_backward_data": ["NHWC", "OHWI"]}
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm.relay.transform.infer_layout_utils import InferCorrectLayoutOutput

from relay_ops.ir import PREFIX, attributes_of, call_of, problem_of
from tvm_convgrad.core.arguments import desired_layouts
from tvm_convgrad.core.catalogue import NEW_OPS, OpEntry


def infer_rules() -> dict[str, Callable[..., Any]]:
    """FInferCorrectLayout by operator: the layouts in the attributes of a call."""
    return {PREFIX + entry.name: _infer_rule(entry) for entry in NEW_OPS}


def convert_rules() -> dict[str, Callable[..., Any]]:
    """FTVMConvertOpLayout by operator: the same call in the desired layouts."""
    return {PREFIX + entry.name: _convert_rule(entry) for entry in NEW_OPS}


def _infer_rule(entry: OpEntry) -> Callable[..., Any]:
    def infer(attrs: tvm.ir.Attrs, new_in_layouts: Any, old_in_layouts: Any, old_in_types: Any) -> Any:
        attributes = attributes_of(entry, attrs)
        layouts = [
            tvm.tir.layout(attributes.layout(tensor)) for tensor in (*entry.direction.operands, entry.direction.result)
        ]
        return InferCorrectLayoutOutput(layouts[:2], layouts[2:], attrs)

    return infer


def _convert_rule(entry: OpEntry) -> Callable[..., Any]:
    op = tvm.ir.Op.get(PREFIX + entry.name)

    def convert(attrs: tvm.ir.Attrs, inputs: Any, tensors: Any, desired: Any) -> Any:
        wanted = [str(layout) for layout in desired]
        types = [tvm.relay.TensorType(tensor.shape, tensor.dtype) for tensor in list(tensors)[:2]]
        problem = problem_of(op, attrs, types)
        now = (problem.data_layout, problem.kernel_layout, problem.grad_layout)
        layouts = desired_layouts(str(op.name), entry.rank, wanted, now)
        return call_of(entry.direction, problem.with_layouts(*layouts), inputs[0], inputs[1])

    return convert
