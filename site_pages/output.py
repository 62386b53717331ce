# SPDX-License-Identifier: Apache-2.0
"""What commands in `console` blocks of a page print: they are run when the site is built.

A command is one of convgrad, and may have `| head -n N` behind it.
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
        environment = os.environ | {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        make = [sys.executable, str(ROOT / "examples" / "digits_cnn.py"), "--out", folder, "--batch", "16"]
        words = [sys.executable, "-m", "tvm_convgrad", *shlex.split(command.partition(" | ")[0])[1:]]
        subprocess.run(make, check=True, capture_output=True, env=environment)
        Path(folder, "digits_cnn.onnx").rename(Path(folder, "model.onnx"))
        done = subprocess.run(words, check=False, capture_output=True, text=True, cwd=folder, env=environment)
    if done.returncode:
        raise RuntimeError(f"`{command}` failed: {done.stderr}")
    lines = [line.rstrip() for line in done.stdout.splitlines()]
    _, _, count = command.partition(" | head -n ")
    return "\n".join(lines[: int(count)] if count else lines) + "\n"
