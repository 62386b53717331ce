# SPDX-License-Identifier: Apache-2.0
"""What is known of each convolution of a step: what computes it and how it is cut, what was refused, what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from legalize.forms import DATA_FORMS, WEIGHT_FORMS
from relax_ops.lowering import Lowered
from tvm_convgrad.errors import ProblemError
from tvm_convgrad.kernels.plan import in_words, roofline
from tvm_convgrad.kernels.tuned import TUNED
from tvm_convgrad.offload.common import Engine
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.report.tables import byte_count, print_json, print_table, quantity


def describe_convolutions(lowered: Iterable[Lowered]) -> list[dict[str, Any]]:
    """One entry, plain enough for JSON, for each convolution, from what its legalization recorded.

    op, descriptor   the operator and its problem; a transposed convolution's problem is the one whose dgrad it is
    kernel           what computes it: a generated kernel's kind, "composition:…", "stock" for TVM's own, or a vendor's
                     library and its own name of what it uses
    fused            what it does besides: "bias", "relu", "accumulate" (adds to a tensor in its place), "bias_grad",
                     "bias_accumulate" (adds the bias gradient in place)
    reason           why
    plan             how a generated kernel is cut, or a library's formats and workspace; empty otherwise
    seconds          the cost model's estimate for one core; None where it has none
    roofline         the share of the machine's peak (arithmetic or memory, by the model's constants) that this is
    refused          the others: {kernel, reason}
    gflop            2e-9 times its multiply-adds; bytes: of its three tensors, each moved once
    per              "step", or "sample" where the batch is symbolic; "unknown" (and no numbers) with other symbols
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
    engine = entry.choice.detail
    if not isinstance(engine, Engine):
        return in_words(entry.choice)
    workspace = "chosen at run time" if engine.workspace is None else byte_count(engine.workspace)
    return f"{engine.detail}, workspace {workspace}"


def _refused(entry: Lowered) -> list[dict[str, str]]:
    """What else there is, and why it was not taken."""
    refused = [{"kernel": name, "reason": reason} for name, reason in entry.choice.refused.items()]
    if entry.choice.is_kernel:
        return refused
    forms = {"backward_weight": WEIGHT_FORMS, "backward_data": DATA_FORMS} if "backward" in entry.op else {}
    taken = entry.form.removeprefix("composition:")
    for name, form in forms.get(entry.face, {}).items():
        if name != taken:
            reason = form.refuses(entry.problem) or f"accepts it too, but {taken} is the default"
            refused.append({"kernel": f"composition:{name}", "reason": reason})
    return refused


def _estimate(entry: Lowered) -> dict[str, Any]:
    seconds = entry.choice.estimate
    if not seconds or entry.machine is None or not entry.problem.is_static:
        return {"seconds": None, "roofline": None}
    return {"seconds": seconds, "roofline": roofline(entry.problem, entry.machine) / seconds}


def _cost(problem: ConvProblem) -> dict[str, Any]:
    per = "step"
    if isinstance(problem.batch, str):
        problem, per = replace(problem, batch=1), "sample"
    try:
        return {"gflop": 2e-9 * problem.macs, "bytes": problem.bytes, "per": per}
    except ProblemError:  # symbolic spatial extents: there is no number to give
        return {"gflop": None, "bytes": None, "per": "unknown"}


def show_convolutions(model: str, gradients: Sequence[dict[str, Any]], forward: Sequence[dict[str, Any]]) -> None:
    """Print the entries as two tables, each with the shares in its floating-point work."""
    for title, entries in (("gradient operators", gradients), ("forward convolutions", forward)):
        if entries:
            _show(f"{title} of {model}", with_shares(entries))


def cores_in_words(cores: int | None) -> str:
    """What the number of cores in a manifest says; it is missing in those of GPUs and of early versions."""
    if cores is None:
        return "not recorded"
    return f"{cores} (num-cores of the target; it fixes the order of sums in generated kernels)"


def with_shares(entries: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries with the `share` of each in their floating-point work."""
    total = sum(entry["gflop"] or 0.0 for entry in entries)
    return [
        entry | {"share": entry["gflop"] / total if entry["gflop"] is not None and total else None} for entry in entries
    ]


def print_convolutions_json(
    model: str,
    gradients: Sequence[dict[str, Any]],
    forward: Sequence[dict[str, Any]],
    built_for: dict[str, Any],
    engines: Sequence[dict[str, Any]] | None = None,
    warnings: Sequence[str] = (),
) -> None:
    """Print the entries with `share` as JSON: what they are built for, warnings of the model, cuDNN's engines."""
    asked = {} if engines is None else {"cudnn": list(engines)}
    entries = {"gradients": with_shares(gradients), "forward": with_shares(forward), "warnings": list(warnings)}
    print_json({"source": model} | built_for | entries | asked)


def _show(title: str, rows: Sequence[dict[str, Any]]) -> None:
    per = {row["per"] for row in rows} - {"step"}
    print_table(
        title + (f" (costs per {', '.join(sorted(per))})" if per else ""),
        ("#", "operator", "problem", "kernel", "not taken", "GFLOP", "bytes", "share", "estimate", "roofline"),
        (
            (
                number,
                row["op"],
                row["descriptor"],
                f"{' + '.join([row['kernel'], *row['fused']])}: {_cut(row)}",
                "; ".join(f"{other['kernel']}: {other['reason']}" for other in row["refused"]),
                quantity(row["gflop"]),
                byte_count(row["bytes"]),
                _percent(row["share"]),
                "–" if row["seconds"] is None else f"{row['seconds'] * 1e3:.3g} ms",
                _percent(row["roofline"]),
            )
            for number, row in enumerate(rows, 1)
        ),
        right=("#", "GFLOP", "bytes", "share", "estimate", "roofline"),
    )


def _cut(row: dict[str, Any]) -> str:
    """How a kernel is cut, and whether a measurement says so rather than the cost model; else why there is none."""
    if row["plan"] and row["reason"].startswith(TUNED):
        return f"{row['plan']} ({row['reason']})"
    return str(row["plan"] or row["reason"])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"
