# SPDX-License-Identifier: Apache-2.0
"""Chromium without a network, pages of which every message on the console is an error, and a place for screenshots."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Open = Callable[..., Any]
"""visit(address, ignored=messages as a pattern, **settings of the browser's context) -> page of playwright"""


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    """The browser, started once."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("there is no chromium")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield browser
        browser.close()


@pytest.fixture
def visit(chromium: Any) -> Iterator[Open]:
    """Opens a page; when the test ends, nothing may have been written to a console."""
    said: list[str] = []
    contexts = []

    def visit(address: str, *, ignored: str = "(?!)", **settings: Any) -> Any:
        context = chromium.new_context(**settings)
        contexts.append(context)

        def note(text: str) -> None:
            if not re.search(ignored, text):
                said.append(f"{page.url}: {text}")

        page = context.new_page()
        page.on("console", lambda message: note(message.text))
        page.on("pageerror", lambda error: note(str(error)))
        page.goto(address)
        return page

    yield visit
    for context in contexts:
        context.close()
    assert said == []


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder for pictures: CONVGRAD_SCREENSHOTS, or one of this run."""
    named = os.environ.get("CONVGRAD_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
