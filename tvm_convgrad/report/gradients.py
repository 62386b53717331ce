# SPDX-License-Identifier: Apache-2.0
"""What is known of each gradient operator of a step: the kernel that computes it, what was refused, what it costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from legalize.forms import DATA_FORMS, WEIGHT_FORMS
from tvm_convgrad.errors import ProblemError
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.report.tables import byte_count, print_json, print_table, quantity


def describe_gradients(gradients: Iterable[tuple[str, str]]) -> list[dict[str, Any]]:
    """One entry, plain enough for JSON, for each gradient operator, given its name and problem descriptor.

    op, descriptor   as given
    kernel           what computes it
    refused          the other kernels: {kernel, reason}
    gflop            2e-9 times its multiply-adds; bytes: of its three tensors, each moved once
    per              "step", or "sample" where the batch is symbolic; "unknown" (and no numbers) with other symbols
    """
    return [{"op": op, "descriptor": text, **_choice(op, text), **_cost(text)} for op, text in gradients]


def _choice(op: str, descriptor: str) -> dict[str, Any]:
    forms = WEIGHT_FORMS if op.endswith("backward_weight") else DATA_FORMS
    problem = ConvProblem.from_descriptor(descriptor)
    verdicts = {name: form.refuses(problem) for name, form in forms.items()}
    chosen = next(name for name, reason in verdicts.items() if reason is None)
    refused = [
        {"kernel": f"composition:{name}", "reason": reason or f"accepts it too, but {chosen} is the default"}
        for name, reason in verdicts.items()
        if name != chosen
    ]
    return {"kernel": f"composition:{chosen}", "refused": refused}


def _cost(descriptor: str) -> dict[str, Any]:
    problem, per = ConvProblem.from_descriptor(descriptor), "step"
    if isinstance(problem.batch, str):
        problem, per = replace(problem, batch=1), "sample"
    try:
        return {"gflop": 2e-9 * problem.macs, "bytes": problem.bytes, "per": per}
    except ProblemError:  # symbolic spatial extents: there is no number to give
        return {"gflop": None, "bytes": None, "per": "unknown"}


def show_gradients(title: str, entries: Sequence[dict[str, Any]], json: bool) -> None:
    """Print the entries as a table with the share of each in the floating-point work, or as JSON with `share`."""
    total = sum(entry["gflop"] or 0.0 for entry in entries)
    rows = [
        entry | {"share": entry["gflop"] / total if entry["gflop"] is not None and total else None} for entry in entries
    ]
    if json:
        print_json({"source": title, "gradients": rows})
        return
    per = {row["per"] for row in rows} - {"step"}
    columns = ("#", "operator", "problem", "kernel", "refused", "GFLOP", "bytes", "share")
    print_table(
        title + (f" (costs per {', '.join(sorted(per))})" if per else ""),
        columns,
        (
            (
                number,
                row["op"],
                row["descriptor"],
                row["kernel"],
                "; ".join(f"{other['kernel']}: {other['reason']}" for other in row["refused"]),
                quantity(row["gflop"]),
                byte_count(row["bytes"]),
                "–" if row["share"] is None else f"{row['share']:.1%}",
            )
            for number, row in enumerate(rows, 1)
        ),
        right=("#", "GFLOP", "bytes", "share"),
    )
