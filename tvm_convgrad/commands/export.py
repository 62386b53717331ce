# SPDX-License-Identifier: Apache-2.0
"""`convgrad export`: gives the trained model back, as an ONNX file, a state_dict or an inference library."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tvm_convgrad.commands import option_values, options
from tvm_convgrad.commands.compilation import CompileOptions, ModelOptions
from tvm_convgrad.commands.stages import print_warnings, stages
from tvm_convgrad.core.errors import ArtifactError, ModelError, SetupError, UnsupportedError
from tvm_convgrad.core.files import check_destination, require_absent, write_atomic
from tvm_convgrad.training.model.own_loss import OwnLoss

if TYPE_CHECKING:
    from tvm_convgrad.training.runtime.artifact import Artifact
    from tvm_convgrad.training.runtime.checkpoint import Checkpoint

KINDS = (".onnx", ".safetensors", ".so")


@dataclass(frozen=True)
class _Exported:
    """What was written: tensors by the names that they have in the file, and sentences about it."""

    tensors: list[str]
    notes: list[str]


def export(
    step: Annotated[Path, typer.Argument(help="The library that `convgrad build` wrote.")],
    checkpoint: Annotated[
        Path, typer.Option(help="A checkpoint of `run` with that library, or the folder of them, for its newest one.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file to write: {' or '.join(KINDS)}.")],
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL",
            help="The file that the library was built of. A .safetensors does without; it adds what a step omits.",
        ),
    ] = None,
    inference: Annotated[
        bool, typer.Option("--inference", help="Write a library with `predict` alone, weights inside: a .so.")
    ] = False,
    averages: Annotated[
        bool, typer.Option("--averages", help="Write the moving averages of the parameters (build --ema).")
    ] = False,
    batch: options.Batch = None,
    target: Annotated[
        str | None,
        typer.Option(help="What to compile an inference library for, as `build` takes it. Default: as STEP."),
    ] = None,
    linker: options.Linker = None,
    params: options.Params = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file, if there is one.")] = False,
    json: options.Json = False,
) -> None:
    """Write the trained model: into the ONNX file that it came from, as PyTorch's state_dict, or for inference."""
    from tvm_convgrad.report.tables import byte_count, print_json, print_pairs
    from tvm_convgrad.training.runtime.artifact import inspect_artifact

    if inference != (output.suffix == ".so"):
        raise typer.BadParameter(f"--output {output}: the suffix is .so with --inference, and only then.")
    if not inference and (batch, target, linker, params) != (None,) * 4:
        raise typer.BadParameter("--batch, --target, --cc and --params are for --inference.")
    _check_output(output, force)
    artifact = inspect_artifact(step)
    artifact.require_training()
    found = _checkpoint_of(artifact, checkpoint)
    if averages:
        names = artifact.averages
        found = replace(found, state=found.state | {name: found.state[place] for name, place in names.items()})
    _check_model(artifact, model, output)
    if inference:
        assert model is not None  # refused by _check_model
        source = ModelOptions(model, option_values.parse_batch(batch), params)
        done = _write_predictor(artifact, found, source, (target, linker), output)
    elif output.suffix == ".onnx":
        done = _write_onnx(artifact, found, model, output, force)
    else:
        done = _write_state_dict(artifact, found, model, output)
    print_warnings(done.notes)
    size, steps = output.stat().st_size, len(found.progress.losses)
    report = {"output": str(output), "bytes": size, "steps": steps, "tensors": done.tensors, "notes": done.notes}
    if json:
        print_json(report | {"artifact": artifact.id, "checkpoint": str(found.path)})
        return
    rows = [
        ("file", f"{output} ({byte_count(size)})"),
        ("checkpoint", f"{found.path}, after {steps} steps"),
        ("tensors", len(done.tensors)),
    ]
    print_pairs(f"trained model of {step}", rows)


def _check_output(output: Path, force: bool) -> None:
    """Refuse a path that nothing should be written to, before any work."""
    if output.suffix not in KINDS:
        raise UnsupportedError(
            f"{output}: the suffix {output.suffix!r} is not one of {', '.join(KINDS)}; use one of them."
        )
    check_destination(output)
    if not force:
        require_absent(output)


def _checkpoint_of(artifact: Artifact, path: Path) -> Checkpoint:
    """The checkpoint at a path, or the newest one of a folder that is whole.

    Raises:
        ArtifactError: there is none, or it is of another artifact.
    """
    from tvm_convgrad.training.runtime.checkpoint import load, load_latest

    if path.is_dir():
        newest, complaints = load_latest(path)
        print_warnings(complaints)
        if newest is None:
            raise ArtifactError(f"{path}: there is no checkpoint; make one with `convgrad run --checkpoint-dir`.")
        found = newest
    else:
        found = load(path)
    if not found.progress.is_of(artifact.id, artifact.step):
        raise ArtifactError(
            f"{found.path}: a checkpoint of another artifact ({found.progress.artifact[:12]}…) than {artifact.path} "
            f"({artifact.id[:12]}…); give the library that made it."
        )
    for spec in artifact.state:
        value = found.state.get(spec.name)
        if value is None or (value.shape, str(value.dtype)) != (spec.shape, spec.dtype):
            raise ArtifactError(f"{found.path}: has no {spec} for {spec.name!r} of {artifact.path}; write it again.")
    return found


