# SPDX-License-Identifier: Apache-2.0
"""What the curated set of CUTLASS's kernels computes: small rules over a ConvProblem. Needs no library and no GPU.

Sources: CUTLASS 4.1, `can_implement` of device/implicit_gemm_convolution.h and of the iterators in conv/threadblock.
"""

from __future__ import annotations

import math

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cutlass.entry import ENTRY
from tvm_convgrad.offload.refusals import epilogue_refusal, shape_refusal

MAX_BYTES = 2**31 - 1
"""Its kernels address a tensor by int32."""

LAYOUTS = {1: ("NWC", "OWI"), 2: ("NHWC", "OHWI")}
"""Of data and gradient, and of the kernel, by rank; a row is an image of one line."""

OPERANDS = tuple(ENTRY.dtypes)


def refusal(direction: str, problem: ConvProblem, epilogue: Epilogue) -> str:
    """Why no kernel of the set computes a direction of a problem together with an epilogue, or nothing."""
    return (
        _form_refusal(problem)
        or _type_refusal(direction, problem)
        or _stride_refusal(direction, problem)
        or _extent_refusal(problem)
        or _epilogue_refusal(direction, epilogue)
    )


def _form_refusal(problem: ConvProblem) -> str:
    if problem.groups > 1:
        return f"groups={problem.groups}; the kernel has no groups"
    if problem.rank not in LAYOUTS:
        return f"{problem.rank}-D; the kernels of the set are of two dimensions"
    data, kernel = LAYOUTS[problem.rank]
    found = (problem.data_layout, problem.kernel_layout, problem.grad_layout)
    if found != (data, kernel, data):
        return f"layouts {', '.join(found)}; it has {data}, {kernel}, {data} alone (--layout NHWC:OHWI)"
    return ""


def _type_refusal(direction: str, problem: ConvProblem) -> str:
    types = {name: dtype for name, (_, dtype) in problem.tensors.items()}
    operands = {types[name] for name in DIRECTIONS[direction].operands}
    result = types[DIRECTIONS[direction].result]
    if len(operands) == 1 and operands <= set(OPERANDS) and result in (*operands, "float32"):
        return ""
    every = sorted({*operands, result})
    return (
        f"types {', '.join(every)}; it takes {', '.join(OPERANDS[:-1])} or {OPERANDS[-1]} for both operands, and gives "
        "that or float32"
    )


def _stride_refusal(direction: str, problem: ConvProblem) -> str:
    if direction == "backward_data" and max(problem.strides) > 1 and max(problem.dilation) > 1:
        return (
            f"dgrad with strides {list(problem.strides)} and dilation {list(problem.dilation)}; no kernel of CUTLASS "
            "has both"
        )
    return ""


def _extent_refusal(problem: ConvProblem) -> str:
    reason = shape_refusal(problem)
    if reason:
        return reason
    for name, (shape, dtype) in problem.tensors.items():
        known = [extent for extent in shape if isinstance(extent, int)]
        if math.prod(known) * max(DTYPE_BYTES[dtype], DTYPE_BYTES["float32"]) > MAX_BYTES:
            return f"{name} has more bytes than an int32 counts"
    return ""


def _epilogue_refusal(direction: str, epilogue: Epilogue) -> str:
    reason = epilogue_refusal(
        direction, epilogue, ENTRY.epilogues, "; its kernels give one result, the sums and one summand"
    )
    return reason or ("a bias and a sum; its kernels add one of them" if epilogue.bias and epilogue.accumulate else "")


__all__ = ["LAYOUTS", "refusal"]
