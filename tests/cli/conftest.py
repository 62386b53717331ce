# SPDX-License-Identifier: Apache-2.0
"""The command as a fixture."""

from __future__ import annotations

import pytest

from tests.cli.command import Command


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)
