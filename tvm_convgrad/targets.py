# SPDX-License-Identifier: Apache-2.0
"""Targets as users give them, and the instruction sets that code for them needs."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import TypeAlias

from tvm.target import Target, codegen

from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.cpu_features import FLAGS, TILE_FEATURES
from tvm_convgrad.core.errors import UnsupportedError

TargetLike: TypeAlias = str | Mapping[str, object] | Target
"""A TVM target: its name, its JSON, or the object."""

NAMED: dict[str, dict[str, object]] = {
    "aarch64-linux": {"mtriple": "aarch64-linux-gnu"},
    "armv8.2-a+fp16+dotprod": {"mtriple": "aarch64-linux-gnu", "mattr": ["+v8.2a", "+fullfp16", "+dotprod"]},
    **{f"x86-64-v{n}-linux": {"mtriple": "x86_64-linux-gnu", "mcpu": f"x86-64-v{n}"} for n in (2, 3, 4)},
}
"""CPUs by name, whatever machine builds for them: attributes of TVM's target of kind llvm."""
_GPU = re.compile(r"cuda:(sm_\d+[af]?)")


def named_target(text: str) -> Target | None:
    """The target of a name that TVM lacks: "native", this CPU; "cuda:sm_90", a GPU; one of `NAMED`; None of others."""
    gpu = _GPU.fullmatch(text)
    if gpu is not None:
        return Target({"kind": "cuda", "arch": gpu[1]})
    if text == "native":
        return native_target()
    return Target({"kind": "llvm", **NAMED[text]}) if text in NAMED else None


def target_of(given: TargetLike, operator: str) -> Target:
    """The TVM target that a user gives: an object, TVM's JSON, or a name: TVM's, "native", "cuda:sm_90", of `NAMED`.

    Args:
        operator: the function that takes it, for the message.

    Raises:
        UnsupportedError: there is no such target, or LLVM does not know its CPU, for which TVM would take any.
    """
    if isinstance(given, Target):
        return _with_known_cpu(given, given)
    named = named_target(given) if isinstance(given, str) else None
    if named is not None:
        return named
    try:
        target = Target(given if isinstance(given, str) else dict(given))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UnsupportedError(
            f"{operator}: target = {given!r} is not one of TVM ({str(error).splitlines()[0]}); use 'llvm', 'native', "
            f"{', '.join(map(repr, NAMED))}, 'cuda:sm_90' or another GPU, or a dictionary such as "
            '{"kind": "llvm", "mcpu": "haswell"}.'
        ) from error
    return _with_known_cpu(target, given)


def _with_known_cpu(target: Target, given: TargetLike) -> Target:
    if target.kind.name == "llvm":
        refuse_unknown_cpu(str(target), repr(given))
    return target


@lru_cache(maxsize=64)
def refuse_unknown_cpu(described: str, shown: str) -> None:
    """Refuse a target (JSON) of whose CPU LLVM knows nothing: it would compile for any CPU, with a line in its log.

    Args:
        shown: the target as the user gives it.

    Raises:
        UnsupportedError: there is no such CPU.
    """
    target = Target(described)
    cpu = str(target.attrs.get("mcpu") or "")
    known = sorted(map(str, codegen.llvm_get_cpu_archlist(target)))
    if not cpu or cpu in known:
        return
    any_cpu = Target({**json.loads(described), "mcpu": "generic"})
    # An alias, such as apple-m1, is in no list, but has features of its own.
    if set(codegen.llvm_get_cpu_features(target)) == set(codegen.llvm_get_cpu_features(any_cpu)):
        similar = difflib.get_close_matches(cpu, known, 3) or known[-3:]
        raise UnsupportedError(f"target {shown}: LLVM has no CPU {cpu!r}; it has {', '.join(similar)} and others.")


def required_features(target: Target) -> list[str]:
    """The instruction sets beyond the architecture's base that LLVM may use for `target`.

    Those of tiles are not among them: only kernels that request tiles use them, and they run without.
    """
    if target.kind.name == "cuda":
        target = Target("llvm")  # of the host
    return sorted(set(map(str, codegen.llvm_get_cpu_features(target))) & FLAGS.keys() - TILE_FEATURES)


__all__ = ["NAMED", "TargetLike", "named_target", "refuse_unknown_cpu", "required_features", "target_of"]
