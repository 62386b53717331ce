# SPDX-License-Identifier: Apache-2.0
"""What TVM decides about convolutions, as JSON: once without this package, once with it (test_beside_stock.py).

Nothing here is of this package, so that a process of stock TVM can run it:

    TVM_DEVICE_BACKEND_AUTOLOAD=0 python tests/relay_ops/stock_facts.py
"""

from __future__ import annotations

import json
from typing import Any

import tvm
from tvm import relay
from tvm.relay.op.contrib.cutlass import partition_for_cutlass

TARGETS = (
    "llvm",
    "llvm -mcpu=skylake-avx512",
    "llvm -device=arm_cpu -mtriple=aarch64-linux-gnu -mattr=+neon",
    "c",
    "cuda -arch=sm_80",
    "cuda -arch=sm_80 -libs=cudnn",
    "rocm -mcpu=gfx900 -mtriple=amdgcn-amd-amdhsa-hcc",
    "rocm -mcpu=gfx900 -mtriple=amdgcn-amd-amdhsa-hcc -libs=miopen",
    "opencl",
    "opencl -device=mali",
    "opencl -device=adreno",
    "opencl -device=intel_graphics",
    "vulkan",
    "metal",
    "webgpu",
    "hexagon -mcpu=hexagonv68 -mtriple=hexagon",
    "aocl",
    "sdaccel",
)
"""Of every kind that TVM registers strategies of convolutions for."""

LAYOUTS = {
    "nn.conv2d": ["NHWC", "OHWI"],
    "nn.conv2d_transpose": ["NHWC", "IHWO"],
    "nn.conv2d_backward_weight": ["NHWC", "OHWI"],
}
"""As a program lists them that was written for TVM's own gradient of nn.conv2d."""


def calls() -> dict[str, relay.Call]:
    """A call of each stock convolution, and of wgrad in the two layouts that cuDNN takes."""
    found = {}
    for rank in (1, 2, 3):
        x = relay.var("x", shape=(2, 8) + (8,) * rank)
        forward = getattr(relay.nn, f"conv{rank}d")
        w = relay.var("w", shape=(16, 8) + (3,) * rank)
        found[f"conv{rank}d"] = forward(x, w, channels=16, kernel_size=(3,) * rank)
        w = relay.var("w", shape=(8, 16) + (3,) * rank)
        found[f"conv{rank}d_transpose"] = getattr(relay.nn, f"conv{rank}d_transpose")(
            x, w, channels=16, kernel_size=(3,) * rank
        )
    x, w = relay.var("x", shape=(2, 8, 8, 8)), relay.var("w", shape=(3, 3, 8, 16))
    found["conv2d NHWC"] = relay.nn.conv2d(
        x, w, channels=16, kernel_size=(3, 3), data_layout="NHWC", kernel_layout="HWIO"
    )
    depthwise = relay.var("w", shape=(8, 1, 3, 3))
    found["conv2d depthwise"] = relay.nn.conv2d(x, depthwise, channels=8, groups=8, kernel_size=(3, 3))
    grad, narrow = relay.var("grad", shape=(2, 16, 6, 6)), {"channels": 16, "kernel_size": (3, 3)}
    found["wgrad"] = relay.nn.conv2d_backward_weight(grad, x, **narrow)
    return found


def strategy(call: relay.Call, target: str) -> list[tuple[int, str]] | str:
    """(priority, name) of every implementation that the operator has for the target, the best first."""
    typed = relay.transform.InferType()(tvm.IRModule.from_expr(call))["main"].body
    inputs = [tvm.te.placeholder(a.checked_type.shape, a.checked_type.dtype, f"p{i}") for i, a in enumerate(typed.args)]
    with tvm.target.Target(target) as current:
        try:
            found = typed.op.get_attr("FTVMStrategy")(typed.attrs, inputs, typed.checked_type, current)
        except (RuntimeError, AssertionError) as error:
            return f"raises {type(error).__name__}: {str(error).partition('.')[0]}"
    implementations = [each for specialized in found.specializations for each in specialized.implementations]
    return sorted(((int(each.plevel), str(each.name)) for each in implementations), reverse=True)


def step(groups: int = 1) -> tvm.IRModule:
    """The gradients of a strided convolution."""
    x, w = relay.var("x", shape=(2, 8, 10, 10)), relay.var("w", shape=(16, 8 // groups, 3, 3))
    attributes: dict[str, Any] = {"channels": 16, "kernel_size": (3, 3), "padding": (1, 1), "strides": (2, 2)}
    forward = relay.Function([x, w], relay.nn.conv2d(x, w, groups=groups, **attributes))
    passes = (
        relay.transform.InferType(),
        relay.transform.FirstOrderGradient(),
        relay.transform.InferType(),
        relay.transform.ToGraphNormalForm(),
        relay.transform.InferType(),
    )
    with tvm.transform.PassContext(opt_level=3):
        return tvm.transform.Sequential(passes)(tvm.IRModule.from_expr(forward))


def cutlass_regions(module: tvm.IRModule) -> list[tuple[str, str]]:
    """(pattern, type) of what TVM's partition gives to CUTLASS."""
    found = []

    def visit(node: relay.Expr) -> None:
        if isinstance(node, relay.Function) and node.attrs is not None and "Composite" in node.attrs:
            found.append((str(node.attrs["Composite"]), str(node.ret_type)))

    for function in partition_for_cutlass(module).functions.values():
        relay.analysis.post_order_visit(function, visit)
    return sorted(found)


def in_layouts(module: tvm.IRModule, layouts: dict[str, list[str]]) -> tvm.IRModule:
    """The module after relay.transform.ConvertLayout."""
    with tvm.transform.PassContext(opt_level=3):
        return tvm.transform.Sequential([relay.transform.ConvertLayout(layouts)])(module)


def narrow_types(module: tvm.IRModule) -> dict[str, list[str]]:
    """Types of the results of convolutions after relay.transform.ToMixedPrecision, by operator."""
    found: dict[str, list[str]] = {}

    def visit(node: relay.Expr) -> None:
        if isinstance(node, relay.Call) and isinstance(node.op, tvm.ir.Op) and "conv" in str(node.op.name):
            found.setdefault(str(node.op.name), []).append(str(node.checked_type.dtype))

    passes = (relay.transform.ToMixedPrecision("float16"), relay.transform.InferType())
    with tvm.transform.PassContext(opt_level=3):
        relay.analysis.post_order_visit(tvm.transform.Sequential(passes)(module)["main"], visit)
    return found


def has_layout_rule(name: str) -> bool:
    """Whether ConvertLayout goes through the operator."""
    return tvm.ir.Op.get(name).get_attr("FInferCorrectLayout") is not None


def facts() -> dict[str, Any]:
    """All of it, as JSON has it."""
    found = {
        "strategies": {name: {target: strategy(call, target) for target in TARGETS} for name, call in calls().items()},
        "cutlass": cutlass_regions(in_layouts(step(), LAYOUTS)),
        "narrow": narrow_types(step()),
        "layout rules": sorted(str(op) for op in tvm.ir.Op.list_op_names() if has_layout_rule(str(op))),
    }
    return json.loads(json.dumps(found))


if __name__ == "__main__":
    print(json.dumps(facts()))
