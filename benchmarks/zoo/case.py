# SPDX-License-Identifier: Apache-2.0
"""One architecture in one form: export it, build its training step, compare a step with PyTorch in float64, time it.

    python -m benchmarks.zoo.case timm:convnext_atto train     prints a line of JSON, the `Outcome`

The comparison is of one step of plain SGD, dropout off in both: the loss, the gradient of every parameter, and the
running statistics after it. An error is measured in the error that PyTorch itself makes in float32 on the same step, so
that an ill-conditioned model is not counted against either. A rectifier's input that rounds to the other side of zero
moves the gradients before it by more than rounding, on other inputs those of other parameters. So a gradient counts as
wrong that differs for each of up to `INPUTS` batches.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.zoo.architectures import Architecture
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.model.outputs import Outputs
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.build import build_step
from tvm_convgrad.training.step.module import StepModule
from tvm_convgrad.verify.bulk import native_target

FORMS = ("train", "eval", "onnx")
"""`.pt2` exported in training mode, `.pt2` in evaluation mode, and what torch.onnx.export writes by default."""

STAGES = ("import", "compare", "time")

RIGHT, WRONG, REFUSED, CRASHED, NOT_EXPORTED = "right", "wrong", "refused", "crashed", "not exported"

TIMES_FLOAT32 = 8.0
"""How many times PyTorch's own float32 error ours may be."""

LEAST_ERROR = 2e-5
"""An error that is always accepted, relative to the largest gradient."""

INPUTS = 4
"""Batches that are tried until no gradient has differed for all of them."""

RATE = 1.0


@dataclass(frozen=True)
class Outcome:
    """What came of a case.

    Attributes:
        result: "imported", "right", "wrong", "refused" (a sentence of ours), "crashed" or "not exported".
        reason: the sentence; for a wrong step what differs.
        parameters: how many numbers are trained.
        error, float32_error: the largest error of a gradient, of ours and of PyTorch's float32.
        inputs: how many batches were compared.
        build_seconds: from the file to the shared library.
        step, torch_step: seconds of a step, medians; ratio: the median of theirs / ours of each pair.
    """

    name: str
    form: str
    result: str
    reason: str = ""
    parameters: int = 0
    error: float | None = None
    float32_error: float | None = None
    inputs: int | None = None
    build_seconds: float | None = None
    step: float | None = None
    torch_step: float | None = None
    ratio: float | None = None


@dataclass(frozen=True)
class Problem:
    """What is trained: inputs and target of one batch, and which output, if there are several."""

    inputs: tuple[Tensor, ...]
    target: Tensor
    loss: str
    outputs: Outputs | None = None


def run_case(architecture: Architecture, form: str, stage: str, batch: int, seconds: float) -> Outcome:
    """Try one architecture in one form, up to a stage; nothing is raised, everything is told in the outcome."""
    outcome = Outcome(architecture.name, form, NOT_EXPORTED)
    with tempfile.TemporaryDirectory(prefix="convgrad-zoo-") as folder:
        try:
            torch.manual_seed(0)
            module = architecture.make()
            module.train(form == "train")
            problem = draw(module, architecture, batch, seed=0)
            outcome = replace(outcome, parameters=sum(value.numel() for value in module.parameters()))
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
                return replace(outcome, result="imported", build_seconds=time.perf_counter() - begin)
            library = Path(folder) / "step.so"
            target = native_target()
            executable, _plan = compile_with_plan(step, target)
            save_artifact(executable, make_manifest(step, target, []), library)
            outcome = replace(outcome, build_seconds=time.perf_counter() - begin)
            session = Session(library)
            return measured(outcome, module, architecture, session, step, problem, stage, seconds)
        except ConvGradError as error:
            return replace(outcome, result=REFUSED, reason=one_line(error))
        except Exception as error:  # a crash is an outcome, with the place where it happened
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{type(error).__name__} at {Path(place.filename).name}:{place.lineno}: "
            return replace(outcome, result=CRASHED, reason=where + one_line(error))


