# SPDX-License-Identifier: Apache-2.0
"""Layout conversion in Relay: FInferCorrectLayout and FTVMConvertOpLayout of the six operators, and a pass.

In the argument of relay.transform.ConvertLayout an entry reads as one of a stock convolution does, and as upstream's of
nn.conv2d_backward_weight: first the layout of the data and of grad, then that of the kernel; an optional third one is
grad's, if it differs from the data's.

    {"nn.conv2d": ["NHWC", "OHWI"], "nn.conv2d_backward_weight": ["NHWC", "OHWI"],
     "nn.conv2d_backward_data": ["NHWC", "OHWI"]}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relay
from tvm.relay.transform.infer_layout_utils import InferCorrectLayoutOutput

from relay_ops.ir import PREFIX, attributes_of, call_of, problem_of
from relay_ops.simplify import Rule, rewrite_calls, shape_of, simplify_gradients
from tvm_convgrad.core.arguments import desired_layouts
from tvm_convgrad.core.catalogue import NEW_OPS, OpEntry


def ConvertLayout(desired: dict[str, list[str]]) -> tvm.transform.Pass:
    """relay.transform.ConvertLayout for gradients: layout_transforms stay at the borders of the graph only.

    Runs at any opt_level. Before the conversion it simplifies gradients (relay_ops.simplify). After it,
    layout_transforms that undo each other go, and those that move axes of one element only become reshapes.

    Args:
        desired: layouts by operator, as relay.transform.ConvertLayout takes them.
    """

    @relay.transform.function_pass(opt_level=0, name="tvm_convgrad.FoldLayoutTransforms")
    def fold(function: relay.Function, module: tvm.IRModule, context: tvm.transform.PassContext) -> relay.Function:
        return rewrite_calls(function, _FOLDING)

    infer = relay.transform.InferType()
    passes = (simplify_gradients(), relay.transform.ConvertLayout(desired), infer, fold, infer)

    @tvm.transform.module_pass(opt_level=0, name="tvm_convgrad.ConvertLayout")
    def convert(module: tvm.IRModule, context: tvm.transform.PassContext) -> tvm.IRModule:
        for each in passes:  # not a Sequential, which leaves out what is above the context's opt_level
            module = each(module)
        return module

    return convert


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


def _fold(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
    """A layout_transform together with the one that it follows, in the fewest operators."""
    source, target, value = str(call.attrs.src_layout), str(call.attrs.dst_layout), operands[0]
    if not (source.isupper() and target.isupper()):
        return None
    shape = shape_of(call.args[0])
    order = [source.index(letter) for letter in target]
    if _is_call(value, "layout_transform"):
        first, second = str(value.attrs.src_layout), str(value.attrs.dst_layout)
        if first.isupper() and second.isupper():
            # Axes of the first one's operand, in the order of the result.
            order = [first.index(second[axis]) for axis in order]
            shape = tuple(shape[second.index(letter)] for letter in first)
            value = value.args[0]
    if order == sorted(order):
        return value
    if [axis for axis in order if shape[axis] != 1] == [axis for axis in sorted(order) if shape[axis] != 1]:
        while _is_call(value, "expand_dims") or _is_call(value, "reshape"):
            value = value.args[0]
        return relay.reshape(value, shape_of(call))
    if value is operands[0]:
        return None
    letters = str(operands[0].attrs.src_layout)
    return relay.layout_transform(value, letters, "".join(letters[axis] for axis in order))


def _is_call(value: relay.Expr, name: str) -> bool:
    return isinstance(value, relay.Call) and isinstance(value.op, tvm.ir.Op) and str(value.op.name) == name


_FOLDING: dict[str, Rule] = {"layout_transform": _fold}
