# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and what their values may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from tvm_convgrad.errors import UnsupportedError

LAYOUTS = ("NCHW", "NHWC", "NHWC:OHWI")
DTYPES = ("float32", "float16", "bfloat16")
RESULTS = ("float32", "operands")
LOSSES = ("cross_entropy", "mse")
OPTIMIZERS = ("sgd", "adam", "adamw")
BATCH_NORMS = ("train", "train-all", "frozen")
DROPOUTS = ("train", "off")


def one_of(allowed: tuple[str, ...]) -> Callable[[str | None], str | None]:
    """A check of an option's value where the command line is parsed, so before anything is read."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r} is unknown; choose one of {', '.join(allowed)}.")
        return value

    return check


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[
    str | None,
    typer.Option(metavar="N|dynamic", help="Samples of a step; dynamic: any number. Default: as the model says."),
]
Params = Annotated[
    Path | None,
    typer.Option(
        help="Values of a Relay program's parameters, of relay.save_param_dict. Default: MODEL's .params file."
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="|".join(LAYOUTS),
        callback=one_of(LAYOUTS),
        help="Layout of a step's convolutions, and of their kernels.",
    ),
]
DType = Annotated[
    str,
    typer.Option(metavar="|".join(DTYPES), callback=one_of(DTYPES), help="Type that convolutions compute in."),
]
Results = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(RESULTS),
        callback=one_of(RESULTS),
        help="What 16-bit convolutions store: float32, or their operands' type. Default: float32; on GPUs operands.",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        help="What to compile for: llvm, native (this CPU and its number of cores), TVM's JSON, or a GPU: cuda:sm_90."
    ),
]
Loss = Annotated[str, typer.Option(metavar="|".join(LOSSES), callback=one_of(LOSSES), help="Loss of the step.")]
Optimizer = Annotated[str, typer.Option(metavar="|".join(OPTIMIZERS), callback=one_of(OPTIMIZERS), help="Update rule.")]
ModelOutputs = Annotated[
    list[str] | None,
    typer.Option(
        "--model-output",
        metavar="NAME[=WEIGHT]",
        help="Which output of a model with several is trained; repeatable: the first one is the predictions, and the "
        "loss is the sum of the losses of all of them, times their weights.",
    ),
]
Rate = Annotated[float | None, typer.Option(min=0.0, help="Learning rate. Default: the optimizer's.")]
Momentum = Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Momentum of sgd.")]
Nesterov = Annotated[bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov momentum for sgd.")]
Betas = Annotated[tuple[float, float] | None, typer.Option(help="Decay of the two moments of adam and adamw.")]
LossScale = Annotated[
    float | None,
    typer.Option(min=0.0, help="Factor on the loss in the backward pass, undone after. Default: 1024 for float16."),
]
BatchNorm = Annotated[
    str,
    typer.Option(
        "--bn",
        metavar="|".join(BATCH_NORMS),
        callback=one_of(BATCH_NORMS),
        help="Normalise by the batch, or by the model's statistics; train: by the latter where a layer is frozen.",
    ),
]
Dropout = Annotated[
    str, typer.Option(metavar="|".join(DROPOUTS), callback=one_of(DROPOUTS), help="Seeded dropout, or none.")
]
WeightDecay = Annotated[float | None, typer.Option(min=0.0, help="Weight decay.")]
Accumulate = Annotated[
    int, typer.Option(metavar="K", min=1, help="Micro-batches of the model's batch in a step, with one update.")
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of initial values and dropout.")]
Offload = Annotated[
    str,
    typer.Option(
        metavar="auto|none|onednn|cudnn|cutlass",
        help="Vendor libraries for convolutions; auto: where no kernel is generated.",
    ),
]
Transforms = Annotated[
    bool,
    typer.Option(
        "--transforms",
        help="Let 3x3 kernels compute by Winograd's transform where it is estimated to be faster; it rounds otherwise.",
    ),
]
Tuned = Annotated[
    bool,
    typer.Option("--tuned/--no-tuned", help="Take the cuts and engines that `convgrad tune` has kept, where it has."),
]
Store = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Tunings. Default: CONVGRAD_TUNINGS, or a file in the user's cache folder."),
]


def results_for(results: str | None, target: Any) -> str:
    """The value of --results: PyTorch's and cuDNN's way on GPUs, the more exact one on CPUs, unless it is stated."""
    return results or ("operands" if target.kind.name == "cuda" else "float32")


def engine_store(tuned: bool, store: Path | None, target: Any) -> Any:
    """The tuned engines of cuDNN that calls are to take: those beside the tunings; None for CPUs and with --no-tuned.

    Raises:
        typer.BadParameter: --no-tuned, and settings that want tuned engines only.
    """
    from tvm_convgrad.offload.cudnn.settings import VARIABLE, settings
    from tvm_convgrad.offload.cudnn.store import EngineStore, beside
    from tvm_convgrad.tuning.store import default_path

    if target.kind.name != "cuda":
        return None
    if tuned:
        return EngineStore(beside(store or default_path()))
    if settings().cached:
        raise typer.BadParameter(f"--no-tuned: {VARIABLE} says cached, which takes tuned engines only; leave one out.")
    return None


def parse_target(text: str, gpus: bool = False) -> Any:
    """The value of --target, a TVM target; arguments as `training.cpu.parse_target`.

    Raises:
        typer.BadParameter: no such target, or not one that may be.
        SetupError: "cuda" on a machine without a GPU.
    """
    from tvm_convgrad.training import cpu

    try:
        return cpu.parse_target(text, gpus=gpus)
    except UnsupportedError as error:
        raise typer.BadParameter(f"--target: {error}") from error


def check_optimizer(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse settings that an update rule does not have, or that contradict, before a model is read.

    Raises:
        typer.BadParameter: with the sentence of the rule.
    """
    from tvm_convgrad.training.optimizers import make_optimizer

    try:
        make_optimizer(name, settings)
    except UnsupportedError as error:
        raise typer.BadParameter(f"--optimizer {name}: {str(error).removeprefix('build_step: ')}") from error


def parse_outputs(texts: Sequence[str] | None) -> dict[str, float] | None:
    """The values of --model-output: names of outputs with the weights of their losses, 1 by default; None without.

    Raises:
        typer.BadParameter: a weight that is no positive number, or a name that is given twice.
    """
    if not texts:
        return None
    found: dict[str, float] = {}
    for text in texts:
        name, separator, number = text.rpartition("=")
        if not separator:
            name, number = text, "1"
        try:
            weight = float(number)
        except ValueError:
            weight = math.nan
        if not name or not (math.isfinite(weight) and weight > 0):
            raise typer.BadParameter(f"--model-output {text}: give NAME or NAME=WEIGHT, a positive number.")
        if name in found:
            raise typer.BadParameter(f"--model-output {name} is given twice; give each output once.")
        found[name] = weight
    return found


def parse_batch(text: str | None) -> int | Literal["dynamic"] | None:
    """The value of --batch: a number, "dynamic", or None for the model's own.

    Raises:
        typer.BadParameter: anything else.
    """
    if text is None:
        return None
    if text == "dynamic":
        return "dynamic"
    if not text.isdecimal() or int(text) == 0:
        raise typer.BadParameter(f"--batch {text}: give a positive number, or dynamic.")
    return int(text)


def parse_offload(text: str) -> tuple[str, ...]:
    """The value of --offload.

    Raises:
        typer.BadParameter: an unknown name.
    """
    from tvm_convgrad.offload import common

    try:
        return common.parse_offload(text)
    except UnsupportedError as error:
        raise typer.BadParameter(str(error)) from error
