# SPDX-License-Identifier: Apache-2.0
"""Measurements of per-sample gradients: compiled ones (training.autodiff.per_sample) against torch.func.vmap(grad)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax
from tvm.target import Target

from tvm_convgrad.bench.baselines import prepare_baselines
from tvm_convgrad.bench.contenders import BUILT_IN, Step
from tvm_convgrad.bench.results import save_measurements
from tvm_convgrad.bench.run_options import RunOptions
from tvm_convgrad.bench.steps import rounds
from tvm_convgrad.core.errors import ModelError, SetupError
from tvm_convgrad.report.tables import print_table, quantity
from tvm_convgrad.threads import use_threads
from tvm_convgrad.training.autodiff.per_sample import Result
from tvm_convgrad.training.compile.lower import compile_module
from tvm_convgrad.training.step.per_sample import per_sample_module

if TYPE_CHECKING:
    from torch import Tensor, nn

RESULTS: tuple[Result, ...] = get_args(Result)
"""The results that are measured: gradients; their norms; norms and the sum of the gradients times min(1, 1 / norm)."""

TOLERANCE = 1e-3

Arrays = list[npt.NDArray[np.float32]]


@dataclass(frozen=True)
class PerSampleMeasurement:
    """The measurement of the per-sample gradients of a network.

    Attributes:
        model, batch: the network in evaluation mode (no batch statistics, no dropout), and its samples.
        result: one of RESULTS.
        ours, theirs: seconds, medians; ratio: the median of theirs / ours of each pair; pairs: how many.
    """

    model: str
    batch: int
    result: str
    ours: float
    theirs: float
    ratio: float
    pairs: int


def run_per_sample(
    models: Sequence[str], batches: Sequence[int] | None, options: RunOptions
) -> list[PerSampleMeasurement]:
    """Measure each of RESULTS for every model and batch.

    Args:
        models: names of BUILT_IN; what is exported for a batch PyTorch cannot differentiate sample by sample.
        batches: batch sizes; None is 8.
        options: where to measure (on a CPU, by generated kernels), how long, and the file to write.

    Raises:
        ModelError: no network of BUILT_IN.
        SetupError: PyTorch is missing, or the results differ.
    """
    for model in models:
        if model not in BUILT_IN:
            raise ModelError(f"bench --per-sample --step {model}: give one or more of {', '.join(BUILT_IN)}.")
    count = use_threads(options.threads)
    prepare_baselines(["torch"], count, options.config)
    found: list[PerSampleMeasurement] = []
    for model, batch, result in product(models, batches or [8], RESULTS):
        found.append(_measure(model, batch, result, options))
        save_measurements("per_sample", found, options, count)
    return found


def _measure(name: str, batch: int, result: Result, options: RunOptions) -> PerSampleMeasurement:
    """The measurement of one result for one batch."""
    import torch

    from tvm_convgrad.bench.networks import network

    module, size = network(name)
    module.eval()
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal((batch, 3, size, size), dtype=np.float32))
    labels = torch.from_numpy(rng.integers(0, 10, batch))
    values: dict[str, Arrays] = {}
    contenders: dict[str, Step] = {
        "ours": _ours(module, x, labels, result, options.config.target, values),
        "torch": _theirs(module, x, labels, result, values),
    }
    for call in contenders.values():
        call()
    _check(f"{name}, {result}", values)
    values.clear()
    times = rounds(contenders, options.seconds)
    ratio = median(their / our for our, their in zip(times["ours"], times["torch"], strict=True))
    ours, theirs = (median(times[contender]) for contender in contenders)
    return PerSampleMeasurement(name, batch, result, ours, theirs, ratio, len(times["ours"]))


def _ours(
    module: nn.Module, x: Tensor, labels: Tensor, result: Result, target: Target, values: dict[str, Arrays]
) -> Step:
    """The compiled function; the first call leaves its results in `values`."""
    import torch

    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    model = from_exported_program(torch.export.export(module, (x,)))
    compiled = compile_module(per_sample_module(model, result=result), target)
    main = relax.VirtualMachine(compiled, tvm.cpu())["main_per_sample"]
    arrays = [x.numpy(), labels.numpy(), *model.parameters.values(), *model.states.values()]
    tensors = [*map(tvm.runtime.tensor, arrays), *([tvm.runtime.tensor(np.float32(1))] if result == "clipped" else [])]

    def call() -> float:
        losses, _, *found = main(*tensors)
        if "torch" not in values:
            values["ours"] = [each.numpy() for each in _flat(found)]
        return float(losses.numpy()[0])

    return call


def _theirs(module: nn.Module, x: Tensor, labels: Tensor, result: Result, values: dict[str, Arrays]) -> Step:
    """torch.func.vmap(grad), and sums by hand; the first call leaves its results in `values`."""
    import torch

    parameters = {name: value.detach() for name, value in module.named_parameters()}

    def loss(given: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        scores = torch.func.functional_call(module, given, (image[None],))
        return torch.nn.functional.cross_entropy(scores, label[None])

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    def call() -> float:
        found = list(each(parameters, x, labels).values())
        if result != "gradients":
            norms = torch.stack([value.flatten(1).square().sum(1) for value in found]).sum(0).sqrt()
            factors = (1.0 / norms).clamp(max=1.0)
            found = [norms, *(torch.tensordot(factors, value, 1) for value in found if result == "clipped")]
        if "torch" not in values:
            values["torch"] = [value.numpy() for value in found]
        return 0.0

    return call


def _flat(value: Any) -> list[Any]:
    """The tensors of nested results, in order."""
    return [value] if hasattr(value, "numpy") else [tensor for part in value for tensor in _flat(part)]


def _check(what: str, values: dict[str, Arrays]) -> None:
    """Raise SetupError if the results of the two contenders differ."""
    ours, theirs = values["ours"], values["torch"]
    for mine, their in zip(ours, theirs, strict=True):
        difference = float(np.abs(mine - their).max()) if mine.shape == their.shape else float("inf")
        if not difference <= TOLERANCE * max(float(np.abs(their).max()), 1e-3):
            raise SetupError(f"bench --per-sample: {what}: results differ from PyTorch's by {difference:.3g}")


def show_per_sample(found: Sequence[PerSampleMeasurement]) -> None:
    """Print a table of the measurements, a row each."""
    columns = ("model", "batch", "result", "ratio", "ours, ms", "torch, ms", "pairs")
    rows = [
        (m.model, m.batch, m.result, quantity(m.ratio), f"{m.ours * 1e3:.1f}", f"{m.theirs * 1e3:.1f}", m.pairs)
        for m in found
    ]
    print_table("per-sample gradients: time of torch / ours", columns, rows, right=("batch", *columns[3:]))


__all__ = ["PerSampleMeasurement", "run_per_sample", "show_per_sample"]
