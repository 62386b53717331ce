# SPDX-License-Identifier: Apache-2.0
"""What computes a convolution of a Relay program apart from its strategy: the vendor libraries, and plain C."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import tvm

from relay_ops.c_loops import refuses
from relay_ops.patterns import FORMS, FORWARD_OPS, Form, Match, direction_of
from tvm_convgrad.core.catalogue import FORWARD
from tvm_convgrad.core.epilogue import NO_EPILOGUE
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.offload.registry import ENTRIES, NAMES, backend, names_of_kind
from tvm_convgrad.offload.registry import verdict as library_verdict

C = "c"
"""The backend that needs no library: C source of loops (relay_ops.c_loops)."""

ALL = (*NAMES, C)

COMPILER = "tvm_convgrad"
"""Of regions of C: their Compiler attribute, and relay.ext.<name>; a library's name follows it for its regions."""

_C_TARGETS = ("llvm", "c")

STRATEGY = "the strategy comes first on this target; name the backend to have it"
"""Why a backend that could be taken is not, unless it is asked for."""


def compiler_of(name: str) -> str:
    """The compiler of a backend's regions."""
    return COMPILER if name == C else f"{COMPILER}_{name}"


def default_names(target: tvm.target.Target) -> tuple[str, ...]:
    """The backends of a target that are taken unasked, as nothing is faster there.

    On CPUs that TVM has LLVM for, strategies are; "c" is a target for which it makes C itself.
    """
    kind = target.kind.name
    if kind == "llvm":
        return ()
    return (C,) if kind == C else tuple(name for name in names_of_kind(kind) if not backend(name).unavailable(target))


def require(names: Sequence[str], target: tvm.target.Target) -> None:
    """Raise unless each of the backends can be used for a target.

    Raises:
        UnsupportedError: an unknown name.
        SetupError: one is not installed, or is not for the target.
    """
    for name in names:
        if name not in ALL:
            raise UnsupportedError(f"offload: there is no backend {name!r}; there is {', '.join(ALL)}")
        reason = unavailable(name, target)
        if reason:
            raise SetupError(f"offload to {name}: {reason}")


def unavailable(name: str, target: tvm.target.Target) -> str:
    """Why programs for a target cannot use a backend at all, or nothing."""
    if name != C:
        return backend(name).unavailable(target)
    kind = target.kind.name
    return "" if kind in _C_TARGETS else f"the target is {kind}; C loops are for CPUs"


def forms_of(name: str, op: str) -> tuple[Form, ...]:
    """The forms of an operator that a backend's calls can have, by its facts."""
    direction = FORWARD.name if op in FORWARD_OPS else direction_of(op).name
    able = ("accumulate",) if name == C else ENTRIES[name].epilogues.get(direction_of(op).name, ())
    return tuple(form for form in FORMS[direction] if set(form) <= set(able))


def verdict(name: str, match: Match, target: tvm.target.Target) -> Engine | str:
    """What a backend uses for a match in a program for a target, or why it does not take it."""
    if name != C:
        return library_verdict(name, match.direction.name, match.problem, match.epilogue, target)
    reason = unavailable(name, target) or refuses(match.problem)
    return reason or Engine("loops", "C++ source, compiled with the library", 0)


@dataclass(frozen=True)
class Verdict:
    """What becomes of one convolution of a module, and why.

    Attributes:
        op: the operator.
        direction, problem: what it computes; the problem's descriptor, empty if it is not a convolution.
        backend: that takes it; empty if the strategy keeps it.
        engine: what that backend uses, in words.
        refused: the reason of each backend that was tried before, or that there is besides.
    """

    op: str
    direction: str
    problem: str
    backend: str = ""
    engine: str = ""
    refused: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        taken = f"{self.backend}: {self.engine}" if self.backend else "the strategy"
        reasons = "".join(f"\n    {name}: {reason}" for name, reason in self.refused.items())
        return f"{self.op} {self.problem}: {taken}{reasons}"


def judge(
    match: Match, names: Sequence[str], target: tvm.target.Target, forward: bool, others: Sequence[str] = ()
) -> Verdict:
    """The verdict on a convolution without what follows it.

    Args:
        match: the convolution.
        names: backends in order of preference.
        target: of the program.
        forward: whether C takes stock convolutions.
        others: backends that are not to be taken, whose reasons are wanted too.
    """
    op = str(match.call.op.name)
    refused: dict[str, str] = {}
    bare = match._replace(epilogue=NO_EPILOGUE)
    for name in names:
        found = verdict(name, bare, target) if takes(name, op, forward) else FORWARD_REASON
        if isinstance(found, Engine):
            words = f"{found.implementation}, {found.detail}" if found.detail else found.implementation
            return Verdict(op, match.direction.name, match.problem.descriptor, name, words, refused)
        refused[name] = found
    for name in others:
        refused[name] = _reason_besides(name, bare, target)
    return Verdict(op, match.direction.name, match.problem.descriptor, refused=refused)


FORWARD_REASON = "stock convolutions stay with Relay, whose schedules do them faster, unless forward=True"
"""Why C takes no stock convolution."""


def takes(name: str, op: str, forward: bool) -> bool:
    """Whether an operator is one that a backend is asked about: C only where it is told to takes stock convolutions."""
    return name != C or op not in FORWARD_OPS or forward


def _reason_besides(name: str, match: Match, target: tvm.target.Target) -> str:
    """Why a backend that is not taken by itself would refuse, or that it is not asked."""
    reason = unavailable(name, target)
    if not reason and name == C:
        reason = refuses(match.problem) or ""
    elif not reason:
        reason = backend(name).refusal(match.direction.name, match.problem, match.epilogue, target)
    return reason or STRATEGY


__all__ = [
    "ALL",
    "COMPILER",
    "STRATEGY",
    "C",
    "Verdict",
    "compiler_of",
    "default_names",
    "forms_of",
    "judge",
    "require",
    "takes",
    "unavailable",
    "verdict",
]
