# SPDX-License-Identifier: Apache-2.0
"""What oneDNN computes, and in which formats: small rules over a ConvProblem.

Whether the CPU supports a type is queried from the library.

Sources: oneDNN 3.2, "Convolution" and "Data Types" in its developer guide (types, propagation kinds, post-ops of
forward convolutions only, sum post-op of reorders).
"""

from __future__ import annotations

import math

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.geometry import data_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.onednn.entry import ENTRY
from tvm_convgrad.offload.refusals import epilogue_refusal, shape_refusal

ANY, PLAIN_DATA = "any", "plain data"
"""Formats: every tensor as oneDNN likes it, reordered inside of the call; or data and gradients as they are, and only
the weight as oneDNN likes it."""

MAX_ELEMENTS = 2**31 - 1
"""oneDNN's kernels count elements of a tensor in int32."""

FEW_CHANNELS = 8

FEW_PIXELS = 100
"""Of an image, so that the product's rows of pixels fill vectors badly: measured at 49 and at 196."""

RELU = "relu turns NaN into zero in oneDNN, which hides that training has failed; it follows the call"
"""Why relu is not a post-op."""


def refusal(direction: str, problem: ConvProblem, epilogue: Epilogue) -> str:
    """Why oneDNN does not compute a direction of a problem together with an epilogue, or nothing."""
    return (
        _type_refusal(direction, problem)
        or _extent_refusal(problem)
        or (RELU if direction == "forward" and epilogue.relu else "")
        or epilogue_refusal(direction, epilogue, ENTRY.epilogues, "; only the forward convolution has post-ops")
    )


def formats(direction: str, problem: ConvProblem) -> str:
    """In which formats a direction that is not refused is computed, ANY or PLAIN_DATA.

    Channels last oneDNN has kernels for as they are. Of channels second it takes products of matrices, which is what
    pointwise convolutions are (but for forward and dgrad on few pixels), and the gradient of few channels (a network's
    first layer), where blocks of 16 would be mostly padding. Everything else is faster in blocks, reorders included.
    docs/OFFLOAD.md has the measurements.
    """
    layouts = {problem.data_layout, problem.grad_layout}
    canonical = data_layout_of(problem.rank)
    if layouts == {f"N{canonical[2:]}C"}:
        return PLAIN_DATA
    if layouts != {canonical} or problem.groups > 1:
        return ANY
    if math.prod(problem.kernel) == 1:
        few = math.prod(int(extent) for extent in problem.grad_extents) <= FEW_PIXELS
        return ANY if few and direction != "backward_weight" else PLAIN_DATA
    return PLAIN_DATA if direction == "backward_data" and problem.in_channels <= FEW_CHANNELS else ANY


def _type_refusal(direction: str, problem: ConvProblem) -> str:
    types = {name: dtype for name, (_, dtype) in problem.tensors.items()}
    operands = {types[name] for name in DIRECTIONS[direction].operands}
    result = types[DIRECTIONS[direction].result]
    if operands == {"float32"} and result == "float32":
        return ""
    if operands == {"bfloat16"} and result in ("bfloat16", "float32"):
        return ""
    every = sorted({*operands, result})
    return f"types {', '.join(every)}; it takes float32, or bfloat16 with a bfloat16 or float32 result"


def _extent_refusal(problem: ConvProblem) -> str:
    reason = shape_refusal(problem)
    if reason:
        return reason
    for name, (shape, _) in problem.tensors.items():
        if math.prod(extent for extent in shape if isinstance(extent, int)) > MAX_ELEMENTS:
            return f"{name} has more elements than an int32 counts"
    return ""


__all__ = ["ANY", "PLAIN_DATA", "formats", "refusal"]
