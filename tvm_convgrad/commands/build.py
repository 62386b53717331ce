# SPDX-License-Identifier: Apache-2.0
"""`convgrad build`: a model becomes one shared library with its training step."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.commands.stages import print_warnings, stages


def build(
    model: Annotated[
        str, typer.Argument(help="Model: .onnx, .pt2, file.py:function, .json of a Relax module, or a Relay program.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The shared library to write.")],
    target: options.Target = "llvm",
    layout: options.Layout = "NCHW",
    offload: options.Offload = "auto",
    batch: options.Batch = None,
    params: options.Params = None,
    model_output: options.ModelOutputs = None,
    optimizer: options.Optimizer = "sgd",
    lr: options.Rate = None,
    momentum: options.Momentum = None,
    nesterov: options.Nesterov = None,
    betas: options.Betas = None,
    weight_decay: options.WeightDecay = None,
    loss: options.Loss = "cross_entropy",
    dtype: options.DType = "float32",
    results: options.Results = None,
    loss_scale: options.LossScale = None,
    bn: options.BatchNorm = "train",
    dropout: options.Dropout = "train",
    accumulate: options.Accumulate = 1,
    seed: options.Seed = 0,
    tuned: options.Tuned = True,
    transforms: options.Transforms = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """Compile the training step of MODEL into one shared library that Python and C++ load."""
    size, backends = options.parse_batch(batch), options.parse_offload(offload)
    outputs = options.parse_outputs(model_output)
    start = time.perf_counter()

    from tvm_convgrad.kernels.target import cores_of
    from tvm_convgrad.kernels.transforms import allow_transforms
    from tvm_convgrad.kernels.tuned import TUNED, use_winners
    from tvm_convgrad.offload.cudnn.store import use_engines
    from tvm_convgrad.report.gradients import describe_convolutions
    from tvm_convgrad.report.tables import byte_count, print_json, print_pairs
    from tvm_convgrad.training.artifact import make_manifest, save_artifact
    from tvm_convgrad.training.envelope import check_destination
    from tvm_convgrad.training.frontends import load_model
    from tvm_convgrad.training.lower import compile_with_plan
    from tvm_convgrad.training.step import build_step
    from tvm_convgrad.tuning.store import Store, default_path

    compiled_for = options.parse_target(target, gpus=True)
    settings = {"lr": lr, "momentum": momentum, "nesterov": nesterov, "betas": betas, "weight_decay": weight_decay}
    options.check_optimizer(optimizer, settings)
    check_destination(output)
    winners = Store(store or default_path(), cores_of(compiled_for)) if tuned else None
    with stages(f"reading {model}") as enter:
        loaded = load_model(model, batch=size, params=params, outputs=outputs)
        print_warnings(loaded.warnings)
        enter("differentiating")
        step = build_step(
            loaded,
            loss=loss,
            optimizer=optimizer,
            lr=lr,
            momentum=momentum,
            nesterov=nesterov,
            betas=betas,
            weight_decay=weight_decay,
            dtype=dtype,
            results=options.results_for(results, compiled_for),
            loss_scale=loss_scale,
            bn=bn,
            dropout_mode=dropout,
            layout=layout,
            accumulate=accumulate,
            seed=seed,
        )
        enter("compiling")
        engines = options.engine_store(tuned, store, compiled_for)
        with use_winners(winners), allow_transforms(transforms), use_engines(engines):
            executable, plan = compile_with_plan(step, compiled_for, backends)
        described = describe_convolutions(plan)
        manifest = make_manifest(step, compiled_for, described)
        enter(f"writing {output}")
        artifact = save_artifact(executable, manifest, output)
    size_bytes = output.stat().st_size
    seconds = time.perf_counter() - start
    cuts = len(winners.used) if winners is not None else 0
    cuts += sum(entry["plan"].startswith(TUNED) for entry in described)  # engines of a library
    if json:
        report: dict[str, Any] = {
            "output": str(output),
            "id": artifact.id,
            "bytes": size_bytes,
            "seconds": seconds,
            "tuned": cuts,
            "warnings": list(loaded.warnings),
        }
        print_json(report | manifest)
        return
    print_pairs(
        f"training step of {model}",
        [*_summary(artifact, seconds, byte_count(size_bytes)), ("tuned kernels and engines", cuts)],
    )


def _summary(artifact: Any, seconds: float, size: str) -> list[tuple[str, Any]]:
    from tvm_convgrad.report.gradients import cores_in_words

    state = artifact.state
    weights = sum(_count(spec.shape) for spec in state if spec.role == "parameter")
    settings = ("loss", "optimizer", "lr", "dtype", "layout")
    outputs = artifact.options.get("outputs", {})
    return [
        ("library", f"{artifact.path} ({size}, {seconds:.1f} s)"),
        ("sha256", artifact.id),
        ("target", artifact.manifest["target"]),
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
        ("libraries called", ", ".join(artifact.manifest["runtimes"]) or "none"),
    ]


def _count(shape: tuple[int | str, ...]) -> int:
    product = 1
    for extent in shape:
        product *= int(extent)
    return product
