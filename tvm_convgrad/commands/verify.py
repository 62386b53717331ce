# SPDX-License-Identifier: Apache-2.0
"""`convgrad verify`: every implementation available on this machine against float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.errors import ConvGradError

if TYPE_CHECKING:
    from tvm_convgrad.verification import Verdict


class VerificationError(ConvGradError, AssertionError):
    """An implementation that does not agree with float64."""


def verify(
    problem: Annotated[
        list[str] | None, typer.Option(metavar="DESC", help="Descriptor, such as g2mb8ic96ih27oc256kh5ph2; repeatable.")
    ] = None,
    all_problems: Annotated[bool, typer.Option("--all", help="The built-in problems.")] = False,
    fuzz: Annotated[int | None, typer.Option(min=1, metavar="N", help="N random problems.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random problems and of the numbers.")] = 0,
    op: Annotated[str, typer.Option(metavar="forward|wgrad|dgrad|all", help="Which face.")] = "all",
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation; repeatable.")] = None,
    json: options.Json = False,
) -> None:
    """Compare implementations with float64 on small integers, where equality is demanded to the last bit."""
    if not (problem or all_problems or fuzz):
        raise typer.BadParameter("say what to verify: --problem DESC, --all, or --fuzz N.")
    from tvm_convgrad.evaluate import IMPLEMENTATIONS
    from tvm_convgrad.problem import ConvProblem
    from tvm_convgrad.report.tables import print_json
    from tvm_convgrad.verification import OPS, SUITE, verify_problems

    if op != "all" and op not in OPS:
        raise typer.BadParameter(f"--op {op}: use {', '.join(OPS)} or all.")
    problems = [ConvProblem.from_descriptor(text) for text in [*(problem or []), *(SUITE if all_problems else ())]]
    if fuzz:
        from tvm_convgrad.fuzz import random_problems

        problems += random_problems(fuzz, seed)
    ops = list(OPS) if op == "all" else [op]
    verdicts = list(_followed(verify_problems(problems, ops, impl or IMPLEMENTATIONS, seed=seed)))
    counts = Counter(verdict.status for verdict in verdicts)
    if json:
        print_json({"seed": seed, "counts": dict(counts), "verdicts": [asdict(verdict) for verdict in verdicts]})
    else:
        _show(verdicts, counts)
    if counts["wrong"] or not counts["right"]:
        raise VerificationError(
            f"{counts['wrong']} of {len(verdicts)} comparisons with float64 went wrong, {counts['right']} were right "
            f"(seed {seed}); `convgrad verify --problem DESC` repeats one of them."
        )


def _followed(verdicts: Iterable[Verdict]) -> Iterable[Verdict]:
    """The same verdicts, with a progress bar where somebody is looking."""
    from rich.progress import track

    from tvm_convgrad.report.tables import stderr

    console = stderr()
    return track(verdicts, "verifying", console=console, disable=not console.is_terminal)


def _show(verdicts: list[Verdict], counts: Counter[str]) -> None:
    """A table of everything if that is short, else of what is not right; then the counts."""
    from tvm_convgrad.report.tables import print_table, stdout

    shown = verdicts if len(verdicts) <= 200 else [verdict for verdict in verdicts if verdict.status != "right"]
    if shown:
        rows = ((v.op, v.descriptor, v.impl, v.status, v.detail) for v in shown)
        print_table("against float64", ("face", "problem", "implementation", "verdict", "detail"), rows)
    stdout().print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), markup=False)
