# SPDX-License-Identifier: Apache-2.0
"""A number of threads that TVM's pool does not have is refused, and changes nothing."""

from __future__ import annotations

import os

import pytest

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.threads import VARIABLE, use_threads


def test_a_refused_number_does_not_take_the_pool_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """TVM reads the variable in each call, and runs it on one thread where it says 1."""
    made = use_threads()
    monkeypatch.setenv(VARIABLE, str(made))
    with pytest.raises(SetupError, match=f"TVM's pool has {made}"):
        use_threads(made + 1)
    assert os.environ[VARIABLE] == str(made)


def test_a_pool_that_exists_keeps_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of torchrun share the cores, but not those of a pool that was made before."""
    made = use_threads()
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("TVM_BIND_THREADS", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1000")
    assert use_threads() == made
    assert os.environ[VARIABLE] == str(made)
