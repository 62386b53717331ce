# SPDX-License-Identifier: Apache-2.0
"""`convgrad tune`: measures other cuts of the kernels for a model's convolutions, and keeps the winners for build."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.commands.stages import print_warnings
from tvm_convgrad.errors import UnsupportedError

if TYPE_CHECKING:
    from relax_ops.lowering import Lowered
    from tvm_convgrad.tuning.search import Work

_BUDGET = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)?")
_SECONDS = {"s": 1, "m": 60, "h": 3600}
COMPARE_SECONDS = 0.2
"""For a kernel and a library to take turns."""


def tune(
    model: Annotated[str | None, typer.Argument(help="A model, as `build` takes it.")] = None,
    problem: Annotated[
        list[str] | None, typer.Option(metavar="DESC", help="This problem instead of a model; repeatable.")
    ] = None,
    suite: Annotated[str | None, typer.Option(metavar="NAME[,…]", help="The layers of these networks instead.")] = None,
    face: Annotated[str, typer.Option(metavar="FACE[,…]", help="For --problem and --suite.")] = (
        "backward_weight,backward_data,forward"
    ),
    budget: Annotated[str, typer.Option(metavar="60s|5m|1h", help="Time to spend, about.")] = "60s",
    batch: options.Batch = None,
    model_output: options.ModelOutputs = None,
    layout: options.Layout = "NCHW",
    loss: options.Loss = "cross_entropy",
    dtype: options.DType = "float32",
    results: options.Results = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="To measure on, and the target's cores. Default: TVM_NUM_THREADS, or all cores."),
    ] = None,
    target: options.Target = "native",
    store: options.Store = None,
    offload: Annotated[
        str | None,
        typer.Option(metavar="onednn", help="Then time this library too; `--offload auto` takes the faster."),
    ] = None,
    cudnn: Annotated[
        bool,
        typer.Option(
            "--cudnn", help="Time cuDNN's engines instead, on this machine's GPU: that of --target cuda:sm_90."
        ),
    ] = False,
    transforms: options.Transforms = False,
    json: options.Json = False,
) -> None:
    """Time candidates that compute exactly against the cost model's cut; keep what is faster, for the same target.

    With --transforms: of both kernels for a 3x3 layer, for builds with --transforms.

    With --cudnn: engines of cuDNN against the one that its heuristics put first, which `build` and `explain` take then.
    """
    seconds = parse_budget(budget)
    if (model is not None) + bool(problem) + (suite is not None) != 1:
        raise typer.BadParameter("say what to tune: MODEL, --problem DESC or --suite NAME, and one of them only.")
    from tvm_convgrad.catalogue import FACES

    faces = face.split(",")
    if set(faces) - set(FACES):
        raise typer.BadParameter(f"--face {face}: use {', '.join(FACES)}.")
    size, outputs = options.parse_batch(batch), options.parse_outputs(model_output)
    if model is None and outputs is not None:
        raise typer.BadParameter("--model-output is for MODEL; problems and suites have no outputs to choose.")
    if transforms and (cudnn or offload is not None):
        raise typer.BadParameter(
            "--transforms is about generated kernels; leave out --cudnn (CONVGRAD_CUDNN=transforms is its word for it) "
            "and --offload."
        )
    if model is None and (results is not None or (problem and dtype != "float32")):
        raise typer.BadParameter("--results is for MODEL; the types of a --problem are in its descriptor (_dt=).")
    if cudnn:
        if offload is not None:
            raise typer.BadParameter("--cudnn and --offload: engines are timed, or a library against kernels; say one.")
        from tvm_convgrad.commands.tune_engines import calls_of_plan, calls_of_work, tune_engines
        from tvm_convgrad.offload.common import require
        from tvm_convgrad.offload.cudnn.store import use_engines

        gpu = options.parse_target(target, gpus=True)
        require(["cudnn"], gpu)
        if model is None:
            calls = calls_of_work(_of_problems(problem, suite, faces, size, layout, dtype))
        else:
            with use_engines(None):
                calls = calls_of_plan(_planned(model, size, outputs, layout, loss, (dtype, results), gpu, ("cudnn",)))
        tune_engines(calls, gpu, store, seconds, json)
        return
    from tvm_convgrad.kernels.target import cores_of, machine_of, with_cores
    from tvm_convgrad.kernels.transforms import allow_transforms
    from tvm_convgrad.report.tables import followed, print_json, print_table, stdout
    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.tuning.search import tune as search
    from tvm_convgrad.tuning.store import Store, default_path

    count = use_threads(threads)
    compiled_for = options.parse_target(target)
    if threads is not None:
        compiled_for = with_cores(compiled_for, threads)
    library = _library(offload, compiled_for)
    machine = machine_of(compiled_for)
    if machine is None:
        raise UnsupportedError(f"tune: kernels are not made for {target}; use --target native on an x86 or ARM CPU.")
    kept = Store(store or default_path(), cores_of(compiled_for))
    if model is not None:
        work = _of_model(_planned(model, size, outputs, layout, loss, (dtype, results), compiled_for))
    else:
        work = _of_problems(problem, suite, faces, size, layout, dtype)
    with allow_transforms(transforms):
        outcomes = list(followed(search(work, machine, compiled_for, kept, seconds), "tuning", len(work)))
    counts = Counter(outcome.status for outcome in outcomes)
    compared = _compare(work, library, machine, compiled_for, kept) if library else []
    if json:
        print_json(
            {
                "store": str(kept.path),
                "counts": dict(counts),
                "outcomes": [asdict(o) for o in outcomes],
                "compared": compared,
            }
        )
        return
    rows = ((o.status, f"{o.gain:.2f}", o.face, o.descriptor, o.tried, o.detail) for o in outcomes)
    columns = ("outcome", "gain", "face", "problem", "tried", "cut or reason")
    print_table(
        f"tuned for {machine.name}, {kept.cores} cores, on {count} threads", columns, rows, right=("gain", "tried")
    )
    if compared and library:
        headings = ("face", "problem", "kernel, ms", f"{library}, ms", "reason")
        shown = ((c["face"], c["descriptor"], _ms(c["kernel"]), _ms(c[library]), c["reason"]) for c in compared)
        print_table(f"kernels and {library}", headings, shown, right=headings[2:4])
    summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    stdout().print(f"{summary}; kept in {kept.path}", markup=False, soft_wrap=True)


def _library(offload: str | None, target: Any) -> str | None:
    """The library of --offload, if it can be used."""
    if offload is None:
        return None
    from tvm_convgrad.offload.common import NAMES, require

    if offload not in NAMES:
        raise typer.BadParameter(f"--offload {offload}: use {', '.join(NAMES)}.")
    require([offload], target)
    return offload


def _compare(work: Sequence[Work], library: str, machine: Any, target: Any, kept: Any) -> list[dict[str, Any]]:
    """Time each problem's kernel, its tuned cut in force, and the library's call; keep it for `auto`."""
    from tvm_convgrad.errors import ProblemError
    from tvm_convgrad.kernels.tuned import use_winners
    from tvm_convgrad.offload.measured import Measured, compare, default_path

    measured = Measured(default_path(), kept.cores)
    rows = []
    for each in work:
        row: dict[str, Any] = {"face": each.face, "descriptor": each.problem.descriptor, "kernel": None, library: None}
        try:
            with use_winners(kept):
                seconds = compare(each.face, each.problem, library, target, COMPARE_SECONDS)
            measured.record(each.face, each.problem, machine, seconds)
            rows.append(row | seconds | {"reason": ""})
        except (ProblemError, UnsupportedError) as error:  # one of the two does not compute it: nothing to compare
            rows.append(row | {"reason": str(error)})
    return rows


def _ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"


def parse_budget(text: str) -> float:
    """Seconds of a budget such as 60s, 5m, 1h or 90.

    Raises:
        typer.BadParameter: it is no such thing.
    """
    found = _BUDGET.fullmatch(text)
    if found is None:
        raise typer.BadParameter(f"--budget {text}: give a time such as 60s, 5m or 1h.")
    return float(found.group(1)) * _SECONDS[found.group(2) or "s"]


def _planned(
    model: str,
    batch: Any,
    outputs: dict[str, float] | None,
    layout: str,
    loss: str,
    types: tuple[str, str | None],
    target: Any,
    backends: Sequence[str] = ("none",),
) -> list[Lowered]:
    """What computes the convolutions of a model's training step."""
    from tvm_convgrad.training.frontends import load_model
    from tvm_convgrad.training.lower import plan_of
    from tvm_convgrad.training.step import build_step

    dtype, results = types[0], options.results_for(types[1], target)
    loaded = load_model(model, batch=batch, outputs=outputs)
    print_warnings(loaded.warnings)
    step = build_step(loaded, loss=loss, dtype=dtype, results=results, layout=layout)
    return plan_of(step, target, backends)


