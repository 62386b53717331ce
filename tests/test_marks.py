# SPDX-License-Identifier: Apache-2.0
"""How tests/conftest.py finds what needs PyTorch, and which files it leaves out for a mark."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import conftest

SOURCE = """
import pytest
from hypothesis import given, strategies as st

@st.composite
def pairs(draw):
    return draw(st.integers())

@st.composite
def tensors(draw):
    import torch
    return torch.zeros(draw(st.integers(1, 3)))

@pytest.fixture
def model():
    return pytest.importorskip("torch").nn.ReLU()

@given(pairs())
def test_pairs(pair):
    pass
"""


def test_strategies_made_by_decorators_are_read(tmp_path: Path) -> None:
    """What st.composite makes has no source file of its own."""
    path = tmp_path / "decorated.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("decorated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert conftest._functions_with_torch(module) == ["tensors", "model"]
    assert "@given" in conftest._functions(module)["test_pairs"]


@pytest.mark.parametrize(
    ("expression", "ignored"),
    [("torch", None), ("onednn", True), ("not onednn", None), ("onednn or torch", None), ("", None), ("slow", None)],
)
def test_files_without_the_word_of_a_mark_are_left_out(tmp_path: Path, expression: str, ignored: bool | None) -> None:
    """Only for one mark of the suite: any other expression may take tests that have no mark."""
    path = tmp_path / "test_sample.py"
    path.write_text(SOURCE)
    config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
    assert conftest.pytest_ignore_collect(path, config) is ignored
    assert conftest.pytest_ignore_collect(tmp_path, config) is None
