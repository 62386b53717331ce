# SPDX-License-Identifier: Apache-2.0
"""What a backend is: an `Entry` of plain facts, readable without TVM, and a `Backend` that compiles and runs its calls.

A backend is a folder of this package (or of any folder on `tvm_convgrad.offload.__path__`) with two modules:

    entry.py     ENTRY = Entry(...); it imports neither TVM nor the library
    backend.py   BACKEND = a Backend; imported when a program is partitioned for it, or its runtime is built or loaded

Nothing else lists it: `--offload`, `impl=`, `convgrad env`, `build-runtime`, `bench` and the marks of tests read the
entries. pyproject.toml is static and repeats `extra` and `requirements`; tests/offload/test_backends.py compares them.
"""

from __future__ import annotations

import platform
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload import libraries
from tvm_convgrad.offload.libraries import installed_file

if TYPE_CHECKING:  # importing kernels imports TVM, and artifacts are read without it
    from tvm.target import Target

    from tvm_convgrad.core.epilogue import Epilogue


@dataclass(frozen=True)
class Marker:
    """The pytest mark of tests that call the library.

    Attributes:
        name, text: of the mark.
        on_request: whether its tests run only with -m, as they take more time than the suite has.
    """

    name: str
    text: str
    on_request: bool = False


@dataclass(frozen=True)
class Entry:
    """The facts of a backend.

    Attributes:
        name: as --offload and `impl` take it.
        title: as its vendor writes it.
        order: `auto` tries backends with a lower one first.
        kinds: of TVM targets that it computes for: "llvm", "cuda".
        used_on: the same in words, for a refusal: "CPUs".
        dtypes: element types of operands, each with the library's number of it.
        epilogues: for each direction that it computes, the fields of `Epilogue` that one call takes.
        extra: of pyproject.toml, which installs it.
        requirements: of the extra, without the environment marker; extras: other extras that it includes.
        files: (package, end of a path) of each file that must be installed.
        processors: machines that its packages are for; empty for any.
        marker: of its tests.
        library_package: the package whose version `bench` records, if it has one.
        layout: the only layout of a training step that it computes, as --layout takes it; None for any.
        variable: the environment variable of its own settings, if it has one.
        setting: an environment variable that is set while the runtime is loaded, unless the user has set it.
    """

    name: str
    title: str
    order: int
    kinds: tuple[str, ...]
    used_on: str
    dtypes: Mapping[str, int]
    epilogues: Mapping[str, tuple[str, ...]]
    extra: str
    requirements: tuple[str, ...]
    marker: Marker
    extras: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    processors: tuple[str, ...] = ("x86_64",)
    library_package: str | None = None
    layout: str | None = None
    variable: str | None = None
    setting: tuple[str, str] | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions that it computes."""
        return tuple(self.epilogues)

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"pip install 'tvm-convgrad[{self.extra}]'"


@dataclass(frozen=True)
class Engine:
    """What a library uses for one call.

    Attributes:
        implementation: the library's own name of it.
        detail: what else there is to know, in words: formats, how many primitives, whether it is deterministic.
        workspace: bytes; None where that is known at run time only.
    """

    implementation: str
    detail: str
    workspace: int | None


class Backend(ABC):
    """A vendor's library: which calls it takes, and the runtime that computes them."""

    entry: Entry
    run_function: str
    """The global function of its runtime that computes: (pointer to the numbers of a call, tensors...)."""

    @property
    def name(self) -> str:
        """As --offload and `impl` take it."""
        return self.entry.name

    def unavailable(self, target: Target | None) -> str:
        """Why programs for a target cannot use it at all, with the remedy; empty if they can.

        Args:
            target: None for the machine alone, whatever the target.
        """
        entry = self.entry
        if target is not None and target.kind.name not in entry.kinds:
            return f"the target is {target.kind.name}; {entry.title} is used on {entry.used_on}"
        reason = self.target_refusal(target) if target is not None else ""
        return reason or self._platform_refusal() or self.missing()

    def target_refusal(self, target: Target) -> str:
        """Why a target of one of its kinds is not one that it computes for, or nothing."""
        return ""

    def missing(self) -> str:
        """What of it is not installed, with the remedy, or nothing."""
        for package, file in self.entry.files:
            if installed_file(package, file) is None:
                return f"not installed (the package {package} with {file}): {self.entry.install}"
        return ""

    def require_installed(self) -> None:
        """Raise SetupError, with the remedy, if its runtime cannot be built here."""
        reason = self.missing()
        if reason:
            raise SetupError(f"the runtime for {self.name} cannot be built: {reason}")

    def _platform_refusal(self) -> str:
        system, machine, processors = platform.system(), platform.machine(), self.entry.processors
        if system == "Linux" and (not processors or machine in processors):
            return ""
        wanted = f"Linux on {' or '.join(processors)}" if processors else "Linux"
        return f"its packages are for {wanted}, and this is {system} on {machine}"

    @abstractmethod
    def refusal(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> str:
        """Why it does not compute a direction of a problem, by its rules; empty if it does. Needs no library."""

    @abstractmethod
    def engine(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> Engine | str:
        """What the library uses for a target (a CPU: this machine's), or why nothing. Builds and loads the runtime.

        Raises:
            SetupError: the runtime cannot be built.
        """

    @abstractmethod
    def numbers(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> list[int]:
        """The call as the runtime reads it."""

    @abstractmethod
    def digest(self) -> str:
        """Of what its runtime is made from; empty where it is not installed."""

    @abstractmethod
    def version(self) -> str:
        """The library's own version, once the runtime is loaded."""

    @abstractmethod
    def library(self) -> Path:
        """The runtime's library, built if it was not.

        Raises:
            SetupError: a package or the compiler is missing.
        """

    def load(self, library: Path | None = None) -> None:
        """Load the runtime into the process, unless one is there already.

        Args:
            library: None: of this machine, built if it was not.

        Raises:
            SetupError: it cannot be built or loaded.
        """
        settings = dict([self.entry.setting] if self.entry.setting else [])
        libraries.load(self.name, library or self.library(), self.run_function, settings)

    def tuned(self, tunings: Path | None) -> AbstractContextManager[None]:
        """A context in which calls that are compiled take what was tuned for this library.

        Args:
            tunings: the file of tuned tilings, beside which that is kept; None takes nothing tuned.
        """
        return nullcontext()

    def rounds_float32(self) -> bool:
        """Whether its settings let float32 operands be rounded to tf32 (10 bits of mantissa)."""
        return False


__all__ = ["Backend", "Engine", "Entry", "Marker"]
