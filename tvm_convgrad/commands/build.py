# SPDX-License-Identifier: Apache-2.0
"""`convgrad build`: compiles the training step of a model into one shared library."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_convgrad.commands import image_options, option_values, options
from tvm_convgrad.commands.compilation import CompileOptions, ModelOptions
from tvm_convgrad.commands.memory_limit import fit, parse_size
from tvm_convgrad.commands.stages import print_warnings, stages
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends import shown_formats
from tvm_convgrad.training.step.options import LossSettings

if TYPE_CHECKING:
    from tvm_convgrad.commands.kept_builds import Built
    from tvm_convgrad.core.kept_objects import KeptObjects
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.program import TrainingProgram
    from tvm_convgrad.training.runtime.artifact import Artifact
    from tvm_convgrad.training.step.module import StepModule


def build(
    model: Annotated[
        str,
        typer.Argument(help=f"The model: {shown_formats()}."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The shared library to write.")],
    target: options.Target = "native",
    linker: options.Linker = None,
    layout: options.Layout = "NCHW",
    offload: options.Offload = "auto",
    batch: options.Batch = None,
    params: options.Params = None,
    model_output: options.ModelOutputs = None,
    model_target: options.ModelTarget = None,
    train: options.Train = None,
    optimizer: options.Optimizer = "sgd",
    lr: options.Rate = None,
    momentum: options.Momentum = None,
    nesterov: options.Nesterov = None,
    betas: options.Betas = None,
    weight_decay: options.WeightDecay = None,
    decayed: options.Decayed = "all",
    clip_norm: options.ClipNorm = None,
    clip_value: options.ClipValue = None,
    ema: options.Ema = None,
    loss: options.Loss = "cross_entropy",
    label_smoothing: options.LabelSmoothing = None,
    class_weights: options.ClassWeights = None,
    ignore_index: options.IgnoreIndex = None,
    positive_weight: options.PositiveWeight = None,
    delta: options.Delta = None,
    dtype: options.DType = "float32",
    results: options.Results = None,
    loss_scale: options.LossScale = None,
    bn: options.BatchNorm = "train",
    dropout: options.Dropout = "train",
    accumulate: options.Accumulate = 1,
    memory: options.Memory = None,
    recompute: options.Recompute = "auto",
    split: options.Split = False,
    mean: image_options.Mean = None,
    std: image_options.Std = None,
    seed: options.Seed = 0,
    tuned: options.Tuned = True,
    transforms: options.Transforms = False,
    store: options.Store = None,
    cache: options.Cache = True,
    json: options.Json = False,
) -> None:
    """Compile the training step of MODEL into one shared library, which Python and C++ load.

    The step is the forward pass, the loss, all gradients and the optimizer's update.
    """
    trained = tuple(filter(None, (train or "").split(",")))
    if train is not None and not trained:
        raise typer.BadParameter("--train names no parameter: give names, such as 'layer4.*,fc', or leave it out.")
    outputs = option_values.chosen_outputs(loss, model_output, model_target)
    source = ModelOptions(model, option_values.parse_batch(batch), params, outputs, trained)
    backends, limit = option_values.parse_offload(offload), parse_size(memory)
    start = time.perf_counter()

    from tvm_convgrad.commands.kept_builds import KeptBuilds
    from tvm_convgrad.core.files import check_destination
    from tvm_convgrad.core.kept_objects import KeptObjects
    from tvm_convgrad.report.tables import byte_count, print_json, print_pairs

    settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "betas": betas, "weight_decay": weight_decay}
    loss_settings = LossSettings(
        label_smoothing,
        option_values.parse_numbers("--class-weights", class_weights),
        ignore_index,
        option_values.parse_numbers("--positive-weight", positive_weight),
        delta,
    )
    step: dict[str, Any] = {
        **settings,
        **asdict(loss_settings),
        "loss": loss,
        "optimizer": optimizer,
        "decayed": decayed,
        "clip_norm": clip_norm,
        "clip_value": clip_value,
        "ema": ema,
        "dtype": dtype,
        "results": results,
        "loss_scale": option_values.parse_loss_scale(loss_scale),
        "bn": bn,
        "dropout_mode": dropout,
        "layout": layout,
        "accumulate": accumulate,
        "seed": seed,
        "split": split,
        "recompute": recompute,
        "mean": option_values.parse_numbers("--mean", mean),
        "std": option_values.parse_numbers("--std", std),
    }
    chosen: dict[str, object] = {"target": target, "linker": linker, "offload": backends, "memory": limit}
    chosen |= {"tuned": tuned, "transforms": transforms}
    check_destination(output)
    if output.suffix != ".so":
        raise typer.BadParameter(f"--output {output}: give a name that ends with .so, by which TVM knows a library.")
    kept = KeptObjects() if cache else None
    with stages(f"reading {model}") as enter:
        earlier = KeptBuilds(kept, source, step | chosen, store) if kept is not None else None
        built = earlier.take(output) if earlier is not None else None
        if built is None:
            compilation = CompileOptions(
                option_values.parse_target(target, gpus=True), backends, tuned, transforms, store
            )
            option_values.check_optimizer(optimizer, settings)
            option_values.check_loss(loss, loss_settings)
            option_values.check_clipping(clip_norm, clip_value)
            image_options.check_normalisation(step["mean"], step["std"])
            built = _build(source, step, compilation, linker, limit, recompute, kept, output, enter)
            if earlier is not None and compilation.target.kind.name == "llvm":
                earlier.keep(built)
        else:
            print_warnings(built.warnings)
    if kept is not None and kept.problem:
        print_warnings([kept.problem])
    artifact, taken = built.artifact, built.tuned
    size_bytes = output.stat().st_size
    seconds = time.perf_counter() - start
    if json:
        report = {
            "output": str(output),
            "id": artifact.id,
            "bytes": size_bytes,
            "seconds": seconds,
            "tuned": taken,
            "warnings": list(built.warnings),
        }
        print_json(report | artifact.manifest)
        return
    print_pairs(
        f"training step of {model}",
        [*_summary(artifact, seconds, byte_count(size_bytes)), ("tuned kernels and engines", taken)],
    )


def _check_channels(inputs: Sequence[Any], normalisation: dict[str, Any], source: str) -> None:
    """Refuse means and deviations of which there is neither one nor one for each channel of an input of images."""
    for name, numbers in normalisation.items():
        channels = [schema.shape[axis] for schema in inputs if len(schema.shape) == 4 for axis in (1, 3)]
        if numbers is not None and len(numbers) != 1 and len(numbers) not in channels:
            listed, count = ", ".join(schema.describe() for schema in inputs), len(numbers)
            raise UnsupportedError(
                f"--{name} has {count} numbers, but no input of {source} has {count} channels ({listed}); give one for "
                "each channel, or one for all."
            )


def _build(
    source: ModelOptions,
    step_options: dict[str, Any],
    compilation: CompileOptions,
    linker: str | None,
    limit: int | None,
    recompute: str,
    kept: KeptObjects | None,
    output: Path,
    enter: Callable[[str], None],
) -> Built:
    """Compile the step of a model and write its library to `output`; `kept` has compiled kernels."""
    from tvm_convgrad.commands.kept_builds import Built
    from tvm_convgrad.kernels.tuned import TUNED
    from tvm_convgrad.report.gradients import describe_convolutions
    from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
    from tvm_convgrad.training.compile.linking import linker_for
    from tvm_convgrad.training.compile.lower import compile_to_link
    from tvm_convgrad.training.compile.separate import KernelBuilds, compile_apart
    from tvm_convgrad.training.ir.recomputation import ALL, AUTO
    from tvm_convgrad.training.passes.in_place import STEP
    from tvm_convgrad.training.passes.rematerialise import recorded_repetitions
    from tvm_convgrad.training.runtime.origin import Origin
    from tvm_convgrad.training.step.build import build_step

    target, values = compilation.target, ALL if recompute == AUTO else recompute
    links = linker_for(target, linker)  # a missing one is said before the work
    results = {"results": option_values.results_for(step_options["results"], target, step_options["dtype"])}
    warnings: list[str] = []

    def make(model: ModelOptions, accumulate: int) -> tuple[StepModule, Model | TrainingProgram]:
        loaded = model.load()
        _check_channels(loaded.inputs, {name: step_options[name] for name in ("mean", "std")}, model.source)
        warnings[:] = loaded.warnings
        enter("differentiating")
        chosen = {"accumulate": accumulate} | ({} if limit is None else {"recompute": "none"})
        return build_step(loaded, **step_options | results | chosen), loaded

    builds = KernelBuilds(kept, progress=enter)
    with compile_apart(builds), compilation.in_force() as winners:
        if target.kind.name == "llvm":
            builds.start()  # while the model is read
        fitted = None
        if limit is None:
            step, _ = make(source, step_options["accumulate"])
        else:
            fitted = fit(source, step_options["accumulate"], limit, make, target, compilation.backends, values)
            step = fitted.step
        origin = Origin.of(source.source)
        enter("compiling")
        with recorded_repetitions() as repeated:
            executable, plan, initial = compile_to_link(step, target, compilation.backends)
        described = describe_convolutions(plan)
        manifest = make_manifest(step, target, described, origin)
        if STEP in repeated and repeated[STEP].calls:
            manifest["recompute"] = repeated[STEP].to_json()
        if fitted is not None and limit is not None:
            manifest["memory"] = {"limit": limit, **fitted.memory.to_json(), "choice": fitted.in_words(limit)}
        enter(f"writing {output}")
        artifact = save_artifact(executable, manifest, output, links, initial)
    taken = len(winners.used) if winners is not None else 0
    taken += sum(entry["plan"].startswith(TUNED) for entry in described)  # engines of a library
    return Built(artifact, taken, tuple(warnings))


def _summary(artifact: Artifact, seconds: float, size: str) -> list[tuple[str, object]]:
    """The rows of the table: names and values."""
    from tvm_convgrad.report.tables import cores_in_words, short_target

    state = artifact.state
    weights = sum(math.prod(map(int, spec.shape)) for spec in state if spec.role == "parameter")
    settings = ("loss", "optimizer", "lr", "dtype", "layout")
    outputs = artifact.options.get("outputs", {})
    return [
        ("library", f"{artifact.path} ({size}, {seconds:.1f} s)"),
        ("sha256", artifact.id),
        ("target", short_target(artifact.manifest["target"])),
        ("cores", cores_in_words(artifact.manifest.get("cores"))),
        ("input", ", ".join(f"{spec.name}: {spec}" for spec in artifact.inputs)),
        ("prediction", artifact.prediction),
        *(
            [("outputs", ", ".join(f"{name}={weight:g}" for name, weight in outputs.items()))]
            if len(outputs) > 1
            else []
        ),
        ("options", ", ".join(f"{name}={artifact.options[name]}" for name in settings)),
        ("parameters", f"{weights:,} in {sum(spec.role == 'parameter' for spec in state)} tensors"),
        ("gradient operators", len(artifact.gradients)),
        *_memory(artifact.manifest),
        ("libraries called", ", ".join(artifact.manifest["runtimes"]) or "none"),
    ]


def _memory(manifest: dict[str, Any]) -> list[tuple[str, object]]:
    """What --memory has chosen, or what --recompute costs."""
    from tvm_convgrad.report.tables import byte_count

    if "memory" in manifest:
        return [("planned memory", manifest["memory"]["choice"])]
    if "recompute" not in manifest:
        return []
    entry = manifest["recompute"]
    cost = f"a step takes {1 + entry['share']:.2f} times as long (estimated)"
    return [("computed again", f"{entry['calls']} values ({byte_count(entry['bytes'])}); {cost}")]
