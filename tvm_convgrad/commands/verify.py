# SPDX-License-Identifier: Apache-2.0
"""`convgrad verify`: checks implementations, of problems and at random, against float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_convgrad.commands import option_values, options
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.errors import ConvGradError, UnsupportedError

if TYPE_CHECKING:
    from tvm_convgrad.verify.suite import Verdict

_SHORT = 60
"""Verdicts up to which the table lists all of them."""


class VerificationError(ConvGradError, AssertionError):
    """An implementation whose results differ from those of float64."""


def verify(
    problem: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DESC",
            help="Check this convolution, given by its descriptor, such as g2mb8ic96ih27oc256kh5ph2; repeatable.",
        ),
    ] = None,
    all_problems: Annotated[
        bool, typer.Option("--all", help="Check the built-in problems: one for each thing that is easily got wrong.")
    ] = False,
    tiling: Annotated[
        str | None,
        typer.Option(
            metavar="CASE",
            help="Check one generated kernel: the string that --fuzz prints for a wrong case. Needs one --problem and "
            "one --direction.",
        ),
    ] = None,
    fuzz: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Check N random problems with random tilings of generated kernels; with --impl, N random problems.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random problems and of the operands.")] = 0,
    direction: Annotated[
        str,
        typer.Option(
            metavar=options.DIRECTION_METAVAR,
            help="Direction: gradient of the weights (wgrad), gradient of the data (dgrad), or forward.",
        ),
    ] = "all",
    impl: Annotated[
        list[str] | None,
        typer.Option(
            help="Check only this implementation: auto, kernel, winograd, composition, composition:NAME, onednn, cudnn "
            "or cutlass; repeatable. Default: all that this machine has."
        ),
    ] = None,
    target: options.Target = "native",
    json: options.Json = False,
) -> None:
    """Compare implementations with a float64 reference on small integers, bit for bit.

    Sums of small integers are exact, so that any difference is a bug and not rounding. A failure is printed with the
    command that reproduces it.
    """
    if not (problem or all_problems or fuzz):
        raise typer.BadParameter("give what to check: --problem DESC, --all, or --fuzz N.")
    directions = option_values.parse_directions(direction, tuple(WORDS))
    from tvm_convgrad.core.problem import ConvProblem
    from tvm_convgrad.evaluation import implementations
    from tvm_convgrad.offload.registry import NAMES
    from tvm_convgrad.report.tables import followed, print_json
    from tvm_convgrad.verify.fuzzing import campaign
    from tvm_convgrad.verify.operators import check_problems, random_problems
    from tvm_convgrad.verify.suite import SUITE, verify_problems

    unknown = set(impl or ()) - set(implementations())
    if unknown:
        raise typer.BadParameter(f"--impl {', '.join(sorted(unknown))}: use {', '.join(implementations())}.")
    libraries = set(impl or ()) & set(NAMES)
    if fuzz and libraries:
        raise typer.BadParameter(
            f"--impl {', '.join(libraries)} can be combined with --problem and --all, not with --fuzz."
        )
    if tiling is not None and (len(problem or []) != 1 or len(directions) != 1 or all_problems or fuzz or impl):
        raise typer.BadParameter(
            "--tiling needs one --problem and one --direction; leave out --impl, --all and --fuzz."
        )
    if target != "native" and (tiling is not None or (fuzz and not impl)):
        raise typer.BadParameter(
            "--target is for --problem, --all and --impl; tilings and fuzzed cases have their own instruction set."
        )
    problems = [ConvProblem.from_descriptor(text) for text in [*(problem or []), *(SUITE if all_problems else ())]]
    compiled_for = option_values.parse_target(target, gpus=True)
    if tiling is not None:
        work: Iterable[Verdict] = campaign.replayed(problems[0], directions[0], tiling, seed)
    else:
        work = verify_problems(problems, directions, impl or (), seed=seed, target=compiled_for)
    if fuzz and not impl:
        work = chain(work, campaign.fuzz(fuzz, seed, directions=directions))
    elif fuzz:
        cases = random_problems(fuzz, seed)
        drawn = check_problems(cases, seed=seed, impls=impl or (), directions=directions, target=compiled_for)
        work = chain(work, drawn)
    verdicts = list(followed(work, "verifying"))
    counts = Counter(verdict.status for verdict in verdicts)
    if json:
        print_json({"seed": seed, "counts": dict(counts), "verdicts": [asdict(verdict) for verdict in verdicts]})
    else:
        _show(verdicts, counts)
    if verdicts and counts["refused"] == len(verdicts):
        raise UnsupportedError(
            f"verify: all {len(verdicts)} comparisons were refused, and nothing was compared; choose another --impl, "
            "--problem or --target. --fuzz interprets kernels of instruction sets that this CPU lacks, too."
        )
    if counts["wrong"] or not counts["right"]:
        raise VerificationError(
            f"{counts['wrong']} of {len(verdicts)} comparisons with float64 failed, {counts['right']} succeeded "
            f"(seed {seed}); `convgrad verify --problem DESC` repeats one of them, with its --tiling if it has one."
        )


def _show(verdicts: list[Verdict], counts: Counter[str]) -> None:
    """Print all verdicts if there are few, else those that are not right and the counts of each implementation."""
    from tvm_convgrad.report.tables import print_table, stdout

    short = len(verdicts) <= _SHORT
    shown = [verdict for verdict in verdicts if short or verdict.status != "right"]
    if shown:
        rows = ((v.direction, v.descriptor, v.impl, v.status, v.detail) for v in shown)
        print_table("against float64", ("direction", "problem", "implementation", "verdict", "detail"), rows)
    if not short:
        each = Counter((v.direction, v.impl, v.status) for v in verdicts)
        kinds = dict.fromkeys((v.direction, v.impl) for v in verdicts)
        statuses = ("right", "wrong", "refused")
        counted = ((*kind, *(each[(*kind, status)] for status in statuses)) for kind in kinds)
        print_table("against float64", ("direction", "implementation", *statuses), counted, right=statuses)
    for verdict in shown:
        if verdict.tiling:
            case = f"--direction {verdict.direction} --problem {verdict.descriptor}"
            command = f'convgrad verify {case} --tiling "{verdict.tiling}"'
            stdout().print(command, markup=False, soft_wrap=True)
    stdout().print(", ".join(f"{count} {status}" for status, count in sorted(counts.items())), markup=False)
