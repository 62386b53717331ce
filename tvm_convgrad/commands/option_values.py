# SPDX-License-Identifier: Apache-2.0
"""What the values of options may be: callbacks that refuse them before anything is read, and their parsing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import typer

from tvm_convgrad.core.catalogue import BY_SHORT, WORDS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.extent_limits import MOST_EXTENT
from tvm_convgrad.offload import registry
from tvm_convgrad.training.model.own_loss import MODEL_LOSS, OwnLoss
from tvm_convgrad.training.step import options as step_options
from tvm_convgrad.training.step.names import DYNAMIC, usual_results
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


def results_for(results: str | None, target: TvmTarget, dtype: str) -> str:
    """The value of --results, or what is usual without it."""
    return results or usual_results(dtype, on_gpu=target.kind.name == "cuda")


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
        raise typer.BadParameter(f"--no-tuned: {VARIABLE}=cached uses tuned engines only; leave out one of the two.")
    return None


def parse_target(text: str, gpus: bool = False) -> TvmTarget:
    """The value of --target, a TVM target; arguments as `training.compile.targets.parse_target`.

    Raises:
        typer.BadParameter: no such target, or not one that may be.
        SetupError: "cuda" on a machine without a GPU.
    """
    from tvm_convgrad.training.compile.start_tvm import import_tvm_for_cpus

    if "cuda" not in text:
        import_tvm_for_cpus()

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
    """Refuse bounds of gradients that are not positive numbers, before a model is read.

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
        typer.BadParameter: what is not a number.
    """
    try:
        return None if text is None else tuple(float(number) for number in text.split(","))
    except ValueError as error:
        raise typer.BadParameter(f"{option} {text}: give numbers with commas between them, such as 1,0.5,2.") from error


def parse_outputs(texts: Sequence[str] | None) -> dict[str, float] | None:
    """The values of --model-output: names of outputs with the weights of their losses, 1 by default; None without.

    Raises:
        typer.BadParameter: a weight that is not a positive number, or a name that is given twice.
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
            f"--model-target {target}: only a model that returns its loss has the target as an input, "
            f"but the loss is {loss}; add --loss {MODEL_LOSS}, or leave out --model-target."
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
    if not text.isdecimal() or not 0 < int(text) < MOST_EXTENT:
        raise typer.BadParameter(f"--batch {text}: give a positive number below {MOST_EXTENT}, or dynamic.")
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
