# SPDX-License-Identifier: Apache-2.0
"""How tests/conftest.py finds what needs PyTorch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

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
