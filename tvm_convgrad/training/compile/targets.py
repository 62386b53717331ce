# SPDX-License-Identifier: Apache-2.0
"""The targets that training steps are compiled for, as the command line names them."""

from __future__ import annotations

import json
import re

import tvm

from tvm_convgrad.codegen.hardware import cores_of
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.targets import NAMED, named_target, refuse_unknown_cpu

_OTHER_SYSTEMS = re.compile(r"[\w.+-]*(windows|macos|darwin)[\w.+-]*", re.IGNORECASE)


def parse_target(text: str, gpus: bool = False) -> tvm.target.Target:
    """A TVM target: "llvm" (any CPU of this architecture), "native" (this CPU), one of `NAMED`, or TVM's JSON form.

    The text of the target that is returned has all that kernels depend on; "native" becomes this CPU's name and number
    of cores.

    Args:
        gpus: whether it may be an NVIDIA GPU as well: "cuda:sm_90", or "cuda", the first one of this machine.

    Raises:
        UnsupportedError: no such target, or not one that may be.
        SetupError: "cuda" on a machine without a GPU.
    """
    named = named_target(text)
    if gpus and text == "cuda":
        try:
            return local_target()
        except SetupError as error:
            raise SetupError(f"{error} To build for another, name its architecture: --target cuda:sm_90.") from error
    if named is not None and (gpus or named.kind.name == "llvm"):
        return named
    if _OTHER_SYSTEMS.fullmatch(text):
        raise _for_another_system(text)
    try:
        described = json.loads(text) if text.lstrip().startswith("{") else {"kind": "cuda" if named else text}
        kind = str(described["kind"])
        # Targets that are not CPUs are not even made: TVM would look for their toolkits and complain.
        known = kind == "llvm" or kind not in tvm.target.Target.list_kinds()
        target = tvm.target.Target(text if described == {"kind": text} else described) if known else None
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        raise UnsupportedError(
            f"target {text!r} is not one of TVM; use llvm, native, {', '.join(NAMED)}, or JSON such as "
            f'{{"kind": "llvm", "mcpu": "haswell"}} ({str(error).splitlines()[0]})'
        ) from error
    if target is None or target.kind.name != "llvm":
        raise UnsupportedError(
            f"target {text!r} is not a CPU; use llvm or native"
            + (
                ", or an NVIDIA GPU: cuda (this machine's), or by its architecture, such as cuda:sm_90."
                if gpus
                else "."
            )
        )
    if "linux" not in str(target.attrs.get("mtriple") or "linux"):
        raise _for_another_system(text)
    cores_of(target)  # raises if the number makes no sense
    refuse_unknown_cpu(str(target), repr(text))
    return target


def _for_another_system(text: str) -> UnsupportedError:
    """The error for a target whose system is not Linux."""
    return UnsupportedError(
        f"target {text!r}: steps are built for Linux only. Artifacts are ELF files, and the C library uses Linux's "
        "functions, although TVM's packages have its runtime for macOS on arm64 and for Windows on amd64; use "
        f"{', '.join(NAMED)}, or a triple of Linux in TVM's JSON form."
    )
