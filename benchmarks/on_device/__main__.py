# SPDX-License-Identifier: Apache-2.0
"""The command: makes the files, runs the contenders by turns, and prints the tables."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import version
from pathlib import Path
from statistics import median

from tvm_convgrad.bench.results import cpu_name
from tvm_convgrad.threads import available_cores

HERE = Path(__file__).parent
OURS, ONNXRUNTIME, EXECUTORCH = "ours", "onnxruntime", "executorch"
NAMES = {OURS: "tvm-convgrad", ONNXRUNTIME: "ONNX Runtime", EXECUTORCH: "ExecuTorch"}
LAYER = (OURS, EXECUTORCH)
"""Who is measured for single convolutions."""
PACKAGES = ("onnxruntime-training-cpu", "executorch", "torch")
TOLERANCE = 2e-3
"""Largest difference of the losses of the first steps to ours, relative to it."""


@dataclass
class Outcome:
    """What a contender took for one model or layer.

    Attributes:
        times: seconds of steps, of all its processes.
        memory: bytes, the least of its processes.
        runtime, model: bytes on disk.
        losses: of the first steps.
        error: the last line of what it said when it failed; then there is nothing else.
    """

    times: list[float] = field(default_factory=list)
    memory: int = 0
    runtime: int = 0
    model: int = 0
    losses: list[float] = field(default_factory=list)
    error: str = ""


class Runner:
    """Runs contenders in processes of their own.

    Args:
        others: the Python of the other libraries.
        threads, seconds: of each.
    """

    def __init__(self, others: Path, threads: int, seconds: float) -> None:
        self.others, self.threads, self.seconds = others, threads, seconds

    def command(self, contender: str, action: str, folder: Path) -> str:
        """Run a script of a contender and return what it prints.

        Raises:
            RuntimeError: it failed; the last line of what it said.
        """
        python = sys.executable if contender == OURS else str(self.others)
        words = [python, str(HERE / f"run_{contender}.py"), action, str(folder), str(self.threads), str(self.seconds)]
        path = os.pathsep.join(filter(None, (str(HERE.parents[1]), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.threads)}
        if contender == OURS:
            environment["PYTHONPATH"] = path
        else:
            environment.pop("PYTHONPATH", None)
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            last = (done.stderr.strip() or f"exit code {done.returncode}").splitlines()[-1]
            raise RuntimeError(last)
        return done.stdout

    def prepare(self, contender: str, folder: Path, frozen: bool) -> None:
        """Make what a contender trains of the model's files, once; what it says if it cannot is kept beside them."""
        kept = folder / f"{contender}.made"
        if kept.exists():
            return
        error = ""
        if contender == OURS:
            words = [sys.executable, "-m", "tvm_convgrad", "build", str(folder / "model.onnx")]
            words += ["-o", str(folder / "ours.so"), "--target", "native", "--recompute", "cheap"]
            words += ["--bn", "frozen"] if frozen else []
            subprocess.run(words, check=True, stdout=subprocess.DEVNULL)
        else:
            try:
                self.command(contender, "prepare", folder)
            except RuntimeError as failure:
                error = str(failure)
        kept.write_text(error)

    def turn(self, contender: str, action: str, folder: Path, outcome: Outcome) -> None:
        """Add a process of a contender to its outcome."""
        found = json.loads(self.command(contender, action, folder).splitlines()[-1])
        outcome.times += found["times"]
        outcome.memory = min(outcome.memory or found["memory"], found["memory"])
        outcome.runtime, outcome.model, outcome.losses = found["runtime"], found["model"], found["losses"]


def turns(runner: Runner, contenders: Sequence[str], action: str, folder: Path, rounds: int) -> dict[str, Outcome]:
    """The outcome of each contender; one that could not be prepared, or fails, takes part in nothing more."""
    outcomes = {contender: Outcome() for contender in contenders}
    for contender, outcome in outcomes.items():
        if (folder / f"{contender}.made").exists():
            outcome.error = (folder / f"{contender}.made").read_text()
    for _ in range(rounds):
        for contender, outcome in outcomes.items():
            if outcome.error:
                continue
            try:
                runner.turn(contender, action, folder, outcome)
            except RuntimeError as error:
                if contender == OURS:
                    raise
                outcome.error = str(error)
    ours = outcomes[OURS].losses
    for outcome in outcomes.values():
        apart = [abs(own - other) / abs(own) for own, other in zip(ours, outcome.losses, strict=False)]
        if not outcome.error and not max(apart) <= TOLERANCE:
            outcome.error = f"other losses: {outcome.losses}, and ours are {ours}"
    return outcomes


def step_rows(title: str, batch: int, outcomes: dict[str, Outcome]) -> list[tuple[str, ...]]:
    """Lines of the table of steps: a contender each."""
    ours = outcomes[OURS]
    rows = []
    for contender, outcome in outcomes.items():
        if outcome.error:
            rows.append((title, str(batch), NAMES[contender], outcome.error, *[""] * 7))
            continue
        rows.append(
            (
                title,
                str(batch),
                NAMES[contender],
                f"{median(outcome.times) * 1e3:.2f}",
                f"{min(outcome.times) * 1e3:.2f}",
                f"{median(outcome.times) / median(ours.times):.2f}",
                f"{min(outcome.times) / min(ours.times):.2f}",
                f"{outcome.memory / 1e6:.1f}",
                f"{outcome.memory / ours.memory:.2f}",
                f"{outcome.runtime / 1e6:.1f}",
                f"{outcome.model / 1e6:.2f}",
            )
        )
    return rows


