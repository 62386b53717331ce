# SPDX-License-Identifier: Apache-2.0
"""TVM's own offload to CUTLASS (`relay.op.contrib.cutlass`) with the operators of this package.

TVM's patterns and code generator know dgrad as nn.conv2d_transpose, which its own gradient of nn.conv2d makes. Here
nn.conv2d_backward_data is turned into it where CUTLASS takes it, and wgrads that the generator would compute wrongly
are kept from it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import tvm
from tvm import relay
from tvm.relay.dataflow_pattern import DFPattern
from tvm.relay.op import contrib
from tvm.relay.op.contrib import cutlass

from relay_ops.ir import PREFIX, attributes_of, problem_of, types_of
from relay_ops.layout import ConvertLayout
from relay_ops.simplify import rewrite_calls
from tvm_convgrad.core.arguments import integers
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, OpEntry
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import flat_padding

DATA, WEIGHT = OpEntry(BACKWARD_DATA, 2), OpEntry(BACKWARD_WEIGHT, 2)
WEIGHT_PATTERN = "cutlass.conv2d_backward_weight"
Check = Callable[[relay.Call], bool]
Partition = Callable[..., tvm.IRModule]


def data_gradients_as_transposed() -> tvm.transform.Pass:
    """A pass: nn.conv2d_backward_data becomes TVM's nn.conv2d_transpose where CUTLASS takes that."""

    @relay.transform.function_pass(opt_level=0, name="tvm_convgrad.DataGradientsAsTransposed")
    def rewrite(function: relay.Function, module: tvm.IRModule, context: tvm.transform.PassContext) -> relay.Function:
        return rewrite_calls(function, {PREFIX + DATA.name: _transposed})

    infer = relay.transform.InferType()
    return tvm.transform.Sequential([infer, rewrite, infer])


def prepare_for_cutlass(module: tvm.IRModule) -> tvm.IRModule:
    """The module with its dgrads as TVM's CUTLASS patterns want them.

    Of a module whose convolutions are NHWC, dgrads in other layouts are converted first: a list of layouts that was
    written for TVM's own gradient names nn.conv2d_transpose for them, not nn.conv2d_backward_data.
    """
    seen: dict[str, set[str]] = {}

    def visit(node: relay.Expr) -> None:
        if isinstance(node, relay.Call) and isinstance(node.op, tvm.ir.Op):
            name = str(node.op.name)
            if name in (f"{PREFIX}conv2d", PREFIX + DATA.name, PREFIX + WEIGHT.name):
                seen.setdefault(name, set()).add(str(node.attrs.data_layout))

    for function in module.functions.values():
        if isinstance(function, relay.Function):
            relay.analysis.post_order_visit(function, visit)
    if PREFIX + DATA.name not in seen:
        return module
    own = seen.pop(PREFIX + DATA.name)
    if own != {"NHWC"} and any("NHWC" in layouts for layouts in seen.values()):
        module = ConvertLayout({PREFIX + DATA.name: ["NHWC", "OHWI"]})(relay.transform.InferType()(module))
    return data_gradients_as_transposed()(module)


def register_cutlass() -> None:
    """Put the checked wgrad into TVM's pattern table "cutlass", and `prepare_for_cutlass` before its partition."""
    table = list(contrib.get_pattern_table("cutlass"))
    contrib.register_pattern_table("cutlass", lambda: [_guarded(*entry) for entry in table])
    prepared = _prepared(cutlass.partition_for_cutlass)
    for module in (cutlass, contrib):
        module.partition_for_cutlass = prepared


def refuses_data(attrs: tvm.ir.Attrs) -> str | None:
    """Why TVM's CUTLASS patterns cannot take a conv2d_backward_data with these attributes, or None."""
    stated = attributes_of(DATA, attrs)
    layouts = (stated.grad_layout, stated.data_layout, stated.kernel_layout)
    if layouts != ("NHWC", "NHWC", "OHWI"):
        return f"layouts are {', '.join(layouts)} of grad, data and weight; TVM's pattern takes NHWC, NHWC, OHWI"
    if stated.groups != 1:
        return f"groups is {stated.groups}; TVM's generator of CUTLASS kernels ignores groups"
    if any(step != 1 for step in stated.dilation):
        return f"dilation is {stated.dilation}; nn.conv2d_transpose serves none in TVM"
    return None


def refuses_weight(attrs: tvm.ir.Attrs) -> str | None:
    """Why TVM's generator of CUTLASS kernels would compute a conv2d_backward_weight with these attributes wrongly."""
    stated = attributes_of(WEIGHT, attrs)
    if stated.groups != 1:
        return f"groups is {stated.groups}; TVM's generator of CUTLASS kernels ignores groups"
    if stated.kernel_layout != "OHWI":
        return f"the result's layout is {stated.kernel_layout}; CUTLASS writes OHWI"
    return None


def _transposed(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
    try:
        problem = problem_of(call.op, call.attrs, types_of(call))
    except ConvGradError:  # Not static, or no such convolution: nothing that CUTLASS could take.
        return None
    if refuses_data(call.attrs) is not None:
        return None
    return relay.nn.conv2d_transpose(
        *operands,
        channels=problem.in_channels,
        kernel_size=problem.kernel,
        strides=problem.strides,
        padding=flat_padding(problem.padding),
        output_padding=integers(call.attrs.output_padding),
        data_layout="NHWC",
        kernel_layout="IHWO",  # The transposed convolution's input channels are the convolution's O.
        out_dtype=str(call.checked_type.dtype),
    )


def _guarded(name: str, pattern: DFPattern, check: Check = lambda call: True) -> tuple[str, DFPattern, Check]:
    """An entry of TVM's pattern table; that of wgrad with `refuses_weight` before its own check."""
    if name != WEIGHT_PATTERN:
        return name, pattern, check
    return name, pattern, lambda call: refuses_weight(call.attrs) is None and check(call)


def _prepared(stock: Partition) -> Partition:
    @functools.wraps(stock)
    def partition_for_cutlass(mod: tvm.IRModule, params: dict[str, tvm.nd.NDArray] | None = None) -> tvm.IRModule:
        return stock(prepare_for_cutlass(mod), params)

    return partition_for_cutlass
