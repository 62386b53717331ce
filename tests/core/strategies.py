# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: the fuzzer's problems, drawn by hypothesis so that failures shrink."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.verify.operators import random_problem


def problems(rank: int | None = None, dtypes: Sequence[str] | None = None) -> st.SearchStrategy[ConvProblem]:
    """Small valid problems, see tvm_convgrad.verify.operators.random_problem."""
    return st.randoms(use_true_random=False).map(lambda rng: random_problem(rng, rank, dtypes))
