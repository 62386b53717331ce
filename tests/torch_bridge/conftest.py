# SPDX-License-Identifier: Apache-2.0
"""One store for all tests, whichever process runs them, so that each kernel is compiled once; the bridge enabled."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tvm_convgrad.bridge.job import TORCH_ENTRIES
from tvm_convgrad.bridge.store import kernels


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has the entries in C++, too."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch_store"
    kernels(folder).request_library(TORCH_ENTRIES, bytes).result()
    return folder


@pytest.fixture
def entries(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In which language calls are taken, "C++" or "Python"."""
    override = pytest.importorskip("tvm_convgrad.torch").override
    if getattr(request, "param", "C++") == "Python":
        monkeypatch.setattr(override, "native", lambda _kernels: None)


@pytest.fixture
def kernels_always(store: Path, entries: None) -> Iterator[None]:
    """Inside, every kernel there is computes, from the second call of a signature on."""
    bridge = pytest.importorskip("tvm_convgrad.torch")
    with bridge.enable(wait=True, always=True, folder=store):
        yield
    assert not bridge.override.BRIDGE.installed
