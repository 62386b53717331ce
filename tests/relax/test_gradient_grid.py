# SPDX-License-Identifier: Apache-2.0
"""The 136 configurations on which benchmarks/stock_grid.py compares us with stock TVM: all of them right."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import tvm  # noqa: F401 - loads the rules under test

from relax_ops.lowering import forced_forms, recorded_choices


def _load() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "stock_grid.py"
    spec = importlib.util.spec_from_file_location("stock_grid", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["stock_grid"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


GRID = _load()
CONFIGS = GRID.grid()


def test_there_are_136_different_ones() -> None:
    assert len(CONFIGS) == len({str(config) for config in CONFIGS}) == 136


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_equals_float64(config: Any) -> None:
    """By kernels wherever they do not refuse, which is where an extent of the image is symbolic."""
    with recorded_choices() as record:
        assert GRID.outcome(config) == ("right", "")
    assert record or config.problem.data_dtype == "bfloat16"  # compiled by `evaluate`, and maybe before
    assert all(entry.choice.is_kernel for entry in record) == ("H" not in config.symbolic)


@pytest.mark.parametrize("config", CONFIGS[::4], ids=str)
def test_compositions_equal_float64(config: Any) -> None:
    forms = dict.fromkeys(("forward", "backward_weight", "backward_data"), "composition")
    with forced_forms(**forms), recorded_choices() as record:
        assert GRID.outcome(config) == ("right", "")
    assert not any(entry.choice.is_kernel for entry in record)


def test_a_wrong_gradient_counts_as_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    true = GRID.expected
    monkeypatch.setattr(GRID, "expected", lambda *arguments: tuple(array + 1 for array in true(*arguments)))
    status, detail = GRID.outcome(CONFIGS[0])
    assert status == "wrong"
    assert "elements of the gradient of data differ" in detail