def measured(
    outcome: Outcome,
    module: nn.Module,
    architecture: Architecture,
    session: Session,
    step: StepModule,
    problem: Problem,
    stage: str,
    seconds: float,
) -> Outcome:
    """The outcome with the comparison's result, and the times if the stage is "time" and the step is right."""
    differing: dict[str, float] | None = None
    for seed in range(INPUTS):
        problem = draw(module, architecture, problem.inputs[0].shape[0], seed)
        session.reset()
        found = compare(module, session, step, problem)
        differing = {name: error for name, error in found.differing.items() if differing is None or name in differing}
        outcome = replace(outcome, error=found.error, float32_error=found.float32_error, inputs=seed + 1)
        outcome = replace(outcome, result=WRONG if differing else RIGHT, reason=found.sentence(differing))
        if not differing:
            break
    if stage != "time" or outcome.result != RIGHT:
        return outcome
    ours, theirs = timed(module, session, problem, seconds)
    ratio = median(their / our for our, their in zip(ours, theirs, strict=True))
    return replace(outcome, step=median(ours), torch_step=median(theirs), ratio=ratio)


def draw(module: nn.Module, architecture: Architecture, batch: int, seed: int) -> Problem:
    """Inputs and a target that fits the model's (first) output."""
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(torch.randn(batch, *shape, generator=generator) for shape in architecture.shapes)
    with torch.no_grad():
        found = copy.deepcopy(module).eval()(*inputs)
    shape = first_tensor(found).shape
    outputs = {"0": 1.0} if len(torch.utils._pytree.tree_leaves(found)) > 1 else None
    if len(shape) >= 2 and shape[1] > 1:
        target = torch.randint(0, shape[1], (shape[0], *shape[2:]), generator=generator)
        return Problem(inputs, target, "cross_entropy", outputs)
    return Problem(inputs, torch.randn(shape, generator=generator), "mse", outputs)


def first_tensor(value: object) -> Tensor:
    """The first tensor of a nested output, in the order in which torch.export flattens it."""
    return torch.utils._pytree.tree_flatten(value)[0][0]


