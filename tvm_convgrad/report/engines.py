# SPDX-License-Identifier: Apache-2.0
"""The engines that cuDNN has for each convolution of a step on a GPU, as it says itself without one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.kernels.epilogue import Epilogue
from tvm_convgrad.offload.common import require
from tvm_convgrad.offload.cudnn import rules
from tvm_convgrad.offload.cudnn.backend import CuDnn
from tvm_convgrad.offload.cudnn.devices import DEVICES, arch_of, version_of
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.report.tables import byte_count, print_table

MOST = 8
"""Usable engines that are listed for each convolution."""


def describe_engines(entries: Iterable[dict[str, Any]], target: Any) -> list[dict[str, Any]]:
    """One entry for each distinct convolution of `report.gradients`' entries, plain enough for JSON.

    op, descriptor, fused  as there, with `fused` what cuDNN can do besides
    device                 the GPU that the answers are for
    refusal                why cuDNN computes it not at all, by our rules or its own word; empty otherwise
    engines                index, workspace, notes, knobs, refusal of each, best first

    Raises:
        SetupError: cuDNN is not installed.
        UnsupportedError: the target is no GPU of which the properties are known.
    """
    require(["cudnn"], target)
    arch = arch_of(target)
    if arch not in DEVICES:
        raise UnsupportedError(f"--cudnn: nothing is known of GPUs of {arch}; use cuda: with {', '.join(DEVICES)}")
    found = {}
    for entry in entries:
        key = (entry["op"], entry["descriptor"], tuple(entry["fused"]))
        if key not in found:
            found[key] = _described(*key, arch)
    return list(found.values())


def _described(op: str, descriptor: str, fused: tuple[str, ...], arch: str) -> dict[str, Any]:
    backend, problem, face = CuDnn(), ConvProblem.from_descriptor(descriptor), face_of(op)
    version = version_of(arch)
    epilogue = Epilogue(**dict.fromkeys(fused, True))
    if fused and rules.refusal(
        face, problem, epilogue, version
    ):  # another library's, or a kernel's: cuDNN has them alone
        epilogue, fused = Epilogue(), ()
    refusal = rules.refusal(face, problem, epilogue, version)
    listed: Any = ()
    if not refusal and not problem.is_static:
        refusal = "its extents are known at run time only; cuDNN is asked then"
    elif not refusal:
        listed = backend.engines(face, problem, epilogue, arch, MOST)
        listed, refusal = ((), listed) if isinstance(listed, str) else (listed, "")
    return {
        "op": op,
        "descriptor": descriptor,
        "fused": list(fused),
        "device": DEVICES[arch].name,
        "refusal": refusal,
        "engines": [asdict(each) for each in listed],
    }


def face_of(op: str) -> str:
    """The face that an operator computes; a transposed convolution is the dgrad of its problem."""
    if op.endswith("_backward_weight"):
        return "backward_weight"
    return "backward_data" if op.endswith(("_backward_data", "_transpose")) else "forward"


def show_engines(entries: Sequence[dict[str, Any]]) -> None:
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


__all__ = ["MOST", "describe_engines", "face_of", "show_engines"]
