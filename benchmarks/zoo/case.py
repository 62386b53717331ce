# SPDX-License-Identifier: Apache-2.0
"""One architecture in one form: export it, build its training step, compare a step with PyTorch in float64, time it.

    python -m benchmarks.zoo.case timm:convnext_atto train     prints a line of JSON, the `Outcome`

Stage `compare` builds and compares, `time` does so and times a right step. With a folder for libraries, `compare`
leaves the library of a right step there, and `time` takes it from there without building or comparing again: so many
cases can be built beside each other, and timed one by one on a quiet machine.

The comparison is of one step of plain SGD, dropout off in both: the loss, the gradient of every parameter, and the
running statistics after it. A rectifier's input that rounds to the other side of zero
moves the gradients before it by more than rounding, on other inputs those of other parameters. So a gradient counts as
wrong that differs for each of up to `INPUTS` batches.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn
from tvm.target import Target

from benchmarks.zoo.architectures import Architecture
from benchmarks.zoo.comparison import RATE, compare
from benchmarks.zoo.costs import memory, timed
from benchmarks.zoo.problem import FORMS, Problem, draw, export, make_distinct, without_dropout
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.kept_objects import KeptObjects
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_to_link
from tvm_convgrad.training.compile.separate import KernelBuilds, compile_apart
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.module import StepModule

STAGES = ("import", "compare", "time")

RIGHT, WRONG, REFUSED, CRASHED, NOT_EXPORTED = "right", "wrong", "refused", "crashed", "not exported"
IMPORTED = "imported"
"""Read and differentiated, and not built."""
REWRITTEN = "rewritten"
"""Right, but for parameters that the exporter has merged or computed of the model's, of which the import warns."""

TIMED = (RIGHT, REWRITTEN)

_SHOWN = 3