def layer_row(title: str, descriptor: str, outcomes: dict[str, Outcome]) -> tuple[str, ...]:
    """A line of the table of layers."""
    if outcomes[EXECUTORCH].error:
        return title, f"`{descriptor}`", "", outcomes[EXECUTORCH].error, ""
    own, other = (min(outcomes[contender].times) for contender in (OURS, EXECUTORCH))
    return title, f"`{descriptor}`", f"{own * 1e3:.3f}", f"{other * 1e3:.1f}", f"{other / own:.0f}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def document(options: argparse.Namespace, steps: Sequence[Sequence[str]], layers: Sequence[Sequence[str]]) -> str:
    """The page of results."""
    ask = f"from importlib.metadata import version as v; print(*(f'{{n}} {{v(n)}}' for n in {PACKAGES}), sep=', ')"
    others = subprocess.run([options.others, "-c", ask], capture_output=True, text=True, check=True).stdout.strip()
    command = (
        f"python -m benchmarks.on_device --others out/others/bin/python --threads {options.threads} "
        f"--seconds {options.seconds:g} --rounds {options.rounds}"
    )
    parts = [
        "# Training steps beside libraries for devices, measured",
        f"Written by\n\n    {command} --markdown docs/results/on-device-avx512.md",
        f"on {date.today()}, {cpu_name()}, {options.threads} threads; apache-tvm {version('apache-tvm')}; beside it "
        f"{others}.",
        "`benchmarks/on_device` describes what is measured. SGD, float32; our steps have `--recompute cheap`. "
        "Milliseconds and megabytes (10⁶ bytes). Ratios are theirs / ours, of medians and of the fastest of all "
        "steps, in several processes by turns.",
    ]
    if steps:
        columns = (
            "model",
            "batch",
            "by",
            "median ms",
            "fastest ms",
            "ratio",
            "of fastest",
            "memory",
            "ratio",
            "libraries",
            "model's files",
        )
        parts += ["## Steps", table(columns, steps)]
    if layers:
        columns = ("both gradients of", "problem", "ours, fastest ms", "ExecuTorch, ms", "ratio")
        parts += ["## Gradients of a convolution, beside ExecuTorch's portable kernel", table(columns, layers)]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Measure and print."""
    from benchmarks import on_device
    from benchmarks.on_device.models import LAYERS, MODELS, write_layer, write_model

    parser = argparse.ArgumentParser(
        description=on_device.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--others", type=Path, required=True, help="the Python that has the other libraries")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--seconds", type=float, default=3.0, help="of the steps of each process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each contender and model")
    parser.add_argument("--only", default="", help="models and layers whose title this regular expression finds")
    parser.add_argument("--folder", type=Path, help="keep the files here, and take those that are here")
    parser.add_argument("--prepare", action="store_true", help="make the files in --folder, and measure nothing")
    parser.add_argument("--markdown", type=Path, help="write the tables here, too")
    options = parser.parse_args()
    runner = Runner(options.others, options.threads, options.seconds)
    steps: list[tuple[str, ...]] = []
    layers: list[tuple[str, ...]] = []
    with tempfile.TemporaryDirectory(prefix="convgrad-on-device-") as scratch:
        root = options.folder or Path(scratch)
        for title, descriptor in LAYERS.items():
            if not re.search(options.only, title):
                continue
            folder = root / re.sub(r"\W+", "-", title)
            if not folder.exists():
                folder.mkdir(parents=True)
                write_layer(descriptor, folder)
            runner.prepare(EXECUTORCH, folder, frozen=False)
            if not options.prepare:
                layers.append(layer_row(title, descriptor, turns(runner, LAYER, "layer", folder, options.rounds)))
                show(options, steps, layers)
        for model in (each for each in MODELS if re.search(options.only, each.title)):
            folder = root / re.sub(r"\W+", "-", model.title)
            if not folder.exists():
                folder.mkdir(parents=True)
                write_model(model, folder)
            contenders = (OURS, *model.contenders)
            for contender in contenders:
                runner.prepare(contender, folder, model.frozen)
            if not options.prepare:
                outcomes = turns(runner, contenders, "step", folder, options.rounds)
                steps += step_rows(model.title, model.batch, outcomes)
                show(options, steps, layers)
    if not options.prepare:
        print(document(options, steps, layers))


def show(options: argparse.Namespace, steps: Sequence[Sequence[str]], layers: Sequence[Sequence[str]]) -> None:
    """Write what is measured so far, and its last row to standard error."""
    print(*(steps or layers)[-1], sep="  ", file=sys.stderr, flush=True)
    if options.markdown:
        options.markdown.write_text(document(options, steps, layers))


if __name__ == "__main__":
    main()
