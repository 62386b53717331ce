# SPDX-License-Identifier: Apache-2.0
"""The list of the engines that cuDNN has for each convolution of a step on a GPU; no GPU is needed for it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tvm.target import Target

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.offload.cudnn import rules
from tvm_convgrad.offload.cudnn.backend import CuDnn
from tvm_convgrad.offload.cudnn.devices import DEVICES, arch_of, version_of
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.offload.registry import require
from tvm_convgrad.report.tables import byte_count, print_table

Entry = dict[str, Any]
"""A convolution, with keys that are documented where the entry is made."""

MOST = 8
"""Usable engines that are listed for each convolution."""


def describe_engines(entries: Iterable[Entry], target: Target) -> list[Entry]:
    """One entry for each distinct convolution, plain enough for JSON.

    Args:
        entries: of `report.gradients.describe_convolutions`.
        target: of a GPU.

    Returns:
        Entries with the keys
            op, descriptor: of the convolution.
            fused: what cuDNN computes in the same call, such as "bias".
            device: the name of the GPU.
            refusal: why cuDNN does not compute it at all, by our rules or its own message; empty otherwise.
            engines: index, workspace, notes, knobs and refusal of each engine, best first.

    Raises:
        SetupError: cuDNN is not installed.
        UnsupportedError: the target is not a GPU of which the properties are known.
    """
    require(["cudnn"], target)
    arch = arch_of(target)
    if arch not in DEVICES:
        raise UnsupportedError(
            f"--cudnn: the properties of GPUs of {arch} are not known; use --target cuda: with {', '.join(DEVICES)}"
        )
    found = {}
    for entry in entries:
        key = (entry["op"], entry["descriptor"], tuple(entry["fused"]))
        if key not in found:
            found[key] = _described(*key, arch)
    return list(found.values())


def _described(op: str, descriptor: str, fused: tuple[str, ...], arch: str) -> Entry:
    """The entry of one convolution."""
    backend, problem, direction = CuDnn(), ConvProblem.from_descriptor(descriptor), direction_of(op)
    version = version_of(arch)
    epilogue = Epilogue(**dict.fromkeys(fused, True))
    if fused and rules.refusal(direction, problem, epilogue, version):
        # a library or kernel that computes more fuses them: cuDNN computes the convolution alone
        epilogue, fused = Epilogue(), ()
    refusal = rules.refusal(direction, problem, epilogue, version)
    listed: Sequence[Listed] = ()
    if not refusal and not problem.is_static:
        refusal = "its extents are known at run time only, when cuDNN chooses an engine"
    elif not refusal:
        answer = backend.engines(direction, problem, epilogue, arch, MOST)
        if isinstance(answer, str):
            refusal = answer
        else:
            listed = answer
    return {
        "op": op,
        "descriptor": descriptor,
        "fused": list(fused),
        "device": DEVICES[arch].name,
        "refusal": refusal,
        "engines": [asdict(each) for each in listed],
    }


def direction_of(op: str) -> str:
    """The direction that an operator computes; a transposed convolution is the dgrad of its problem."""
    if op.endswith("_backward_weight"):
        return "backward_weight"
    return "backward_data" if op.endswith(("_backward_data", "_transpose")) else "forward"


def show_engines(entries: Sequence[Entry]) -> None:
    """Print the entries as one table."""
    rows = []
    for entry in entries:
        what = " + ".join([entry["op"], *entry["fused"]])
        if not entry["engines"]:
            rows.append((what, entry["descriptor"], "–", "", "", "", entry["refusal"] or "cuDNN has no engine"))
        for number, engine in enumerate(entry["engines"]):
            first = (what, entry["descriptor"]) if number == 0 else ("", "")
            knobs = " ".join(f"{key}={value}" for key, value in engine["knobs"])
            workspace = "–" if engine["refusal"] else byte_count(engine["workspace"])
            rows.append((*first, engine["index"], knobs, workspace, ", ".join(engine["notes"]), engine["refusal"]))
    device = entries[0]["device"] if entries else ""
    columns = ("operator", "problem", "engine", "knobs", "workspace", "notes", "not used, because")
    print_table(f"cuDNN's engines on {device}, best first", columns, rows, right=("engine", "workspace"))


__all__ = ["MOST", "describe_engines", "direction_of", "show_engines"]
