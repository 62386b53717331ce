# SPDX-License-Identifier: Apache-2.0
"""One store for all tests, whichever process runs them, so that each kernel is compiled once; their mark."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("jax")


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "jax_store"


@pytest.fixture
def kernels_always(store: Path) -> Iterator[None]:
    """Inside, every kernel there is computes."""
    bridge = pytest.importorskip("tvm_convgrad.jax")
    with bridge.patch(always=True, folder=store):
        yield
    assert bridge.patching._policy.value is None