def _check_model(artifact: Artifact, model: str | None, output: Path) -> None:
    """Refuse a model that is not the one of the build, or a form that it cannot have."""
    origin = artifact.origin
    if output.suffix == ".onnx":
        if origin is not None and origin.suffix != ".onnx":
            raise ModelError(
                f"{output}: {artifact.path} was built from {origin.files[0][0]}, not from an ONNX file; export to "
                ".safetensors, load that into the PyTorch model, and use torch.onnx.export."
            )
        if model is None:
            raise ModelError(
                f"{output}: the trained values are written into a copy of the model file; give it by --model."
            )
    if model is None:
        if output.suffix != ".safetensors":
            raise ModelError(f"{output}: the export needs the model file of the build; give it by --model.")
        return
    if origin is None:
        raise ArtifactError(
            f"{artifact.path}: does not record the model file that it was built from, like all libraries of earlier "
            "versions; build the step again, and train with it."
        )
    _require("onnx" if origin.suffix == ".onnx" else "torch", model, origin.suffix in (".onnx", ".pt2"))
    origin.check(model, artifact.path)


def _require(package: str, path: str | Path, needed: bool = True) -> None:
    if needed and importlib.util.find_spec(package) is None:
        raise SetupError(
            f"{path}: needs the package {package}, which is not installed; pip install 'tvm-convgrad[{package}]'."
        )


def _write_onnx(artifact: Artifact, checkpoint: Checkpoint, model: str | None, output: Path, force: bool) -> _Exported:
    from tvm_convgrad.training.export.onnx_file import export_onnx  # it loads TVM
    from tvm_convgrad.training.export.state_dict import trained_values

    origin = artifact.origin
    assert model is not None  # both are refused before
    assert origin is not None
    written = export_onnx(Path(model), origin, trained_values(artifact, checkpoint), output, replace=force)
    return _Exported([*written.changed, *written.added], written.notes)


def _write_state_dict(artifact: Artifact, checkpoint: Checkpoint, model: str | None, output: Path) -> _Exported:
    from tvm_convgrad.training.export.state_dict import safetensors_bytes, state_dict

    _require("safetensors", output)
    found = state_dict(artifact, checkpoint, None if model is None else Path(model))
    write_atomic(output, safetensors_bytes(found.tensors))
    return _Exported(list(found.tensors), found.notes)


def _write_predictor(
    artifact: Artifact,
    checkpoint: Checkpoint,
    source: ModelOptions,
    built_for: tuple[str | None, str | None],
    output: Path,
) -> _Exported:
    from tvm_convgrad.core.kept_objects import KeptObjects
    from tvm_convgrad.offload.registry import AUTO
    from tvm_convgrad.report.gradients import describe_convolutions
    from tvm_convgrad.training.compile.artifact_writer import make_inference_manifest, save_artifact
    from tvm_convgrad.training.compile.linking import linker_for
    from tvm_convgrad.training.compile.lower import compile_predictor
    from tvm_convgrad.training.compile.separate import KernelBuilds, compile_apart
    from tvm_convgrad.training.export.state_dict import trained_values
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.step.options import StepOptions
    from tvm_convgrad.training.step.predictor import build_predictor

    target, linker = built_for
    taken = artifact.options
    compilation = CompileOptions(option_values.parse_target(target or artifact.manifest["target"], gpus=True), (AUTO,))
    links = linker_for(compilation.target, linker)
    values = trained_values(artifact, checkpoint)
    with stages(f"reading {source.source}") as enter, compilation.in_force():
        loaded = replace(source, **_defaults(artifact, source)).load()
        if not isinstance(loaded, Model):
            raise ModelError(
                f"{source.source} computes its own gradients, so that its predictions cannot be separated from them."
            )
        mean, std = (tuple(taken[name]) if name in taken else None for name in ("mean", "std"))
        settings = StepOptions(
            dtype=taken["dtype"], results=taken["results"], layout=taken["layout"], mean=mean, std=std
        )
        predictor = build_predictor(loaded, values, settings)
        enter("compiling")
        with compile_apart(KernelBuilds(KeptObjects(), progress=enter)):
            executable, plan = compile_predictor(predictor, compilation.target, compilation.backends)
        described = describe_convolutions(plan)
        manifest = make_inference_manifest(predictor, compilation.target, described, artifact.origin)
        enter(f"writing {output}")
        save_artifact(executable, manifest, output, links)
    return _Exported(list(values), [])


def _defaults(artifact: Artifact, source: ModelOptions) -> dict[str, Any]:
    """What is not given, as the step was built: the outputs, and the batch of one of its micro-batches."""
    taken = artifact.options
    names = list(taken.get("outputs", {}))
    outputs: dict[str, Any] = {}
    if "model_target" in taken:
        chosen = [*names[:1], *filter(None, [taken["predicted"]])]
        outputs = {"outputs": OwnLoss(dict.fromkeys(chosen, 1.0), taken["model_target"])}
    elif len(names) > 1 and "predicted" not in taken:
        raise ArtifactError(
            f"{artifact.path} was built by a version that did not record which of its outputs {', '.join(names)} is "
            "the prediction; build it again."
        )
    elif names:
        outputs = {"outputs": {taken.get("predicted", names[0]): 1.0}}
    batch = artifact.inputs[0].shape[0]
    if source.batch is not None:
        return outputs
    return outputs | {"batch": batch // int(taken["accumulate"]) if isinstance(batch, int) else "dynamic"}