def _of_model(entries: Sequence[Lowered]) -> list[Work]:
    from tvm_convgrad.tuning.search import Work

    counts = Counter((entry.face, entry.problem) for entry in entries)
    return [Work(face, problem, count) for (face, problem), count in counts.items()]


def _of_problems(
    descriptors: Sequence[str] | None, suites: str | None, faces: Sequence[str], batch: Any, layout: str, dtype: str
) -> list[Work]:
    from tvm_convgrad.bench.suites import NETWORKS, SUITES
    from tvm_convgrad.bench.suites import suite as problems_of
    from tvm_convgrad.problem import ConvProblem
    from tvm_convgrad.tuning.search import Work

    if descriptors:
        return [Work(face, ConvProblem.from_descriptor(text)) for text in descriptors for face in faces]
    names = list(NETWORKS) if suites == "all" else (suites or "").split(",")
    if set(names) - set(SUITES):
        raise typer.BadParameter(f"--suite {suites}: use all or {', '.join(SUITES)}.")
    if batch == "dynamic":
        raise typer.BadParameter("--batch dynamic: layers of a suite need a number.")
    layers = [pair for name in names for pair in problems_of(name, batch or 8, layout).items()]
    counts: Counter[ConvProblem] = Counter()
    for problem, count in layers:
        counts[problem.with_dtypes(dtype, dtype, dtype)] += count
    return [Work(face, problem, count) for problem, count in counts.items() for face in faces]
