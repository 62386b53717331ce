# SPDX-License-Identifier: Apache-2.0
"""Reads the convolutions of other projects' test suites from ../shared/cases (or $TVM_CONVGRAD_CASES)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.geometry import SPATIAL, effective_kernel
from tvm_convgrad.core.problem import ConvProblem

FOLDER = Path(os.environ.get("TVM_CONVGRAD_CASES", Path(__file__).parents[3] / "shared" / "cases"))
ABSENT = f"the cases of other projects are not at {FOLDER}; set TVM_CONVGRAD_CASES to their folder"

FILES = (
    "tf_conv2d_backprop",
    "tf_conv_gradient_grids",
    "tf_depthwise",
    "pytorch_conv",
    "functorch_vmap_conv",
    "jax_conv_grad_grids",
    "onednn_conv_shapes",
    "onednn_deconv_shapes",
    "deepbench_conv",
    "miopen_conv",
    "cutlass_conv_problems",
    "cudnn_frontend_conv",
    "tvm_conv_grad",
)

Case = tuple[str, ConvProblem | str]
"""Where a case stands in its file, and its problem or the sentence of its refusal."""


def read(file: str) -> Any:
    """A file of the folder, parsed."""
    return json.loads((FOLDER / f"{file}.json").read_text())


@cache
def cases(file: str) -> tuple[Case, ...]:
    """Every convolution of a file, in its own size; refused ones carry our sentence."""
    return tuple(_made(file, place, entry) for place, entry in _entries(read(file), ""))


def _entries(value: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of the file that has shapes of data and weight and says how they are convolved."""
    if isinstance(value, dict):
        if "x_shape" in value and ("w_shape" in value or "w_shape_hwim" in value) and "strides" in value:
            yield place, value
        else:
            for key, item in value.items():
                yield from _entries(item, f"{place}/{key}")
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from _entries(item, f"{place}/{number}")


def _made(file: str, place: str, entry: dict[str, Any]) -> Case:
    try:
        return place, _problem(file, entry)
    except ConvGradError as error:
        return place, str(error)


def _problem(file: str, entry: dict[str, Any]) -> ConvProblem:
    x, rank = entry["x_shape"], len(entry["x_shape"]) - 2
    if "desc" in entry and file == "onednn_conv_shapes":
        return ConvProblem.from_descriptor(entry["desc"])
    if file == "onednn_deconv_shapes":
        return _transposed(entry, [x[1], entry["y_shape"][1] // entry["groups"], *entry["w_shape"][2:]])
    if entry.get("w_layout") == "IO*":
        return _transposed(entry, entry["w_shape"])
    data, kernel = "NC" + SPATIAL[rank], "OI" + SPATIAL[rank]
    if file.startswith("tf_"):
        data, kernel = f"N{SPATIAL[rank]}C", f"{SPATIAL[rank]}IO"
    elif file == "cutlass_conv_problems":
        data, kernel = f"N{SPATIAL[rank]}C", f"O{SPATIAL[rank]}I"
    w = entry.get("w_shape")
    if w is None:  # TensorFlow's depthwise filter: H, W, channels, multiplier
        h, width, channels, multiplier = entry["w_shape_hwim"]
        w = [h, width, 1, channels * multiplier]
    return ConvProblem.from_shapes(
        x,
        w,
        strides=entry["strides"],
        padding=_padding(entry),
        dilation=entry.get("dilations", entry.get("rhs_dilation", 1)),
        groups=entry.get("groups", entry.get("feature_group_count", 1)),
        data_layout=data,
        kernel_layout=kernel,
    )


def _padding(entry: dict[str, Any]) -> Any:
    if "pads" in entry:
        return entry["pads"]
    return entry.get("padding", "SAME")


def _transposed(entry: dict[str, Any], weight: list[int]) -> ConvProblem:
    """The convolution whose dgrad is a transposed convolution: from its result's space to its data's."""
    pads = entry.get("pads") or [[p, p] for p in entry["padding"]]
    return ConvProblem.from_shapes(
        entry["y_shape"],
        weight,
        strides=entry["strides"],
        # An output padding shows as a negative high side; the floor division implies it.
        padding=[(low, max(high, 0)) for low, high in pads],
        dilation=entry["dilations"],
        groups=entry["groups"],
    )


def small(problem: ConvProblem) -> ConvProblem:
    """A problem of the same kind that runs in no time: fewer samples and channels, shorter axes, all else as it was.

    Grouping stays what it was (dense, depthwise with its multiplier, or in between), and so do the remainders of the
    floor division.
    """
    dense = problem.groups == 1
    groups = 1 if dense else min(problem.groups, 3)
    into, out = problem.in_channels // problem.groups, problem.out_channels // problem.groups
    extents = []
    for x, k, s, d, (low, high) in zip(
        problem.data_extents, problem.kernel, problem.strides, problem.dilation, problem.padding, strict=True
    ):
        spare = int(x) + low + high - effective_kernel(k, d)
        kept = min(spare, spare % s + s * 3)
        extents.append(int(x) - (spare - kept))
    if min(extents) < 1:  # padding longer than what is left: keep the size
        extents = [int(x) for x in problem.data_extents]
    return replace(
        problem,
        batch=min(int(problem.batch), 2),
        in_channels=groups * min(into, 3),
        out_channels=groups * min(out, 4),
        data_extents=tuple(extents),
        groups=groups,
    )


def small_problems(file: str) -> list[ConvProblem]:
    """The kinds of problem that a file has, small, each once."""
    made = (small(problem) for _, problem in cases(file) if isinstance(problem, ConvProblem))
    return list(dict.fromkeys(made))
