# SPDX-License-Identifier: Apache-2.0
"""`convgrad tune`: measures other tilings of kernels for a model's convolutions, and keeps the winners for build."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_convgrad.commands import option_values, options
from tvm_convgrad.commands.tune_work import TuneSources
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.offload.registry import NAMES, names_of_kind, require

if TYPE_CHECKING:  # TVM's start-up time: the command line is checked first
    from tvm.target import Target

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
    direction: Annotated[
        str, typer.Option(metavar=f"{options.DIRECTION_METAVAR}[,…]", help="For --problem and --suite.")
    ] = "all",
    budget: Annotated[str, typer.Option(metavar="60s|5m|1h", help="Time to spend, about.")] = "60s",
    batch: options.Batch = None,
    model_output: options.ModelOutputs = None,
    model_target: options.ModelTarget = None,
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
        typer.Option(
            metavar="|".join(names_of_kind("llvm")),
            help="Then time this library too; `--offload auto` takes the faster.",
        ),
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
    """Measure other tilings than those of the cost model, and store the faster ones for `build` with the same target.

    With --transforms also those of Winograd's kernels for 3x3 layers, for builds with --transforms.

    With --cudnn measure engines of cuDNN instead, compared with the first one of its heuristics.
    """
    seconds = parse_budget(budget)
    sources = TuneSources(
        model,
        tuple(problem or ()),
        suite,
        tuple(option_values.parse_directions(direction, ("backward_weight", "backward_data", "forward"))),
        option_values.parse_batch(batch),
        option_values.chosen_outputs(loss, model_output, model_target),
        layout,
        loss,
        dtype,
        results,
    )
    sources.check()
    if transforms and (cudnn or offload is not None):
        raise typer.BadParameter(
            "--transforms is for generated kernels; leave out --offload and --cudnn, whose engines are permitted by "
            "CONVGRAD_CUDNN=transforms."
        )
    if cudnn:
        if offload is not None:
            raise typer.BadParameter("--cudnn times engines, --offload a library against kernels; give one of the two.")
        from tvm_convgrad.commands.tune_engines import calls_of, tune_engines

        gpu = option_values.parse_target(target, gpus=True)
        tune_engines(calls_of(sources, gpu), gpu, store, seconds, json)
        return
    if target.startswith("cuda"):
        raise typer.BadParameter(f"--target {target}: on GPUs engines of cuDNN are tuned; give --cudnn as well.")
    _tune_kernels(sources, _KernelOptions(seconds, threads, target, store, offload, transforms, json))


@dataclass(frozen=True)
class _KernelOptions:
    """The options of tuning generated kernels, as `tune` takes them; `seconds` is the budget."""

    seconds: float
    threads: int | None
    target: str
    store: Path | None
    offload: str | None
    transforms: bool
    json: bool


def _tune_kernels(sources: TuneSources, chosen: _KernelOptions) -> None:
    """Tune generated kernels, compare them with the library of --offload, and print what became of each problem."""
    from tvm_convgrad.codegen.hardware import cores_of, machine_of, with_cores
    from tvm_convgrad.core.entries import default_path
    from tvm_convgrad.kernels.transforms import allow_transforms
    from tvm_convgrad.report.tables import followed, print_json, print_table, stdout
    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.tuning.compare import compare_all
    from tvm_convgrad.tuning.search import tune as search
    from tvm_convgrad.tuning.store import Store

    count = use_threads(chosen.threads)
    target = option_values.parse_target(chosen.target)
    if chosen.threads is not None:
        target = with_cores(target, chosen.threads)
    library = _library(chosen.offload, target)
    machine = machine_of(target)
    if machine is None:
        raise UnsupportedError(
            f"tune: kernels are not generated for {chosen.target}; use --target native on an x86 or ARM CPU."
        )
    kept = Store(chosen.store or default_path(), cores_of(target))
    work = sources.work(target)
    with allow_transforms(chosen.transforms):
        outcomes = list(followed(search(work, machine, target, kept, chosen.seconds), "tuning", len(work)))
    counts = Counter(outcome.status for outcome in outcomes)
    compared: list[dict[str, Any]] = []
    if library is not None:
        found = compare_all(work, library, machine, target, kept, COMPARE_SECONDS)
        compared = [each.plain(library) for each in found]
    if chosen.json:
        outcomes_plain = [asdict(outcome) for outcome in outcomes]
        print_json({"store": str(kept.path), "counts": dict(counts), "outcomes": outcomes_plain, "compared": compared})
        return
    rows = ((o.status, f"{o.gain:.2f}", o.direction, o.descriptor, o.tried, o.detail) for o in outcomes)
    columns = ("outcome", "gain", "direction", "problem", "tried", "tiling or reason")
    print_table(
        f"tuned for {machine.name}, {kept.cores} cores, on {count} threads", columns, rows, right=("gain", "tried")
    )
    if compared and library:
        headings = ("direction", "problem", "kernel, ms", f"{library}, ms", "reason")
        shown = ((c["direction"], c["descriptor"], _ms(c["kernel"]), _ms(c[library]), c["reason"]) for c in compared)
        print_table(f"kernels and {library}", headings, shown, right=headings[2:4])
    summary = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    stdout().print(f"{summary}; kept in {kept.path}", markup=False, soft_wrap=True)


def _library(offload: str | None, target: Target) -> str | None:
    """The library of --offload, if it can be used."""
    if offload is None:
        return None
    if offload not in NAMES:
        raise typer.BadParameter(f"--offload {offload}: use {', '.join(NAMES)}.")
    require([offload], target)
    return offload


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
