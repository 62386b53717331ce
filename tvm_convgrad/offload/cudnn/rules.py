# SPDX-License-Identifier: Apache-2.0
"""What cuDNN computes: small rules over a ConvProblem, held against cuDNN itself by tests/offload/test_cudnn_matrix.py.

Sources: cuDNN 9, "Graph API" (operations, types, layouts), its answers for GPUs from sm_75 to sm_100, and its results
on an H100: those of filters in the layout HWIO are wrong with every engine, although it has engines for them.
"""

from __future__ import annotations

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cudnn.entry import ENTRY
from tvm_convgrad.offload.refusals import epilogue_refusal, shape_refusal

FIRST_BFLOAT16 = 80
"""The first GPUs with bfloat16, as 10 times their compute capability."""


def refusal(direction: str, problem: ConvProblem, epilogue: Epilogue, version: int) -> str:
    """Why cuDNN does not compute a direction of a problem together with an epilogue, or nothing.

    Any groups, strides, dilation and padding, asymmetric too, have an engine that is deterministic, keeps float32's
    precision and is there in compiled form: what rules can say is said by types, layouts, extents and epilogues.

    Args:
        version: of the GPU, 10 times its compute capability.
    """
    return (
        _type_refusal(direction, problem, version)
        or layout_refusal(problem)
        or shape_refusal(problem)
        or _epilogue_refusal(direction, epilogue)
    )


def _type_refusal(direction: str, problem: ConvProblem, version: int) -> str:
    types = {name: dtype for name, (_, dtype) in problem.tensors.items()}
    every = sorted({types[name] for name in (*DIRECTIONS[direction].operands, DIRECTIONS[direction].result)})
    if len(every) > 1:
        return (
            f"types {', '.join(every)}; it takes one type (its engines of several are compiled at run time), which "
            "a step gives it by --results operands"
        )
    if every == ["bfloat16"] and version < FIRST_BFLOAT16:
        return f"sm_{version} has no bfloat16; sm_{FIRST_BFLOAT16} is the first that has"
    return ""


def layout_refusal(problem: ConvProblem) -> str:
    """Why cuDNN is not given a problem's layouts, or nothing; it has engines for any strides, some wrong."""
    letters = SPATIAL[problem.rank]
    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
    for name, layout in layouts.items():
        first, second = "OI" if name == "weight" else "NC"
        known = (first + second + letters, first + letters + second)
        if layout not in known:
            return f"the layout {layout} of {name}: its engines are right for {' and '.join(known)} only; convert it"
    return ""


def _epilogue_refusal(direction: str, epilogue: Epilogue) -> str:
    reason = epilogue_refusal(direction, epilogue, ENTRY.epilogues)
    return reason or ("it has relu with a bias only" if epilogue.relu and not epilogue.bias else "")


__all__ = ["layout_refusal", "refusal"]
