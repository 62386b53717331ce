# SPDX-License-Identifier: Apache-2.0
"""The options that several commands share: their types, help texts and values, and the checks of values."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from tvm_convgrad.core.catalogue import BY_SHORT, WORDS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.offload import registry
from tvm_convgrad.training.model.own_loss import MODEL_LOSS, OwnLoss
from tvm_convgrad.training.step import options as step_options
from tvm_convgrad.training.step.names import (
    ACTIVATIONS,
    BATCH_NORMS,
    DECAYED,
    DROPOUTS,
    DTYPES,
    DYNAMIC,
    LAYOUTS,
    LOSSES,
    OPTIMIZERS,
    RESULTS,
)
from tvm_convgrad.training.step.options import LossSettings, optimizer_settings

if TYPE_CHECKING:
    from tvm.target import Target as TvmTarget

    from tvm_convgrad.offload.cudnn.store import EngineStore


def one_of(allowed: tuple[str, ...]) -> Callable[[str | None], str | None]:
    """A typer callback that refuses other values than `allowed`, before anything is read."""

    def check(value: str | None) -> str | None:
        if value is not None and value not in allowed:
            raise typer.BadParameter(f"{value!r} is unknown; choose one of {', '.join(allowed)}.")
        return value

    return check


DIRECTION_METAVAR = "wgrad|dgrad|forward|all"
FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def finite_float32(value: float | None) -> float | None:
    """A typer callback that refuses numbers which are not finite in float32, the type of a compiled step's scalars."""
    if value is not None and not abs(value) <= FLOAT32_MAX:
        raise typer.BadParameter(f"{value:g} is not a finite float32 number.")
    return value


