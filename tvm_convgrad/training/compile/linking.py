# SPDX-License-Identifier: Apache-2.0
"""Linking an artifact, for this machine or another one: which compiler does it, and what it says when it fails."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tvm
from tvm.support import cc
from tvm.target import codegen

from tvm_convgrad.core.errors import SetupError

_GLIBC = "2.28"
"""The C library that foreign artifacts are linked against, that of Debian 10 and Ubuntu 18.10."""
_SHOWN = 600


@dataclass(frozen=True)
class Linker:
    """A C++ compiler that makes shared libraries: a program and its leading arguments.

    An instance is called as TVM's export_library does, with the file to write, objects and sources, and options.
    """

    command: tuple[str, ...]

    def __call__(self, output: str, objects: Sequence[str], options: Sequence[str] = (), **_: object) -> None:
        """Link objects and compile sources into the shared library `output`.

        Raises:
            SetupError: the compiler cannot be run, or fails; with its own words.
        """
        self._run([*self.command, "-shared", "-fPIC", "-o", output, *options, *objects])

    def link_program(self, output: str, sources: Sequence[str], options: Sequence[str]) -> None:
        """Compile C sources, and link them with what `options` name, into the program `output`.

        Raises:
            SetupError: the compiler cannot be run, or fails; with its own words.
        """
        driver = ("-x", "c", "-std=c11")
        self._run([*self.command, *driver, *sources, "-x", "none", *options, "-o", output])

    def _run(self, command: Sequence[str]) -> None:
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        except OSError as error:
            raise SetupError(f"{self.command[0]} cannot be run ({error.strerror})") from error
        if done.returncode != 0:
            raise SetupError(f"{self.command[0]} ended with code {done.returncode}: {_words(done.stdout)}")

    def for_cpp(self) -> Linker:
        """The same for C++ sources: ziglang has a command of its own for them."""
        if self.command[1:3] == ("-m", "ziglang"):
            return Linker((*self.command[:3], "c++", *self.command[4:]))
        return self


def linker_for(target: tvm.target.Target, stated: str | None = None) -> Linker:
    """The linker of artifacts for a target.

    Args:
        stated: a command, such as "aarch64-linux-gnu-g++ -static-libgcc"; None: CXX of the environment, or a compiler
            that is installed: this machine's own, or one for the target's architecture, or the package ziglang.

    Raises:
        SetupError: there is none.
    """
    command = stated if stated is not None else os.environ.get("CXX")
    if command:
        words = tuple(shlex.split(command))
        if not words or shutil.which(words[0]) is None:
            raise SetupError(f"build links with {command!r}, but there is no such program; name one by --cc or CXX.")
        return Linker(words)
    architecture, own = architecture_of(target), codegen.llvm_get_system_triple().split("-")[0]
    if architecture == own:
        found = cc.get_cc()
        if found is None:
            raise SetupError(
                "build needs a C++ compiler to link the step; install g++ or clang++, or set CXX to yours."
            )
        return Linker((found,))
    cross = shutil.which(f"{architecture}-linux-gnu-g++")
    if cross is not None:
        return Linker((cross,))
    if importlib.util.find_spec("ziglang") is not None:
        return Linker((sys.executable, "-m", "ziglang", "cc", "-target", f"{architecture}-linux-gnu.{_GLIBC}"))
    raise SetupError(
        f"build needs a compiler that links for {architecture}; pip install 'tvm-convgrad[cross]', or name one, such "
        f"as --cc {architecture}-linux-gnu-g++."
    )


def architecture_of(target: tvm.target.Target) -> str:
    """The architecture that a CPU target's code is for, such as aarch64; of a GPU's, that of its host."""
    triple = str(target.attrs.get("mtriple", "") or codegen.llvm_get_system_triple())
    return triple.split("-")[0]


def _words(output: str) -> str:
    """What a compiler says, without what it says about its own call, and not beyond `_SHOWN` letters."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    telling = [line for line in lines if "error" in line or "undefined" in line or "cannot" in line]
    text = "; ".join(telling or list(filter(None, lines)))
    return text[:_SHOWN] + ("…" if len(text) > _SHOWN else "") if text else "it printed nothing"


__all__ = ["Linker", "architecture_of", "linker_for"]
