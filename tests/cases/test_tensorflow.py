# SPDX-License-Identifier: Apache-2.0
"""The arrays written in TensorFlow's own gradient tests, literal or recomputed in float64: ours must be equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.cases.load import ABSENT, FOLDER, cases, read
from tvm_convgrad.core import reference
from tvm_convgrad.core.catalogue import BY_SHORT
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.bulk import Case, run_cases

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason=ABSENT)

FILE = "tf_conv2d_backprop"
DIRECTIONS = {short: BY_SHORT[short].name for short in ("dgrad", "wgrad")}


def _operands(problem: ConvProblem, direction: str) -> list[np.ndarray[Any, Any]]:
    """TensorFlow's filling: each tensor counts 1, 2, 3, … in row-major order."""
    names = ("grad", "weight") if direction == "backward_data" else ("grad", "data")
    shapes = [problem.tensors[name][0] for name in names]
    return [np.arange(1, np.prod(shape) + 1, dtype="float32").reshape(shape) for shape in shapes]


def _problems() -> list[tuple[str, dict[str, Any], ConvProblem]]:
    entries = read(FILE)["cases"]
    made = cases(FILE)
    assert len(entries) == len(made) == 83
    return [
        (DIRECTIONS[entry["op"]], entry, problem)
        for entry, (_, problem) in zip(entries, made, strict=True)
        if isinstance(problem, ConvProblem)
    ]


def test_reference_gives_tensorflow_s_arrays() -> None:
    problems = _problems()
    assert len(problems) == 83
    for direction, entry, problem in problems:
        found = reference.DIRECTIONS[direction](problem, *_operands(problem, direction))
        np.testing.assert_allclose(found.ravel(), entry["expected"], rtol=1e-12, err_msg=entry["id"])


@pytest.mark.parametrize("form", [("transposed", "swapped"), ("dilated", "tiled"), ("kernel", "kernel")], ids="+".join)
def test_compiled_operators_give_tensorflow_s_arrays(form: tuple[str, str]) -> None:
    forms = dict(zip(DIRECTIONS.values(), form, strict=True))
    problems = [item for item in _problems() if item[2].macs <= 10**7]
    # Kernels refuse the cases without elements; "auto" takes compositions for these.
    impls = {direction: "auto" if name == "kernel" else f"composition:{name}" for direction, name in forms.items()}
    run = [Case(direction, problem, impls[direction]) for direction, _, problem in problems]
    results = run_cases(run, [_operands(problem, direction) for direction, _, problem in problems])
    for (_, entry, problem), found in zip(problems, results, strict=True):
        # Every number is positive, so a sum of n float32 products errs by at most about n rounding steps of itself.
        terms = max(problem.macs // max(found.size, 1), 1)
        bound = (terms + 2) * 2.0**-24
        np.testing.assert_allclose(found.ravel(), entry["expected"], rtol=bound, err_msg=entry["id"])


def test_all_cases_are_compiled() -> None:
    assert sum(problem.macs <= 10**7 for _, _, problem in _problems()) == 83
