# SPDX-License-Identifier: Apache-2.0
"""The backend of cuDNN: its runtime, and a call as plain numbers with a ranked list of engines."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from tvm.target import Target

from tvm_convgrad.core.epilogue import Epilogue
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.tuned import TUNED
from tvm_convgrad.offload import host, libraries
from tvm_convgrad.offload.calls import call_numbers
from tvm_convgrad.offload.contract import Backend, Engine
from tvm_convgrad.offload.cuda import local_name
from tvm_convgrad.offload.cudnn import rules
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.devices import arch_of, properties_of, version_of
from tvm_convgrad.offload.cudnn.engines import Listed, engines, load_driver
from tvm_convgrad.offload.cudnn.entry import CRT, ENTRY, GRAPH, LIBRARY, RUNTIME
from tvm_convgrad.offload.cudnn.settings import VARIABLE, settings
from tvm_convgrad.offload.cudnn.store import EngineStore, Winner, beside, only_tuned, store_in_use, use_engines
from tvm_convgrad.offload.libraries import installed_file

if TYPE_CHECKING:
    import tvm_ffi

INTERFACE = 2
"""Of the runtime: of the numbers that it reads, and of the meaning of its functions."""

FILE = host.file_of(ENTRY.name, INTERFACE)

RANKED = 4
"""Engines that a program carries for each call: the first that this GPU's cuDNN still has is taken."""

_SOURCES = Path(__file__).parent / "runtime"


