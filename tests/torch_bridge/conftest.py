# SPDX-License-Identifier: Apache-2.0
"""One store for all tests of a worker process, so that each kernel is compiled once; kernels are always taken."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("torch_store")


@pytest.fixture
def kernels_always(store: Path) -> Iterator[None]:
    """Inside, every kernel there is computes, from the second call of a signature on."""
    bridge = pytest.importorskip("tvm_convgrad.torch")
    with bridge.enable(wait=True, always=True, folder=store):
        yield
    assert not bridge.override.BRIDGE.installed
