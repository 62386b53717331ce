# SPDX-License-Identifier: Apache-2.0
"""Refusals that backends share: symbolic extents, empty tensors, parts of an epilogue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.problem import ConvProblem


def shape_refusal(problem: ConvProblem) -> str:
    """Why a problem's shapes cannot be passed to a library, or nothing: symbolic height or width, no elements."""
    if any(isinstance(extent, str) for extent in problem.data_extents):
        return "the height or width is known only at run time"
    for name, (shape, _) in problem.tensors.items():
        if 0 in shape:
            return f"{name} has no elements"
    return ""


def epilogue_refusal(direction: str, epilogue: Epilogue, able: Mapping[str, Sequence[str]], why: str = "") -> str:
    """Which parts of an epilogue a direction does not take, or nothing.

    Args:
        able: the parts that each direction takes; why: what is added to the reason.
    """
    unable = [name for name, value in vars(epilogue).items() if value and name not in able[direction]]
    return f"{direction} takes no {', '.join(unable)}{why}" if unable else ""


__all__ = ["epilogue_refusal", "shape_refusal"]