INPUTS = 8
"""Batches that are tried until no gradient has differed for all of them."""


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        result: "imported", "right", "rewritten", "wrong", "refused" (a sentence of ours), "crashed" or "not exported".
        reason: the sentence; for a wrong step what differs.
        parameters: how many numbers are trained.
        error, float32_error: the largest error of a gradient, of ours and of PyTorch's float32.
        inputs: how many batches were compared, and batch: samples in each.
        build_seconds: from the file to the shared library.
        step, torch_step: seconds of a step, medians; ratio: the median of theirs / ours of each pair.
        memory, torch_memory: bytes of a step's process beyond those of its libraries.
    """

    name: str
    form: str
    result: str
    reason: str = ""
    parameters: int = 0
    error: float | None = None
    float32_error: float | None = None
    inputs: int | None = None
    batch: int | None = None
    build_seconds: float | None = None
    step: float | None = None
    torch_step: float | None = None
    ratio: float | None = None
    memory: int | None = None
    torch_memory: int | None = None


def run_case(
    architecture: Architecture,
    form: str,
    stage: str,
    batch: int,
    seconds: float,
    target: Target | None = None,
    libraries: Path | None = None,
) -> Outcome:
    """Try one architecture in one form, up to a stage; nothing is raised, everything is told in the outcome.

    Args:
        batch: samples of a step.
        seconds: how long turns are timed.
        target: what is compiled for, this CPU unless another is given.
        libraries: where libraries of right steps are kept; stage "time" takes one that is there as it is.
    """
    outcome = Outcome(architecture.name, form, NOT_EXPORTED)
    kept = libraries and libraries / f"{architecture.name.replace(':', '-')}-{form}-{batch}.so"
    with tempfile.TemporaryDirectory(prefix="convgrad-zoo-") as folder:
        try:
            torch.manual_seed(0)
            module = architecture.make()
            if form == "onnx":
                make_distinct(module)
            module.train(form == "train")
            problem = draw(module, architecture, batch, seed=0)
            outcome = replace(outcome, parameters=sum(value.numel() for value in module.parameters()))
            if stage == "time" and kept and kept.exists():
                outcome = replace(outcome, result=RIGHT)
                return measured(outcome, module, kept, Session(kept), problem, seconds)
            path = export(module, problem, form, Path(folder))
        except Exception as error:  # whatever PyTorch's exporter raises is the outcome
            return replace(outcome, reason=one_line(error))
        try:
            begin = time.perf_counter()
            model = load_model(path, outputs=problem.outputs)
            if not isinstance(model, Model):
                return replace(outcome, result=WRONG, reason="imported as a program with gradients of its own")
            step = build_step(
                model, loss=problem.loss, lr=RATE, dropout_mode="off", bn="train" if form == "train" else "frozen"
            )
            if stage == "import":
                return replace(outcome, result=IMPORTED, build_seconds=time.perf_counter() - begin)
            library = Path(folder) / "step.so"
            target = target or native_target()
            with compile_apart(KernelBuilds(KeptObjects())):
                executable, _plan, initial = compile_to_link(step, target)
            save_artifact(executable, make_manifest(step, target, []), library, initial=initial)
            outcome = replace(outcome, build_seconds=time.perf_counter() - begin)
            session = Session(library)
            outcome = compared(outcome, module, architecture, session, step, problem, model.warnings)
            if kept and outcome.result in TIMED:
                kept.parent.mkdir(parents=True, exist_ok=True)
                shutil.move(library, kept)
                library = kept
            if stage == "time" and outcome.result in TIMED:
                outcome = measured(outcome, module, library, session, problem, seconds)
            return outcome
        except ConvGradError as error:
            return replace(outcome, result=REFUSED, reason=one_line(error))
        except Exception as error:  # a crash is an outcome, with the place where it happened
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: "
            return replace(outcome, result=CRASHED, reason=where + one_line(error))


def compared(
    outcome: Outcome,
    module: nn.Module,
    architecture: Architecture,
    session: Session,
    step: StepModule,
    problem: Problem,
    warnings: Sequence[str],
) -> Outcome:
    """The outcome with the comparison's result; `warnings` are those of the import."""
    differing: dict[str, float] | None = None
    for seed in range(INPUTS):
        problem = draw(module, architecture, problem.inputs[0].shape[0], seed)
        session.reset()
        found = compare(module, session, step, problem)
        differing = {name: error for name, error in found.differing.items() if differing is None or name in differing}
        batch = problem.inputs[0].shape[0]
        outcome = replace(outcome, error=found.error, float32_error=found.float32_error, inputs=seed + 1, batch=batch)
        outcome = replace(outcome, result=WRONG if differing else RIGHT, reason=found.sentence(differing))
        if not differing:
            break
    if found.others and outcome.result == RIGHT:
        shown = ", ".join(sorted(found.others)[:_SHOWN])
        reason = f"{len(found.others)} parameters are in the module or in the step only: {shown}"
        result = (
            REWRITTEN if any("the exporter has" in each or "of the exporter" in each for each in warnings) else WRONG
        )
        outcome = replace(outcome, result=result, reason=reason)
    return outcome


def measured(
    outcome: Outcome, module: nn.Module, library: Path, session: Session, problem: Problem, seconds: float
) -> Outcome:
    """The outcome with times and memory of a step of ours and of PyTorch's."""
    with without_dropout(module):
        ours, theirs = timed(module, session, problem, seconds)
    mode = "train" if module.training else "eval"
    with tempfile.NamedTemporaryFile(prefix="convgrad-zoo-", suffix=".pt") as file:
        torch.save(problem, file.name)
        return replace(
            outcome,
            step=median(ours),
            torch_step=median(theirs),
            ratio=median(their / our for our, their in zip(ours, theirs, strict=True)),
            memory=memory("ours", str(library), Path(file.name)),
            torch_memory=memory("torch", f"{outcome.name} {mode}", Path(file.name)),
        )


def one_line(error: BaseException) -> str:
    """The first line of a message, at most 300 characters."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def main() -> None:
    """Run the case that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("form", choices=FORMS)
    parser.add_argument("--stage", choices=STAGES, default="time")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--libraries", type=Path, help="a folder to keep libraries of right steps in")
    parser.add_argument("--shapes", type=json.loads, help="JSON: shapes of the inputs for one sample")
    given = parser.parse_args()
    shapes = tuple(map(tuple, given.shapes)) if given.shapes else Architecture("").shapes
    architecture = Architecture(given.name, shapes)
    outcome = run_case(architecture, given.form, given.stage, given.batch, given.seconds, libraries=given.libraries)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
