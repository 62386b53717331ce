# SPDX-License-Identifier: Apache-2.0
"""`convgrad explain`: the convolutions of a step, what computes each, how, and why nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.commands.stages import print_warnings


def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL|STEP.so", help="A model, or a library that build wrote.")],
    layout: options.Layout = "NCHW",
    target: options.Target = "llvm",
    offload: options.Offload = "auto",
    batch: options.Batch = None,
    params: options.Params = None,
    model_output: options.ModelOutputs = None,
    loss: options.Loss = "cross_entropy",
    dtype: options.DType = "float32",
    results: options.Results = None,
    cudnn: Annotated[
        bool,
        typer.Option("--cudnn", help="Also ask cuDNN for its engines on the GPU of --target; none is needed here."),
    ] = False,
    tuned: options.Tuned = True,
    transforms: options.Transforms = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """List the convolutions: problem, kernel and its plan, what was not taken, work, estimate. Options need a model."""
    size, backends = options.parse_batch(batch), options.parse_offload(offload)
    outputs = options.parse_outputs(model_output)
    from tvm_convgrad.report.gradients import (
        cores_in_words,
        describe_convolutions,
        print_convolutions_json,
        show_convolutions,
    )
    from tvm_convgrad.report.tables import print_pairs
    from tvm_convgrad.training.artifact import built_for_of, read_artifact

    compiled_for = options.parse_target(target, gpus=True)
    warnings: Sequence[str] = ()

    if Path(model).suffix == ".so":
        artifact = read_artifact(Path(model))
        gradients, forward = artifact.gradients, artifact.forward
        built_for = {name: artifact.manifest.get(name) for name in ("target", "cores")}
    else:
        from tvm_convgrad.kernels.target import cores_of
        from tvm_convgrad.kernels.transforms import allow_transforms
        from tvm_convgrad.kernels.tuned import use_winners
        from tvm_convgrad.offload.cudnn.store import use_engines
        from tvm_convgrad.training.frontends import load_model
        from tvm_convgrad.training.lower import plan_of
        from tvm_convgrad.training.step import build_step
        from tvm_convgrad.tuning.store import Store, default_path

        loaded = load_model(model, batch=size, params=params, outputs=outputs)
        warnings = loaded.warnings
        print_warnings(warnings)
        step = build_step(
            loaded,
            loss=loss,
            dtype=dtype,
            results=options.results_for(results, compiled_for),
            layout=layout,
        )
        winners = Store(store or default_path(), cores_of(compiled_for)) if tuned else None
        engines = options.engine_store(tuned, store, compiled_for)
        with use_winners(winners), allow_transforms(transforms), use_engines(engines):
            entries = describe_convolutions(plan_of(step, compiled_for, backends))
        built_for = built_for_of(compiled_for)
        gradients = [entry for entry in entries if "backward" in entry["op"]]
        forward = [entry for entry in entries if "backward" not in entry["op"]]
    engines = None
    if cudnn:
        from tvm_convgrad.report.engines import describe_engines

        engines = describe_engines([*gradients, *forward], compiled_for)
    if json:
        print_convolutions_json(model, gradients, forward, built_for, engines, warnings)
        return
    show_convolutions(model, gradients, forward)
    print_pairs("built for", [("target", built_for["target"]), ("cores", cores_in_words(built_for["cores"]))])
    if engines is not None:
        from tvm_convgrad.report.engines import show_engines

        show_engines(engines)