def export(module: nn.Module, problem: Problem, form: str, folder: Path) -> Path:
    """Write the model as PyTorch does by default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if form == "onnx":
            path = folder / "model.onnx"
            torch.onnx.export(module, problem.inputs, path, verbose=False)
            return path
        path = folder / "model.pt2"
        torch.export.save(torch.export.export(module, problem.inputs), path)
        return path


@contextmanager
def without_dropout(module: nn.Module) -> Iterator[None]:
    """No dropout, of modules or of functions, and no dropped paths."""
    kept = []
    for part in module.modules():
        kind = type(part).__name__.lower()
        for name in ("p", "drop_prob"):
            dropping = "drop" in kind or "stochasticdepth" in kind
            if dropping and isinstance(getattr(part, name, None), float):
                kept.append((part, name, getattr(part, name)))
                setattr(part, name, 0.0)

    def unchanged(x: Tensor, *_arguments: object, **_options: object) -> Tensor:
        return x

    with mock.patch("torch.nn.functional.dropout", unchanged), mock.patch("torch.dropout", unchanged):
        yield
    for part, name, value in kept:
        setattr(part, name, value)


def torch_step_of(module: nn.Module, problem: Problem, dtype: torch.dtype) -> tuple[float, dict[str, np.ndarray]]:
    """Loss, and by name the gradients and the new running statistics, of PyTorch in a type."""
    twin = copy.deepcopy(module).to(dtype)
    inputs = [value.to(dtype) for value in problem.inputs]
    criterion = nn.functional.mse_loss if problem.loss == "mse" else nn.functional.cross_entropy
    target = problem.target.to(dtype) if problem.target.is_floating_point() else problem.target
    with without_dropout(twin):
        loss = criterion(first_tensor(twin(*inputs)), target)
    loss.backward()
    found = {name: value.grad for name, value in twin.named_parameters() if value.grad is not None}
    found |= dict(twin.named_buffers())
    return loss.item(), {name: value.detach().double().numpy() for name, value in found.items()}


@dataclass(frozen=True)
class Comparison:
    """A step beside PyTorch's in float64.

    Attributes:
        differing: relative errors of the loss and the gradients and statistics that differ by more than rounding.
        count: how many gradients and statistics there are.
        error, float32_error: the largest error of a gradient, of ours and of PyTorch's float32.
    """

    differing: Mapping[str, float]
    count: int
    error: float
    float32_error: float

    def sentence(self, names: Collection[str]) -> str:
        """Those of the names that differ most; "" for none."""
        worst = sorted(((self.differing[name], name) for name in names), reverse=True)
        shown = ", ".join(f"{name} by {error:.1e}" for error, name in worst[:3])
        return f"{len(worst)} of {self.count} differ: {shown}" if worst else ""


def compare(module: nn.Module, session: Session, step: StepModule, problem: Problem) -> Comparison:
    """A step of ours beside PyTorch's in float64 and in float32.

    A gradient is the difference of float32 parameters, which carries their rounding, half a unit of their size.
    """
    wanted_loss, wanted = torch_step_of(module, problem, torch.float64)
    rounded_loss, rounded = torch_step_of(module, problem, torch.float32)
    roles = {schema.name: schema.role for schema in step.state}
    before = {name: np.array(value) for name, value in session.state.items()}
    loss, _ = session.step(
        tuple(value.numpy() for value in problem.inputs) if len(problem.inputs) > 1 else problem.inputs[0].numpy(),
        problem.target.numpy(),
        RATE,
    )
    after = session.state
    ours = {
        name: (before[name] - after[name]).astype("float64") / RATE if role == "parameter" else after[name]
        for name, role in roles.items()
        if role in ("parameter", "running_stat")
    }
    differing = {}
    limit = max(1e-4 * abs(wanted_loss), TIMES_FLOAT32 * abs(rounded_loss - wanted_loss))
    if not abs(loss - wanted_loss) <= limit:
        differing["the loss"] = abs(loss - wanted_loss) / abs(wanted_loss)
    differing |= {f"the name {name}, which the module lacks,": np.inf for name in set(ours) - set(wanted)}
    known = ours.keys() & wanted.keys()
    largest = max((float(np.abs(wanted[name]).max(initial=0.0)) for name in known), default=0.0) or 1.0
    worst, worst32 = 0.0, 0.0
    for name in known:
        scale = max(float(np.abs(wanted[name]).max(initial=0.0)), 1e-2 * largest)
        error = float(np.abs(ours[name] - wanted[name]).max(initial=0.0)) / scale
        error32 = float(np.abs(rounded[name] - wanted[name]).max(initial=0.0)) / scale
        stored = float(np.abs(before[name]).max(initial=0.0)) * 2.0**-23 / scale
        worst, worst32 = max(worst, error), max(worst32, error32)
        if not error <= max(LEAST_ERROR, TIMES_FLOAT32 * error32) + stored:
            differing[name] = error
    return Comparison(differing, len(ours), worst, worst32)


def timed(module: nn.Module, session: Session, problem: Problem, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds of our steps and of PyTorch's eager steps, in turns."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
    criterion = nn.functional.mse_loss if problem.loss == "mse" else nn.functional.cross_entropy
    arrays = tuple(value.numpy() for value in problem.inputs)
    ours: list[float] = []
    theirs: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(ours) < 5:
        begin = time.perf_counter()
        session.step(arrays if len(arrays) > 1 else arrays[0], problem.target.numpy(), 1e-3)
        middle = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        criterion(first_tensor(module(*problem.inputs)), problem.target).backward()
        optimizer.step()
        ours.append(middle - begin)
        theirs.append(time.perf_counter() - middle)
    return ours[2:], theirs[2:]


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
    parser.add_argument("--shapes", type=json.loads, help="JSON: shapes of the inputs for one sample")
    given = parser.parse_args()
    shapes = tuple(map(tuple, given.shapes)) if given.shapes else Architecture("").shapes
    outcome = run_case(Architecture(given.name, shapes), given.form, given.stage, given.batch, given.seconds)
    print(json.dumps(asdict(outcome)))


if __name__ == "__main__":
    main()
