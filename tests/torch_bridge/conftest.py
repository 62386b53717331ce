# SPDX-License-Identifier: Apache-2.0
"""One store for all tests, whichever process runs them, so that each kernel is compiled once; the bridge enabled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch_store"


@pytest.fixture
def kernels_always(store: Path) -> Iterator[None]:
    """Inside, every kernel there is computes, from the second call of a signature on."""
    bridge = pytest.importorskip("tvm_convgrad.torch")
    with bridge.enable(wait=True, always=True, folder=store):
        yield
    assert not bridge.override.BRIDGE.installed
