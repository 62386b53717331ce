# SPDX-License-Identifier: Apache-2.0
"""The source of an instance of a kernel: one instantiation of CUTLASS's templates, and the names it is called by."""

from __future__ import annotations

from tvm_convgrad.offload.cutlass.kernels import MATHS, Instance

_ELEMENTS = {"float16": "cutlass::half_t", "bfloat16": "cutlass::bfloat16_t", "float32": "float"}


def cuda_source(instance: Instance) -> str:
    """The .cu file of an instance; runtime/kernel.h says what it exports."""
    return f"""// {instance.name}
#include "cutlass/conv/kernel/default_conv2d_{instance.form.template.lower()}.h"
#include "kernel.h"
CONVGRAD_CUTLASS_KERNEL(({kernel_type(instance)}), {element(instance.result)})
"""


def kernel_type(instance: Instance) -> str:
    """The C++ type of the kernel."""
    math = MATHS[instance.math]
    operand, output = element(math.operand), element(instance.output)
    nhwc = "cutlass::layout::TensorNHWC"
    shapes = (f"cutlass::gemm::GemmShape<{', '.join(map(str, s))}>" for s in (math.tile, math.warp, math.instruction))
    combination = "LinearCombinationRelu" if instance.relu else "LinearCombination"
    swizzle = (
        "cutlass::conv::threadblock::StridedDgradIdentityThreadblockSwizzle<1>"
        if instance.form.is_strided_dgrad
        else "cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<1>"
    )
    arguments = (
        *(operand, nhwc, operand, nhwc, output, nhwc, "float"),
        f"cutlass::arch::OpClass{math.unit}",
        f"cutlass::arch::Sm{math.arch}",
        *shapes,
        f"cutlass::epilogue::thread::{combination}<{output}, {instance.alignments[2]}, float, float>",
        swizzle,
        str(math.stages),
        f"cutlass::arch::OpMultiplyAdd{math.operator}",
        f"cutlass::conv::IteratorAlgorithm::k{instance.form.iterator}",
        f"cutlass::conv::StrideSupport::k{instance.form.strides}",
        *map(str, instance.alignments[:2]),
    )
    return f"typename cutlass::conv::kernel::DefaultConv2d{instance.form.template}<{', '.join(arguments)}>::Kernel"


def element(dtype: str) -> str:
    """CUTLASS's element type."""
    return _ELEMENTS[dtype]


__all__ = ["cuda_source", "element", "kernel_type"]
