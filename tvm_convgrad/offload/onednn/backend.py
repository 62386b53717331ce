# SPDX-License-Identifier: Apache-2.0
"""The backend of oneDNN: its runtime, and a call as plain numbers."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from tvm.target import Target

from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.problem import ConvProblem, planned
from tvm_convgrad.offload import host, libraries
from tvm_convgrad.offload.calls import call_numbers
from tvm_convgrad.offload.contract import Backend, Engine
from tvm_convgrad.offload.libraries import installed_file
from tvm_convgrad.offload.onednn import rules
from tvm_convgrad.offload.onednn.entry import ENTRY, HEADERS, LIBRARY
from tvm_convgrad.threads import intended_threads

INTERFACE = 2
"""Of the runtime: of the numbers that it reads, and of the meaning of its functions."""

FILE = host.file_of(ENTRY.name, INTERFACE)
_FORMATS = (rules.ANY, rules.PLAIN_DATA)
_SOURCES = Path(__file__).parent / "runtime"


class OneDnn(Backend):
    """oneDNN for CPUs, of the packages onednn-cpu-gomp and onednn-devel-cpu-gomp."""

    entry = ENTRY
    run_function = f"convgrad.onednn.{INTERFACE}.run"

    def target_refusal(self, target: Target) -> str:
        """Why it is not used on a CPU: its packages are for x86-64."""
        triple = str(target.attrs.get("mtriple", "") or "")
        foreign = triple and not triple.startswith("x86_64")
        return f"the target is for {triple}; its packages are for x86-64" if foreign else ""

    def refusal(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> str:
        """Why it does not compute a direction of a problem, by its rules."""
        return rules.refusal(direction, problem, epilogue)

    def engine(
        self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None = None
    ) -> Engine | str:
        """What oneDNN uses on this CPU; for any batch, what it would for some batch."""
        return _engine(direction, planned(problem), epilogue, intended_threads(), self.library())

    def numbers(
        self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None = None
    ) -> list[int]:
        """The fields of Spec in runtime/spec.h."""
        formats = _FORMATS.index(rules.formats(direction, problem))
        return [*call_numbers(direction, problem, epilogue, ENTRY.dtypes), formats, int(epilogue.bias_accumulate)]

    def digest(self) -> str:
        """The key of the runtime's folder in the cache."""
        return "" if self.missing() else _recipe()[0]

    def version(self) -> str:
        """The version that oneDNN itself states."""
        return f"oneDNN {host.ask(self.name, INTERFACE, 'version')}"

    def library(self) -> Path:
        """The runtime, built if it was not."""
        self.require_installed()
        key, options = _recipe()
        return libraries.build(self.name, key, FILE, _SOURCES / "runtime.cc", options)


BACKEND = OneDnn()


@lru_cache(maxsize=1)
def _recipe() -> tuple[str, tuple[str, ...]]:
    """The key of the runtime that calls the installed oneDNN, and the options that compile it."""
    found, header = installed_file(*LIBRARY), installed_file(*HEADERS)
    assert found is not None
    assert header is not None
    packages, links = (LIBRARY[0], HEADERS[0]), (f"-l:{found.name}",)
    return libraries.recipe(
        _SOURCES, packages=packages, includes=[header.parents[2]], libraries=[found.parent], links=links
    )


@lru_cache(maxsize=4096)
def _engine(direction: str, problem: ConvProblem, epilogue: Epilogue, threads: int, library: Path) -> Engine | str:
    BACKEND.load(library)
    numbers = BACKEND.numbers(direction, problem, epilogue, None)
    try:
        text = host.ask(BACKEND.name, INTERFACE, "describe", numbers, threads)
    except ValueError as error:
        return f"the library has nothing for it on this CPU: {str(error).splitlines()[0]}"
    implementation, primitives, workspace = text.split(";")
    if implementation.startswith("ref"):
        return "the library has only its slow reference implementation for it on this CPU"
    detail = f"formats {rules.formats(direction, problem)}, {primitives} primitives"
    return Engine(implementation, detail, int(workspace))


__all__ = ["BACKEND", "FILE", "INTERFACE", "OneDnn"]
