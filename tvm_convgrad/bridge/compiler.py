# SPDX-License-Identifier: Apache-2.0
"""The C++ compiler that links kernels and compiles what they call: its command, and what tells it from another one."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path

_VARIABLE = "CXX"
_NAMES = ("g++", "clang++", "c++")
_SECONDS = 10.0
"""After which a compiler that has not told its version is known by its file alone."""


def compiler_command() -> tuple[str, ...]:
    """CXX of the environment, which may have options, or the first compiler in PATH; nothing if there is none."""
    stated = os.environ.get(_VARIABLE)
    if stated and stated.strip():
        return tuple(shlex.split(stated))
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    return () if found is None else (found,)


def compiler_identity() -> list[object]:
    """The command, the file behind it with its size and time, and its version; of no compiler nothing."""
    command = compiler_command()
    found = shutil.which(command[0]) if command else None
    if found is None:
        return []
    path = Path(found).resolve()
    state = path.stat()
    return [*command, str(path), state.st_size, state.st_mtime_ns, _version(command, state.st_mtime_ns)]


@lru_cache(maxsize=8)
def _version(command: tuple[str, ...], _changed: int) -> str:
    """What a compiler, which may be started by another program such as ccache, says of itself in its first line."""
    try:
        done = subprocess.run(
            [*command, "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0]


__all__ = ["compiler_command", "compiler_identity"]
