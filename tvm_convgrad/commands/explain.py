# SPDX-License-Identifier: Apache-2.0
"""`convgrad explain`: lists the convolutions of a step, what computes each, how, and why nothing else does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options
from tvm_convgrad.commands.compilation import CompileOptions, ModelOptions


def explain(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|STEP.so", help="A model as `build` takes it, or a library that `build` wrote."),
    ],
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
        typer.Option(
            "--cudnn",
            help="Also list the engines that cuDNN has for each convolution on the GPU of --target; this machine "
            "needs none.",
        ),
    ] = False,
    tuned: options.Tuned = True,
    transforms: options.Transforms = False,
    store: options.Store = None,
    json: options.Json = False,
) -> None:
    """List the convolutions of a training step: what computes each, how, why nothing else does, and what it costs.

    Of a library that `build` wrote the options are those of the build; those here are for a model.
    """
    source = ModelOptions(model, options.parse_batch(batch), params, options.parse_outputs(model_output))
    backends = options.parse_offload(offload)
    from tvm_convgrad.report.gradients import (
        describe_convolutions,
        print_convolutions_json,
        show_convolutions,
    )
    from tvm_convgrad.report.tables import cores_in_words, print_pairs
    from tvm_convgrad.training.compile.artifact_writer import built_for_of
    from tvm_convgrad.training.runtime.artifact import inspect_artifact, require_versions

    compiled_for = options.parse_target(target, gpus=True)
    warnings: Sequence[str] = ()

    if Path(model).suffix == ".so":
        artifact = inspect_artifact(Path(model))  # it may be for another machine
        require_versions(artifact)
        gradients, forward = artifact.gradients, artifact.forward
        built_for = {name: artifact.manifest.get(name) for name in ("target", "cores")}
    else:
        from tvm_convgrad.training.compile.lower import plan_of
        from tvm_convgrad.training.step.build import build_step

        loaded = source.load()
        warnings = loaded.warnings
        results_type = options.results_for(results, compiled_for)
        step = build_step(loaded, loss=loss, dtype=dtype, results=results_type, layout=layout)
        with CompileOptions(compiled_for, backends, tuned, transforms, store).in_force():
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
