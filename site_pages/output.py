# SPDX-License-Identifier: Apache-2.0
"""What commands in `console` blocks of a page print: they are run when the site is built.

A command is one of convgrad, and may have `| head -n N` or `| tail -n N` behind it. The report of a step is made here,
too.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSOLE = re.compile(r"^```console\n((?:\$ [^\n]*\n)+)```$", re.MULTILINE)


def with_output(text: str) -> str:
    """The page with the output of each command behind it.

    Raises:
        RuntimeError: a command fails.
    """
    return CONSOLE.sub(lambda block: f"```console\n{''.join(map(_shown, block[1].splitlines()))}```", text)


def _shown(line: str) -> str:
    return f"{line}\n{_output(line.removeprefix('$ '))}"


@cache
def _output(command: str) -> str:
    """What a command of convgrad prints in a folder with the network of the digits."""
    with tempfile.TemporaryDirectory() as folder:
        _make_network(Path(folder))
        printed = _convgrad(Path(folder), *shlex.split(command.partition(" | ")[0])[1:])
    lines = [line.rstrip() for line in printed.splitlines()]
    part = re.search(r" \| (head|tail) -n (\d+)$", command)
    if part is not None:
        count = int(part[2])
        lines = lines[:count] if part[1] == "head" else lines[-count:]
    return "\n".join(lines) + "\n"


def report() -> str:
    """The page that `explain --html` writes of a step of that network.

    Raises:
        RuntimeError: a command fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        _make_network(Path(folder))
        _convgrad(Path(folder), "build", "model.onnx", "-o", "step.so")
        _convgrad(Path(folder), "explain", "step.so", "--html", "report.html")
        return Path(folder, "report.html").read_text(encoding="utf-8")


def _make_network(folder: Path) -> None:
    run_python(folder, str(ROOT / "examples" / "digits_cnn.py"), "--out", ".", "--batch", "16")
    (folder / "digits_cnn.onnx").rename(folder / "model.onnx")


def _convgrad(folder: Path, *arguments: str) -> str:
    return run_python(folder, "-m", "tvm_convgrad", *arguments)


def run_python(folder: Path, *arguments: str) -> str:
    """What Python prints with these arguments, run in a folder; as wide as a terminal of 80 columns.

    Raises:
        RuntimeError: it fails.
    """
    environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1", "COLUMNS": "80", "MPLCONFIGDIR": str(folder)}
    words = [sys.executable, *arguments]
    done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError(f"`{shlex.join(arguments)}` failed: {done.stderr}")
    return done.stdout
