# SPDX-License-Identifier: Apache-2.0
"""The backends that there are, found in the folders of this package, and what the value of --offload means.

Entries are read without TVM; a backend itself is imported when it is first needed.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tvm_convgrad import offload
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.contract import Backend, Engine, Entry

if TYPE_CHECKING:  # artifacts are read without TVM
    from tvm.target import Target

    from tvm_convgrad.core.epilogue import Epilogue

AUTO, NONE = "auto", "none"


def _discovered() -> dict[str, tuple[Entry, str]]:
    """The entry of each folder of the package `offload` and that folder's package, by name, in the order of `auto`."""
    packages = [f"{offload.__name__}.{found.name}" for found in pkgutil.iter_modules(offload.__path__) if found.ispkg]
    entries: list[tuple[Entry, str]] = [(importlib.import_module(f"{each}.entry").ENTRY, each) for each in packages]
    return {entry.name: (entry, package) for entry, package in sorted(entries, key=lambda each: each[0].order)}


_FOUND = _discovered()

ENTRIES: Mapping[str, Entry] = MappingProxyType({name: entry for name, (entry, _) in _FOUND.items()})
"""The facts of each backend by name, in the order in which `auto` tries them."""

NAMES = tuple(ENTRIES)
"""The backends, in the same order."""


@cache
def backend(name: str) -> Backend:
    """A backend by name; imports it, and TVM.

    Raises:
        UnsupportedError: there is none of that name.
    """
    if name not in _FOUND:
        raise UnsupportedError(f"offload: there is no backend {name!r}; there is {', '.join(NAMES)}")
    chosen: Backend = importlib.import_module(f"{_FOUND[name][1]}.backend").BACKEND
    return chosen


def names_of_kind(kind: str) -> tuple[str, ...]:
    """The backends that compute for a kind of target ("llvm", "cuda"), in the order in which `auto` tries them."""
    return tuple(name for name, entry in ENTRIES.items() if kind in entry.kinds)


def names_for(target: Target) -> tuple[str, ...]:
    """The backends that compute for a target's kind, in the order in which `auto` tries them."""
    return names_of_kind(target.kind.name)


def packages_of(name: str) -> tuple[str, ...]:
    """The packages that a backend's extra installs, those of the extras that it includes among them."""
    entry = ENTRIES[name]
    own = (re.split(r"[^\w.-]", requirement, maxsplit=1)[0] for requirement in entry.requirements)
    included = (each.name for each in ENTRIES.values() if each.extra in entry.extras)
    return (*own, *(package for each in included for package in packages_of(each)))


def library_packages(kind: str) -> tuple[str, ...]:
    """The packages whose versions tell which libraries compute for a kind of target."""
    packages = (ENTRIES[name].library_package for name in names_of_kind(kind))
    return tuple(package for package in packages if package is not None)


def verdict(
    name: str,
    direction: str,
    problem: ConvProblem,
    epilogue: Epilogue,
    target: Target | None,
    *,
    lenient: bool = False,
) -> Engine | str:
    """What a backend would use for a direction of a problem in a program for `target`, or why nothing.

    Args:
        lenient: whether a library that cannot be asked is a reason too, as it is for `auto`.

    Raises:
        SetupError: its runtime cannot be built, unless `lenient`.
    """
    chosen = backend(name)
    reason = chosen.unavailable(target) or chosen.refusal(direction, problem, epilogue, target)
    try:
        return reason or chosen.engine(direction, problem, epilogue, target)
    except SetupError as error:
        if lenient:
            return str(error)
        raise


def parse_offload(text: str) -> tuple[str, ...]:
    """The value of --offload: "auto", "none", or names of backends with commas between them, in order of preference.

    Raises:
        UnsupportedError: an unknown name, or auto or none beside others.
    """
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in (AUTO, NONE, *NAMES)]
    if unknown or (len(names) > 1 and {AUTO, NONE} & set(names)):
        raise UnsupportedError(f"--offload {text}: use {AUTO}, {NONE}, or backends: {', '.join(NAMES)}")
    return names


def require(names: Sequence[str], target: Target | None) -> None:
    """Raise SetupError if a program for `target` cannot use one of the backends."""
    for name in names:
        reason = backend(name).unavailable(target)
        if reason:
            raise SetupError(f"offload to {name}: {reason}")


def load_runtime(name: str, stated: Path) -> None:
    """Load the runtime of a backend that a program calls: the library that it states, else the one of this machine.

    Raises:
        SetupError: neither can be had; the text has the command that helps.
    """
    backend(name).load(stated if stated.is_file() else None)


__all__ = [
    "AUTO",
    "ENTRIES",
    "NAMES",
    "NONE",
    "backend",
    "library_packages",
    "load_runtime",
    "names_for",
    "names_of_kind",
    "packages_of",
    "parse_offload",
    "require",
    "verdict",
]