class CuDnn(Backend):
    """cuDNN 9 for CUDA 13, of the package nvidia-cudnn-cu13."""

    entry = ENTRY
    run_function = f"convgrad.cudnn.{INTERFACE}.run"

    def refusal(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> str:
        """Why it does not compute a direction of a problem, by its rules."""
        return rules.refusal(direction, problem, epilogue, version_of(arch_of(target)))

    def engine(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> Engine | str:
        """The tuned engine, or what cuDNN's heuristics put first for the target's GPU.

        For a batch or GPU that is not known, the heuristics choose when a program runs.
        """
        arch = arch_of(target)
        ranked = self._ranked(Call(direction, problem, epilogue), arch)
        if isinstance(ranked, str):
            return ranked
        winner, usable, why = ranked
        if not usable:
            self.library()
            return Engine("by its heuristics", "; ".join(filter(None, (why, "engine chosen at run time"))), None)
        notes = ", ".join(("deterministic" if settings().deterministic else "", *usable[0].notes)).strip(", ")
        words = [notes, f"{len(usable)} engines ranked for {arch}"]
        if winner is not None:
            words.insert(0, f"{TUNED}: {winner.gain:.2f}x the heuristics' first on {winner.device}")
        return Engine(str(usable[0]), "; ".join(filter(None, [why, *words])), usable[0].workspace)

    def engines(
        self, direction: str, problem: ConvProblem, epilogue: Epilogue, arch: str, most: int
    ) -> tuple[Listed, ...] | str:
        """Engines for a GPU of DEVICES, best first, up to `most` usable ones; or why cuDNN refuses the call as such.

        Raises:
            SetupError: the runtime cannot be built.
        """
        properties = properties_of(arch)
        assert properties is not None, arch
        self._load()
        numbers = tuple(self._fixed(direction, problem, epilogue))
        return engines(numbers, properties, most, INTERFACE)

    def local_engines(self, call: Call, most: int) -> tuple[Listed, ...] | str:
        """As `engines`, for the first GPU of this machine."""
        self._load()
        numbers = tuple(self._fixed(call.direction, call.problem, call.epilogue))
        return engines(numbers, "", most, INTERFACE)

    def numbers(self, direction: str, problem: ConvProblem, epilogue: Epilogue, target: Target | None) -> list[int]:
        """The fields of Spec in runtime/spec.h, then cuDNN's version, the GPU's SM and the engines ranked for them.

        Raises:
            SetupError: CONVGRAD_CUDNN is `cached`, and no engine was tuned for the call.
        """
        call, arch = Call(direction, problem, epilogue), arch_of(target)
        ranked = self._ranked(call, arch)
        winner, usable, why = (None, [], ranked) if isinstance(ranked, str) else ranked
        if only_tuned() and winner is None:
            raise SetupError(
                f"{VARIABLE} is cached, and no engine is tuned for {call} on {arch} with this cuDNN and these "
                f"settings{f' ({why})' if why else ''}; run `convgrad tune MODEL --target cuda:{arch} --cudnn` on "
                "such a GPU."
            )
        return self.numbers_of(call, arch, usable)

    def numbers_of(self, call: Call, arch: str, ranked: Sequence[Listed]) -> list[int]:
        """As `numbers`, with given engines."""
        fixed = self._fixed(call.direction, call.problem, call.epilogue)
        if not ranked:
            return [*fixed, 0, 0, 0]
        numbers = [number for listed in ranked for number in _encoded(listed)]
        return [*fixed, self.number(), version_of(arch), len(ranked), *numbers]

    def number(self) -> int:
        """cuDNN's version as it states it, such as 92400."""
        self._load()
        return int(host.ask(self.name, INTERFACE, "version"))

    def function(self, name: str) -> tvm_ffi.Function:
        """A global function of the runtime."""
        import tvm_ffi  # a TVM with Relay has none

        self._load()
        return tvm_ffi.get_global_func(f"convgrad.cudnn.{INTERFACE}.{name}")

    def digest(self) -> str:
        """The key of the runtime's folder in the cache."""
        return "" if self.missing() else _recipe()[0]

    def version(self) -> str:
        """The version that cuDNN itself states."""
        number = self.number()
        return f"cuDNN {number // 10000}.{number // 100 % 100}.{number % 100}"

    def library(self) -> Path:
        """The runtime, built if it was not."""
        self.require_installed()
        key, options = _recipe()
        return libraries.build(self.name, key, FILE, _SOURCES / "runtime.cc", options)

    def tuned(self, tunings: Path | None) -> AbstractContextManager[None]:
        """A context in which calls take the tuned engines that are kept beside a file of tilings."""
        return use_engines(None if tunings is None else EngineStore(beside(tunings)))

    def rounds_float32(self) -> bool:
        """Whether CONVGRAD_CUDNN allows tf32."""
        return settings().tf32

    def _fixed(self, direction: str, problem: ConvProblem, epilogue: Epilogue) -> list[int]:
        chosen = settings()
        flags = map(int, (chosen.deterministic, chosen.tf32, chosen.transforms, chosen.may_compile(problem)))
        return [*call_numbers(direction, problem, epilogue, ENTRY.dtypes), *flags, chosen.workspace]

    def _load(self) -> None:
        load_driver(_stand_in)
        self.load()

    def _ranked(self, call: Call, arch: str) -> tuple[Winner | None, list[Listed], str] | str:
        """The tuned engine if there is one, engines best first, and why there is no tuned one if that is worth a word.

        Without engines the heuristics choose at run time. A text is why cuDNN does not compute the call.
        """
        if isinstance(call.problem.batch, str):
            return None, [], "its batch is known when it runs"
        winner, why = self._winner(call, arch)
        properties = properties_of(arch)
        if properties is None:
            return winner, [winner.engine] if winner is not None else [], why
        found = self.engines(call.direction, call.problem, call.epilogue, arch, RANKED)
        if isinstance(found, str):
            return f"the library refuses it: {found}"
        store = store_in_use()
        broke = store.broke(call, arch, self.number()) if store is not None else frozenset()
        usable = [each for each in found if not each.refusal and (each.index, each.knobs) not in broke]
        if broke and not usable:
            return f"each engine on {arch} that may be used broke the GPU when it was tuned"
        if winner is not None:
            others = [each for each in usable if (each.index, each.knobs) not in winner.thrown_out]
            first = (winner.engine.index, winner.engine.knobs)
            others = [each for each in others if (each.index, each.knobs) != first]
            return winner, [winner.engine, *others][:RANKED], why
        return (None, usable, why) if usable else _why_none(found, arch)

    def _winner(self, call: Call, arch: str) -> tuple[Winner | None, str]:
        """The tuned engine of a call, if programs are to take one and it was tuned; or else why there is none."""
        store = store_in_use()
        if store is None or not len(store):
            return None, ""
        number, chosen = self.number(), settings()
        devices = store.devices(call, arch, number, chosen)
        if len(devices) > 1:  # which of them is meant, only a machine with one can say
            here = local_name(arch)
            if here not in devices:
                return (
                    None,
                    f"tuned on {' and on '.join(devices)}, of which none is here: build on the one that is meant",
                )
            devices = [here]
        winner = store.winner(call, arch, number, chosen, devices[0]) if devices else None
        if winner is not None and (winner.engine.index, winner.engine.knobs) in store.broke(call, arch, number):
            return None, f"the tuned {winner.engine} broke the GPU when it was tuned with other settings"
        refused = self._refused(call, arch, winner.engine) if winner is not None else ""
        return (None, f"the tuned {winner.engine} is refused: {refused}") if winner and refused else (winner, "")

    def _refused(self, call: Call, arch: str, engine: Listed) -> str:
        """Why cuDNN makes no plan of an engine for a GPU, or nothing; for an unknown GPU that is seen when it runs."""
        properties = properties_of(arch)
        if properties is None:
            return ""
        numbers = self.numbers_of(call, arch, [engine])
        self._load()
        _, _, reason = host.ask(self.name, INTERFACE, "remade", numbers, properties).partition("|")
        return reason.strip()


def _stand_in() -> Path:
    """What stands in for the driver's library, built if it was not."""
    source = _SOURCES / "no_driver.cc"
    key = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    return libraries.build("no-driver", key, "libcuda.so.1", source, ())


def _why_none(found: tuple[Listed, ...], arch: str) -> str:
    """The reasons against each engine, each once."""
    reasons = "; ".join(dict.fromkeys(f"engine {each.index}: {each.refusal}" for each in found))
    return f"no engine on {arch} may be used: {reasons}" if found else f"the library has no engine for it on {arch}"


def _encoded(listed: Listed) -> list[int]:
    return [listed.index, len(listed.knobs), *(number for knob in listed.knobs for number in knob)]


@lru_cache(maxsize=1)
def _recipe() -> tuple[str, tuple[str, ...]]:
    """The key of the runtime, and the options that compile it. It opens libcudnn by its soname, so links none of it."""
    found, graph, runtime, crt = (installed_file(*each) for each in (LIBRARY, GRAPH, RUNTIME, CRT))
    assert found is not None
    assert graph is not None
    assert runtime is not None
    assert crt is not None
    includes = (graph.parent, runtime.parent, crt.parents[1])
    return libraries.recipe(
        _SOURCES, packages=[LIBRARY[0]], includes=includes, libraries=[found.parent], links=["-ldl"]
    )


BACKEND = CuDnn()

__all__ = ["BACKEND", "FILE", "INTERFACE", "RANKED", "CuDnn"]
