# SPDX-License-Identifier: Apache-2.0
"""`convgrad verify`: every implementation available on this machine against float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.errors import ConvGradError

if TYPE_CHECKING:
    from tvm_convgrad.verification import Verdict


_SHORT = 60


class VerificationError(ConvGradError, AssertionError):
    """An implementation that does not agree with float64."""


def verify(
    problem: Annotated[
        list[str] | None, typer.Option(metavar="DESC", help="Descriptor, such as g2mb8ic96ih27oc256kh5ph2; repeatable.")
    ] = None,
    all_problems: Annotated[bool, typer.Option("--all", help="The built-in problems.")] = False,
    tiling: Annotated[
        str | None,
        typer.Option(metavar="CASE", help="With one --problem and --op: a generated kernel as --fuzz names it."),
    ] = None,
    fuzz: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="N random problems and tilings of generated kernels; with --impl, N problems."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random problems and of the numbers.")] = 0,
    op: Annotated[str, typer.Option(metavar="forward|wgrad|dgrad|all", help="Which direction.")] = "all",
    impl: Annotated[list[str] | None, typer.Option(help="Only this implementation; repeatable.")] = None,
    target: options.Target = "native",
    json: options.Json = False,
) -> None:
    """Compare implementations with float64 on small integers, where equality is demanded to the last bit."""
    if not (problem or all_problems or fuzz):
        raise typer.BadParameter("say what to verify: --problem DESC, --all, or --fuzz N.")
    from tvm_convgrad.evaluation import IMPLEMENTATIONS
    from tvm_convgrad.fuzz import check_problems, random_problems
    from tvm_convgrad.fuzzing import campaign
    from tvm_convgrad.offload.common import NAMES
    from tvm_convgrad.problem import ConvProblem
    from tvm_convgrad.report.tables import followed, print_json
    from tvm_convgrad.verification import OPS, SUITE, verify_problems

    if op != "all" and op not in OPS:
        raise typer.BadParameter(f"--op {op}: use {', '.join(OPS)} or all.")
    unknown = set(impl or ()) - set(IMPLEMENTATIONS)
    if unknown:
        raise typer.BadParameter(f"--impl {', '.join(sorted(unknown))}: use {', '.join(IMPLEMENTATIONS)}.")
    libraries = set(impl or ()) & set(NAMES)
    if fuzz and libraries:
        raise typer.BadParameter(f"--impl {', '.join(libraries)} goes with --problem and --all, not with --fuzz.")
    if tiling is not None and (len(problem or []) != 1 or op == "all" or all_problems or fuzz or impl):
        raise typer.BadParameter("--tiling goes with one --problem and one --op, without --impl, --all and --fuzz.")
    if target != "native" and (tiling is not None or (fuzz and not impl)):
        raise typer.BadParameter("--target goes with --problem, --all and --impl: a tiling names its instruction set.")
    problems = [ConvProblem.from_descriptor(text) for text in [*(problem or []), *(SUITE if all_problems else ())]]
    ops = list(OPS) if op == "all" else [op]
    compiled_for = options.parse_target(target, gpus=True)
    if tiling is not None:
        work: Iterable[Verdict] = campaign.replayed(problems[0], OPS[op], tiling, seed)
    else:
        work = verify_problems(problems, ops, impl or (), seed=seed, target=compiled_for)
    if fuzz and not impl:
        work = chain(work, campaign.fuzz(fuzz, seed, directions=[OPS[name] for name in ops]))
    elif fuzz:
        faces = [OPS[name] for name in ops]
        cases = random_problems(fuzz, seed)
        drawn = check_problems(cases, seed=seed, impls=impl or (), faces=faces, target=compiled_for)
        work = chain(work, drawn)
    verdicts = list(followed(work, "verifying"))
    counts = Counter(verdict.status for verdict in verdicts)
    if json:
        print_json({"seed": seed, "counts": dict(counts), "verdicts": [asdict(verdict) for verdict in verdicts]})
    else:
        _show(verdicts, counts)
    if counts["wrong"] or not counts["right"]:
        raise VerificationError(
            f"{counts['wrong']} of {len(verdicts)} comparisons with float64 went wrong, {counts['right']} were right "
            f"(seed {seed}); `convgrad verify --problem DESC` repeats one of them, with its --tiling if it has one."
        )


def _show(verdicts: list[Verdict], counts: Counter[str]) -> None:
    """A table of everything if that is short, else of what is not right and the counts of each implementation."""
    from tvm_convgrad.report.tables import print_table, stdout

    short = len(verdicts) <= _SHORT
    shown = [verdict for verdict in verdicts if short or verdict.status != "right"]
    if shown:
        rows = ((v.op, v.descriptor, v.impl, v.status, v.detail) for v in shown)
        print_table("against float64", ("direction", "problem", "implementation", "verdict", "detail"), rows)
    if not short:
        each = Counter((v.op, v.impl, v.status) for v in verdicts)
        kinds = dict.fromkeys((v.op, v.impl) for v in verdicts)
        statuses = ("right", "wrong", "refused")
        counted = ((*kind, *(each[(*kind, status)] for status in statuses)) for kind in kinds)
        print_table("against float64", ("direction", "implementation", *statuses), counted, right=statuses)
    for verdict in shown:
        if verdict.tiling:
            command = f'convgrad verify --op {verdict.op} --problem {verdict.descriptor} --tiling "{verdict.tiling}"'
            stdout().print(command, markup=False, soft_wrap=True)
    stdout().print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), markup=False)
