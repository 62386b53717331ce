# SPDX-License-Identifier: Apache-2.0
"""`convgrad explain`: lists the convolutions of a step: kernel, tiling, cost, and rejected alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_convgrad.commands import option_values, options
from tvm_convgrad.commands.compilation import CompileOptions, ModelOptions
from tvm_convgrad.commands.given import refuse_given

if TYPE_CHECKING:
    from tvm_convgrad.training.model.model import TensorSchema
    from tvm_convgrad.training.runtime.artifact import Artifact
    from tvm_convgrad.training.runtime.envelope import Manifest
    from tvm_convgrad.training.runtime.schema import TensorSpec


OF_MODELS = (
    "layout",
    "offload",
    "batch",
    "params",
    "model_output",
    "model_target",
    "loss",
    "dtype",
    "results",
    "tuned",
    "transforms",
    "store",
)
"""Options that a library was built with; --target names the GPU of --cudnn for it."""


def explain(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL|STEP.so", help="A model as `build` takes it, or a library that `build` wrote."),
    ],
    layout: options.Layout = "NCHW",
    target: options.Target = "native",
    offload: options.Offload = "auto",
    batch: options.Batch = None,
    params: options.Params = None,
    model_output: options.ModelOutputs = None,
    model_target: options.ModelTarget = None,
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
    refused: Annotated[
        bool, typer.Option("--refused", help="Also print each tiling, its costs, and what was not taken, and why.")
    ] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Also write the list as a page with charts: roofline, graph and memory of a library's step."),
    ] = None,
    json: options.Json = False,
) -> None:
    """List the convolutions of a training step: kernel, tiling, estimated cost, and rejected alternatives with reasons.

    Options about the model are for model files only; a library has those of its build.
    """
    if Path(model).suffix == ".so":
        refuse_given(context, OF_MODELS, "of the build, and this library is built: explain the model, or leave out")
        if not cudnn:
            refuse_given(
                context, ("target",), "of the build, and this library is built: explain the model, or leave out"
            )
    outputs = option_values.chosen_outputs(loss, model_output, model_target)
    source = ModelOptions(model, option_values.parse_batch(batch), params, outputs)
    backends = option_values.parse_offload(offload)
    from tvm_convgrad.report.gradients import (
        describe_convolutions,
        print_convolutions_json,
        show_convolutions,
    )
    from tvm_convgrad.report.tables import cores_in_words, print_pairs, short_target
    from tvm_convgrad.training.compile.artifact_writer import built_for_of
    from tvm_convgrad.training.runtime.artifact import inspect_artifact, require_versions

    compiled_for = option_values.parse_target(target, gpus=True)
    warnings: Sequence[str] = ()
    artifact: Artifact | None = None
    tensors: Sequence[TensorSpec | TensorSchema]
    if html is not None:
        from tvm_convgrad.core.files import check_destination
        from tvm_convgrad.report.html.page import check_packages

        check_destination(html)
        check_packages()

    if Path(model).suffix == ".so":
        artifact = inspect_artifact(Path(model))  # it may be for another machine
        require_versions(artifact)
        gradients, forward = artifact.gradients, artifact.forward
        tensors = artifact.inputs
        built_for = {name: artifact.manifest.get(name) for name in ("target", "cores")}
    else:
        from tvm_convgrad.training.compile.lower import plan_of
        from tvm_convgrad.training.step.build import build_step

        loaded = source.load()
        warnings = loaded.warnings
        results_type = option_values.results_for(results, compiled_for, dtype)
        step = build_step(loaded, loss=loss, dtype=dtype, results=results_type, layout=layout)
        with CompileOptions(compiled_for, backends, tuned, transforms, store).in_force():
            entries = describe_convolutions(plan_of(step, compiled_for, backends))
        tensors = step.inputs
        built_for = built_for_of(compiled_for)
        gradients = [entry for entry in entries if "backward" in entry["op"]]
        forward = [entry for entry in entries if "backward" not in entry["op"]]
    if html is not None:
        _write_page(html, model, gradients, forward, built_for, warnings, artifact)
    engines = None
    if cudnn:
        from tvm_convgrad.report.engines import describe_engines

        engines = describe_engines([*gradients, *forward], compiled_for)
    if json:
        ranges = {each.name: each.range.to_json() for each in tensors if each.range is not None}
        print_convolutions_json(model, gradients, forward, built_for, ranges, engines, warnings)
        return
    show_convolutions(model, gradients, forward, refused)
    ranged = [(each.name, str(each.range)) for each in tensors if each.range is not None]
    if ranged:
        print_pairs("inputs that are indices", ranged)
    print_pairs(
        "built for", [("target", short_target(str(built_for["target"]))), ("cores", cores_in_words(built_for["cores"]))]
    )
    if engines is not None:
        from tvm_convgrad.report.engines import show_engines

        show_engines(engines)


def _write_page(
    path: Path,
    source: str,
    gradients: Sequence[Manifest],
    forward: Sequence[Manifest],
    built_for: Manifest,
    warnings: Sequence[str],
    artifact: Artifact | None,
) -> None:
    """Write the report of --html; the memory of a step is that of a library, as a model is not compiled."""
    from tvm_convgrad.core.errors import ArtifactError, SetupError, UnsupportedError
    from tvm_convgrad.core.files import write_atomic
    from tvm_convgrad.report.html.page import Content, page_of
    from tvm_convgrad.report.step_graph import StepGraph, graph_of
    from tvm_convgrad.training.runtime.artifact import require_machine
    from tvm_convgrad.training.runtime.dataflow import dataflow_of
    from tvm_convgrad.training.runtime.memory import StepMemory, memory_of

    built = "until it is built; explain the library that `build` writes."
    memory: StepMemory | str = f"A model has no plan of memory {built}"
    graph: StepGraph | str = f"A model has no list of kernel calls {built}"
    if artifact is not None:  # the rest of the page does not depend on these two
        try:
            require_machine(artifact)
            memory = memory_of(artifact)
        except (ArtifactError, SetupError, UnsupportedError) as error:
            memory = str(error)
        try:
            require_machine(artifact)
            graph = graph_of(dataflow_of(artifact), [*gradients, *forward])
        except (ArtifactError, SetupError, UnsupportedError) as error:
            graph = str(error)
    page = Content(source, str(built_for["target"]), built_for["cores"], gradients, forward, memory, warnings, graph)
    write_atomic(path, page_of(page).encode())
