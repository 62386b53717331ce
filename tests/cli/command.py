# SPDX-License-Identifier: Apache-2.0
"""Running `convgrad` in this process or in one of its own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tvm_convgrad import cli

MAIN = "import sys; from tvm_convgrad.cli import main; sys.argv[0] = 'convgrad'; main()"


@dataclass(frozen=True)
class Done:
    """What a command left: exit code, standard output and error."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)

    def assert_sentence(self, *parts: str) -> None:
        """Exit code 1, nothing on standard output, one line on standard error with all `parts` in it."""
        assert self.code == 1, (self.out, self.err)
        assert self.out == ""
        lines = [line for line in self.err.splitlines() if line.strip()]
        assert len(lines) == 1, self.err
        assert lines[0].startswith("convgrad: ")
        assert "unexpected" not in lines[0]
        assert "Traceback" not in self.err
        for part in parts:
            assert part in lines[0], (part, lines[0])


class Command:
    """`convgrad` as a function."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = monkeypatch, capfd
        monkeypatch.delenv("COLUMNS", raising=False)  # a terminal's width, which output in a pipe would have, too

    def __call__(self, *arguments: object) -> Done:
        self._patch.setattr(sys, "argv", ["convgrad", *map(str, arguments)])
        self._capture.readouterr()
        gc.freeze()  # a command that fails calls the collector: a second, with all that the tests before it keep
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        finally:
            gc.unfreeze()
        return Done(code, *self._capture.readouterr())


def start(*arguments: object) -> subprocess.Popen[str]:
    """`convgrad` in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", MAIN, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: subprocess.Popen[str]) -> Done:
    """Wait for a process to end."""
    out, err = process.communicate(timeout=300)
    return Done(process.returncode, out, err)
