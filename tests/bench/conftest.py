# SPDX-License-Identifier: Apache-2.0
"""The command of the tests of layers; those of steps have one of their own."""

from __future__ import annotations

import pytest

from tests.bench.layers import ROOFLINE
from tests.cli.command import Command


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command on one thread, without the second that measuring the machine's limits takes."""
    monkeypatch.setattr("tvm_convgrad.bench.layers.use_threads", lambda _wanted: 1)
    monkeypatch.setattr("tvm_convgrad.bench.layers.measure_roofline", lambda _peak: ROOFLINE)
    return Command(monkeypatch, capfd)
