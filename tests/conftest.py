# SPDX-License-Identifier: Apache-2.0
"""Marks the tests that need PyTorch, so that `pytest -m torch` runs them alone."""

from __future__ import annotations

import inspect
import re

import pytest

_MODULE = re.compile(r"^(torch\w* = pytest\.importorskip\(\"torch\"|import torch|from torch)", re.MULTILINE)
_FUNCTION = re.compile(r"importorskip\(\"torch\"|\bimport torch\b")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "torch: compares with PyTorch (set by tests/conftest.py)")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and _needs_torch(item):
            item.add_marker("torch")


def _needs_torch(item: pytest.Function) -> bool:
    """Whether PyTorch is asked for by the module, by the test itself, or by a fixture of its module."""
    source = inspect.getsource(item.module)
    if _MODULE.search(source):
        return True
    fixtures = (getattr(item.module, name, None) for name in item.fixturenames)
    used = [item.function, *(getattr(fixture, "_fixture_function", None) for fixture in fixtures)]
    return any(_FUNCTION.search(inspect.getsource(function)) for function in used if function is not None)
