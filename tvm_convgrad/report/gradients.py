# SPDX-License-Identifier: Apache-2.0
"""The list of a step's convolutions: what computes each, with which tiling, what was refused, and what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from legalize.forms import DATA_FORMS, WEIGHT_FORMS
from relax_ops.lowering import Lowered
from tvm_convgrad.core.errors import ProblemError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.roofline import roofline
from tvm_convgrad.kernels.tuned import TUNED
from tvm_convgrad.offload.contract import Engine
from tvm_convgrad.report.matching import direction_of
from tvm_convgrad.report.tables import byte_count, print_item, print_json, print_lines, quantity

Entry = dict[str, Any]
"""A convolution, with the keys that `describe_convolutions` documents."""


def describe_convolutions(lowered: Iterable[Lowered]) -> list[Entry]:
    """One entry, plain enough for JSON, for each convolution, from what its legalization recorded.

    Returns:
        Entries with the keys
            op, descriptor: the operator and its problem; that of a transposed convolution is the one whose dgrad it is.
            kernel: what computes it: the kind of a generated kernel, "composition:…", "stock" for TVM's own operator,
                or a vendor library and its name of what it uses.
            fused: what it computes besides: "bias", "relu", "relu6", "accumulate" (adds to a tensor in place),
                "bias_grad", "bias_accumulate" (adds the bias gradient in place).
            reason: why it was chosen.
            plan: the tiling of a generated kernel, or formats and workspace of a library; empty otherwise.
            seconds: the cost model's estimate for one core; None where it has none.
            roofline: the share of the roofline (arithmetic or memory, by the model's constants) that this is.
            refused: the other implementations: {kernel, reason}.
            gflop, bytes: 2e-9 times its multiply-adds, and bytes of its three tensors, each moved once.
            per: what these two are of: "step", or "sample" where the batch is symbolic; "unknown" (and None for both)
                with other symbolic extents.
    """
    return [
        {
            "op": entry.op,
            "descriptor": entry.problem.descriptor,
            "kernel": entry.form,
            "fused": list(entry.fused),
            "reason": entry.choice.reason,
            "plan": _plan(entry),
            "refused": _refused(entry),
            **_estimate(entry),
            **_cost(entry.problem),
        }
        for entry in lowered
    ]


def _plan(entry: Lowered) -> str:
    engine = entry.choice.engine
    if not isinstance(engine, Engine):
        return str(entry.choice.plan or "")
    workspace = "chosen at run time" if engine.workspace is None else byte_count(engine.workspace)
    return f"{engine.detail}, workspace {workspace}"


def _refused(entry: Lowered) -> list[dict[str, str]]:
    """The other implementations, and why each was not taken."""
    refused = [{"kernel": name, "reason": reason} for name, reason in entry.choice.refused.items()]
    if entry.choice.is_kernel:
        return refused
    forms = {"backward_weight": WEIGHT_FORMS, "backward_data": DATA_FORMS} if "backward" in entry.op else {}
    taken = entry.form.removeprefix("composition:")
    for name, form in forms.get(entry.direction, {}).items():
        if name != taken:
            reason = form.refuses(entry.problem) or f"accepts it too, but {taken} is the default"
            refused.append({"kernel": f"composition:{name}", "reason": reason})
    return refused


def _estimate(entry: Lowered) -> Entry:
    seconds = entry.choice.estimate
    if not seconds or entry.machine is None or not entry.problem.is_static:
        return {"seconds": None, "roofline": None}
    return {"seconds": seconds, "roofline": roofline(entry.problem, entry.machine) / seconds}


def _cost(problem: ConvProblem) -> Entry:
    per = "step"
    if isinstance(problem.batch, str):
        problem, per = replace(problem, batch=1), "sample"
    try:
        return {"gflop": 2e-9 * problem.macs, "bytes": problem.bytes, "per": per}
    except ProblemError:  # symbolic spatial extents: there is no number to give
        return {"gflop": None, "bytes": None, "per": "unknown"}


def show_convolutions(model: str, gradients: Sequence[Entry], forward: Sequence[Entry], refused: bool = False) -> None:
    """Print the entries as two tables of one line each, with the shares in their floating-point work.

    Args:
        model: how the source is called.
        gradients, forward: of `describe_convolutions`.
        refused: print below the tables what else is known of each: tiling, costs, and what was not taken, and why.
    """
    tables = (("gradient operators", gradients), ("forward convolutions", forward))
    for title, entries in tables:
        if entries:
            _show(f"{title} of {model}", with_shares(entries))
    if refused:
        for title, entries in tables:
            for number, entry in enumerate(entries, 1):
                print_item(f"{title} #{number}: {entry['op']} {entry['descriptor']}", _details(entry))


def with_shares(entries: Sequence[Entry]) -> list[Entry]:
    """The entries with the `share` of each in their floating-point work."""
    total = sum(entry["gflop"] or 0.0 for entry in entries)
    return [
        entry | {"share": entry["gflop"] / total if entry["gflop"] is not None and total else None} for entry in entries
    ]


def print_convolutions_json(
    model: str,
    gradients: Sequence[Entry],
    forward: Sequence[Entry],
    built_for: Mapping[str, object],
    ranges: Mapping[str, Entry],
    engines: Sequence[Entry] | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Print JSON of the entries with `share`, the target and cores, the ranges of inputs that are indices, warnings of
    the model, and cuDNN's engines.
    """
    listed = {} if engines is None else {"cudnn": list(engines)}
    entries = {"gradients": with_shares(gradients), "forward": with_shares(forward), "warnings": list(warnings)}
    print_json({"source": model, **built_for, "ranges": ranges} | entries | listed)


def _show(title: str, rows: Sequence[Entry]) -> None:
    per = {row["per"] for row in rows} - {"step"}
    print_lines(
        title + (f" (costs per {', '.join(sorted(per))})" if per else ""),
        ("#", "dir", "problem", "kernel", "share", "ms", "roof"),
        (
            (
                number,
                direction_of(row["op"]),
                row["descriptor"],
                " + ".join([_short(row["kernel"]), *row["fused"]]),
                _percent(row["share"]),
                "–" if row["seconds"] is None else quantity(row["seconds"] * 1e3),
                "–" if row["roofline"] is None else f"{row['roofline']:.0%}",
            )
            for number, row in enumerate(rows, 1)
        ),
        right=("#", "share", "ms", "roof"),
    )


def _short(kernel: str) -> str:
    """The name of a kernel without its direction, which has a column of its own."""
    before, _, last = kernel.rpartition(" ")
    return before if before and last in ("forward", "dgrad", "wgrad") else kernel


def _details(entry: Entry) -> list[str]:
    """What the line of a convolution does not say."""
    cost = f"{quantity(entry['gflop'])} GFLOP, {byte_count(entry['bytes'])} a {entry['per']}"
    return [
        f"{' + '.join([entry['kernel'], *entry['fused']])}: {_tiling(entry)}",
        *([cost] if entry["gflop"] is not None else []),
        *(f"not taken: {each}" for each in _not_taken(entry["refused"])),
    ]


def _not_taken(refused: Sequence[dict[str, str]]) -> list[str]:
    """The implementations that were not taken, those with one reason together."""
    names: dict[str, list[str]] = {}
    for other in refused:
        names.setdefault(other["reason"], []).append(other["kernel"])
    return [f"{', '.join(kernels)}: {reason}" for reason, kernels in names.items()]


def _tiling(row: Entry) -> str:
    """The tiling of a kernel, with the reason if it was tuned; where there is none, the reason of the choice."""
    if row["plan"] and row["reason"].startswith(TUNED):
        return f"{row['plan']} ({row['reason']})"
    return str(row["plan"] or row["reason"])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