def loss_scale(text: str | None) -> str | None:
    """A typer callback that refuses what is neither a number from 0 on nor "dynamic"."""
    if text is None or text == DYNAMIC:
        return text
    try:
        number = float(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a number nor {DYNAMIC}.") from None
    if number < 0:
        raise typer.BadParameter(f"{number:g} is not in the range x>=0.")
    finite_float32(number)
    return text


def parse_loss_scale(text: str | None) -> float | str | None:
    """The value of --loss-scale, which `loss_scale` has accepted."""
    return text if text is None or text == DYNAMIC else float(text)


Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Batch = Annotated[
    str | None,
    typer.Option(
        metavar="N|dynamic",
        help="Samples in a batch; dynamic: any number, chosen at run time. Default: the model's own batch.",
    ),
]
Params = Annotated[
    Path | None,
    typer.Option(
        help="Only for a Relay program: the values of its parameters, a file of relay.save_param_dict. Default: the "
        "file beside the program with the ending .params."
    ),
]
Layout = Annotated[
    str,
    typer.Option(
        metavar="|".join(LAYOUTS),
        callback=one_of(LAYOUTS),
        help="Layout that the data of convolutions is converted to; NHWC:OHWI: their weights are converted, too.",
    ),
]
DType = Annotated[
    str,
    typer.Option(
        metavar="|".join(DTYPES),
        callback=one_of(DTYPES),
        help="Type of the operands of convolutions and matrix products; parameters stay float32.",
    ),
]
Results = Annotated[
    str | None,
    typer.Option(
        metavar="|".join(RESULTS),
        callback=one_of(RESULTS),
        help="What float16 and bfloat16 steps store in 16 bits: results of convolutions (operands), all activations, "
        "or neither (float32). Default: activations; on GPUs operands.",
    ),
]
Target = Annotated[
    str,
    typer.Option(
        help="What to compile for. llvm: any CPU of this machine's kind; native: this CPU, with all its instructions "
        "and cores; aarch64-linux, armv8.2-a+fp16+dotprod, x86-64-v2-linux, -v3-linux, -v4-linux: another machine's; "
        "cuda:sm_90 and others: a GPU by its architecture; or a target of TVM as JSON."
    ),
]
Linker = Annotated[
    str | None,
    typer.Option(
        "--cc",
        metavar="COMMAND",
        help="The C++ compiler that links the library. Default: CXX, or one that is installed for the target.",
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        metavar="|".join(LOSSES),
        callback=one_of(LOSSES),
        help="Loss that is minimised. cross_entropy (of scores) and nll (of their logarithms) take class numbers; bce "
        "(of scores), mse, l1 and huber take values. model: the model takes the target, too, and returns the loss "
        "itself, a mean over the batch.",
    ),
]
LabelSmoothing = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, help="For cross_entropy: the part of each label that is spread over all classes."),
]
ClassWeights = Annotated[
    str | None,
    typer.Option(metavar="W,W,...", help="For cross_entropy, nll and bce: a weight for each class."),
]
IgnoreIndex = Annotated[
    int | None, typer.Option(help="For cross_entropy and nll: a class number whose positions have no loss.")
]
PositiveWeight = Annotated[
    str | None, typer.Option(metavar="W,W,...", help="For bce: for each class, the weight of where it is.")
]
Delta = Annotated[
    float | None,
    typer.Option(min=0.0, callback=finite_float32, help="For huber: where it becomes linear. Default: 1."),
]
Optimizer = Annotated[
    str,
    typer.Option(
        metavar="|".join(OPTIMIZERS),
        callback=one_of(OPTIMIZERS),
        help="Optimizer, with PyTorch's meaning of its settings; lamb is that of its paper, for large batches.",
    ),
]
ModelOutputs = Annotated[
    list[str] | None,
    typer.Option(
        "--model-output",
        metavar="NAME[=WEIGHT]",
        help="For a model with several outputs: one that is trained, and the weight of its loss (1 by default). "
        "Repeatable: the loss is the weighted sum, and the first output is the predictions. With --loss model: a loss, "
        "or the predictions.",
    ),
]
ModelTarget = Annotated[
    str | None,
    typer.Option(
        "--model-target", metavar="NAME", help="With --loss model: the input that is the target. Default: the last one."
    ),
]
Train = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,...",
        help="Train these parameters only, the rest is frozen: names of parameters or modules, with wildcards, such as "
        "'layer4.*,fc'. Default: all.",
    ),
]
Rate = Annotated[
    float | None, typer.Option(min=0.0, callback=finite_float32, help="Learning rate. Default: the optimizer's.")
]
Momentum = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, callback=finite_float32, help="Momentum, for sgd. Default: 0.")
]
Nesterov = Annotated[
    bool | None, typer.Option("--nesterov/--no-nesterov", help="Nesterov's momentum, for sgd. Default: no.")
]
Betas = Annotated[
    tuple[float, float] | None,
    typer.Option(help="Decay rates of the two moments, for adam, adamw and lamb. Default: 0.9 0.999."),
]
LossScale = Annotated[
    str | None,
    typer.Option(
        metavar="N|dynamic",
        callback=loss_scale,
        help="Factor on the loss in the backward pass, undone before the update; dynamic: one that adapts, and updates "
        "whose gradients are not finite are left out. Default: 1024 for float16, else 1.",
    ),
]
BatchNorm = Annotated[
    str,
    typer.Option(
        "--bn",
        metavar="|".join(BATCH_NORMS),
        callback=one_of(BATCH_NORMS),
        help="Statistics of batch norms. train: of the batch, but the running ones in layers whose scale and shift "
        "are frozen; train-all: always of the batch; frozen: always the running ones.",
    ),
]
Dropout = Annotated[
    str,
    typer.Option(
        metavar="|".join(DROPOUTS),
        callback=one_of(DROPOUTS),
        help="train: dropout as in the model, seeded by --seed; off: none.",
    ),
]
WeightDecay = Annotated[
    float | None, typer.Option(min=0.0, callback=finite_float32, help="Weight decay. Default: the optimizer's.")
]
Decayed = Annotated[
    str,
    typer.Option(
        metavar="|".join(DECAYED),
        callback=one_of(DECAYED),
        help="Which parameters have weight decay: all, or matrices: none of one axis, such as biases and norms.",
    ),
]
Ema = Annotated[
    float | None,
    typer.Option(
        metavar="DECAY",
        min=0.0,
        max=1.0,
        callback=finite_float32,
        help="Keep a moving average of each parameter, such as by 0.999 a step; `run --averages` tests and saves it.",
    ),
]
ClipNorm = Annotated[
    float | None,
    typer.Option(callback=finite_float32, help="Scale all gradients to this norm where theirs together is larger."),
]
ClipValue = Annotated[
    float | None, typer.Option(callback=finite_float32, help="Bound each number of the gradients by this size.")
]
Accumulate = Annotated[
    int,
    typer.Option(
        metavar="K", min=1, help="Accumulate the gradients of K batches (micro-batches) in a step, and update once."
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Divide the batch into as many micro-batches as it takes for the planned memory of a step to be at most "
        "SIZE, such as 512MB: state, inputs and all tensors at the peak.",
    ),
]
Split = Annotated[
    bool,
    typer.Option(
        "--split",
        help="Give the step the functions gradients, apply and evaluate, too: for several processes or a loop of one's "
        "own.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="Seed of initial values and of dropout.")]
Offload = Annotated[
    str,
    typer.Option(
        metavar="|".join((registry.AUTO, registry.NONE, *registry.NAMES)),
        help="Vendor libraries for convolutions, several with commas. auto: a library where no kernel can be made, "
        "or where `tune --offload` has measured it to be faster; none: generated kernels only.",
    ),
]
Transforms = Annotated[
    bool,
    typer.Option(
        "--transforms",
        help="Allow Winograd's transform for 3x3 kernels where it is estimated to be faster; its rounding differs.",
    ),
]
Tuned = Annotated[
    bool,
    typer.Option(
        "--tuned/--no-tuned", help="Use the tilings and cuDNN engines that `convgrad tune` has found on this machine."
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="File of `convgrad tune`'s results. Default: CONVGRAD_TUNINGS, or one in the user's cache folder.",
    ),
]

Cache = Annotated[
    bool,
    typer.Option(
        "--cache/--no-cache",
        help="Take what earlier builds have compiled from CONVGRAD_CACHE, or a folder in the user's cache folder, "
        "and keep what this one compiles there.",
    ),
]


def results_for(results: str | None, target: TvmTarget, dtype: str) -> str:
    """The value of --results; without it "operands" on GPUs, as PyTorch and cuDNN store.

    On CPUs it is "activations" for the 16-bit types of --dtype.
    """
    if target.kind.name == "cuda":
        return results or "operands"
    return results or ("float32" if dtype == "float32" else ACTIVATIONS)


def engine_store(tuned: bool, store: Path | None, target: TvmTarget) -> EngineStore | None:
    """The tuned engines of cuDNN that calls are to take: those beside the tunings; None for CPUs and with --no-tuned.

    Raises:
        typer.BadParameter: --no-tuned, and settings that want tuned engines only.
    """
    from tvm_convgrad.core.entries import default_path
    from tvm_convgrad.offload.cudnn.settings import VARIABLE, settings
    from tvm_convgrad.offload.cudnn.store import EngineStore, beside

    if target.kind.name != "cuda":
        return None
    if tuned:
        return EngineStore(beside(store or default_path()))
    if settings().cached:
        raise typer.BadParameter(f"--no-tuned: {VARIABLE}=cached takes tuned engines only; leave one out.")
    return None


def parse_target(text: str, gpus: bool = False) -> TvmTarget:
    """The value of --target, a TVM target; arguments as `training.compile.targets.parse_target`.

    Raises:
        typer.BadParameter: no such target, or not one that may be.
        SetupError: "cuda" on a machine without a GPU.
    """
    from tvm_convgrad.training.compile import targets

    try:
        return targets.parse_target(text, gpus=gpus)
    except UnsupportedError as error:
        raise typer.BadParameter(f"--target: {error}") from error


def check_optimizer(name: str, settings: Mapping[str, object]) -> None:
    """Refuse settings that an optimizer does not have, or that contradict each other, before a model is read.

    Raises:
        typer.BadParameter: with the sentence of the rule.
    """
    try:
        optimizer_settings(name, settings)
    except UnsupportedError as error:
        raise typer.BadParameter(f"--optimizer {name}: {str(error).removeprefix('build_step: ')}") from error


def check_clipping(norm: float | None, value: float | None) -> None:
    """Refuse bounds of gradients that are no positive numbers, before a model is read.

    Raises:
        typer.BadParameter: with the sentence of the rule.
    """
    try:
        step_options.check_clipping(norm, value)
    except UnsupportedError as error:
        raise typer.BadParameter(str(error).removeprefix("build_step: ")) from error


def check_loss(name: str, settings: LossSettings) -> None:
    """Refuse settings that a loss does not have, before a model is read.

    Raises:
        typer.BadParameter: with the sentence of the rule.
    """
    try:
        step_options.check_loss(name, settings)
    except UnsupportedError as error:
        raise typer.BadParameter(f"--loss {name}: {str(error).removeprefix('build_step: ')}") from error


def parse_numbers(option: str, text: str | None) -> tuple[float, ...] | None:
    """Numbers with commas between them; None without.

    Raises:
        typer.BadParameter: what is no number.
    """
    try:
        return None if text is None else tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: give numbers with commas between them, such as 1,0.5,2.") from error


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


def chosen_outputs(loss: str, texts: Sequence[str] | None, target: str | None) -> dict[str, float] | OwnLoss | None:
    """The values of --model-output and --model-target, for `load_model`.

    Raises:
        typer.BadParameter: as `parse_outputs`, or a target without --loss model.
    """
    outputs = parse_outputs(texts)
    if loss == MODEL_LOSS:
        return OwnLoss(outputs, target)
    if target is not None:
        raise typer.BadParameter(
            f"--model-target {target}: only a model that returns its loss takes its target, and "
            f"the loss is {loss}; add --loss {MODEL_LOSS}, or leave it out."
        )
    return outputs


def parse_directions(text: str, everything: Sequence[str]) -> list[str]:
    """The value of --direction: names of the catalogue for wgrad, dgrad and forward (or these names); `all` of them.

    Args:
        text: the names, with commas between them.
        everything: what "all" stands for.

    Raises:
        typer.BadParameter: an unknown name.
    """
    if text == "all":
        return list(everything)
    names = dict.fromkeys(text.split(","))
    known = {**{short: direction.name for short, direction in BY_SHORT.items()}, **{name: name for name in WORDS}}
    if not all(name in known for name in names):
        raise typer.BadParameter(f"--direction {text}: use {', '.join(WORDS.values())}, or all.")
    return list(dict.fromkeys(known[name] for name in names))


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
    try:
        return registry.parse_offload(text)
    except UnsupportedError as error:
        raise typer.BadParameter(str(error)) from error
