# SPDX-License-Identifier: Apache-2.0
"""`convgrad profile`: where the time of a compiled step goes, operator by operator."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tvm_convgrad.commands import image_options, options

if TYPE_CHECKING:  # these load numpy
    from tvm_convgrad.report.html.measured import Measured as Profiled
    from tvm_convgrad.report.html.page import Content
    from tvm_convgrad.training.runtime.artifact import Artifact
    from tvm_convgrad.training.runtime.data import Samples
    from tvm_convgrad.training.runtime.images.source import ImageSource


def profile(
    step: Annotated[Path, typer.Argument(help="The library that `convgrad build` wrote.")],
    data: Annotated[
        Path | None, typer.Option(help="Data as `run` takes them, for the batch. Default: random numbers.")
    ] = None,
    mean: image_options.Mean = None,
    std: image_options.Std = None,
    fit: image_options.Fit = "crop",
    convert_channels: image_options.ConvertChannels = False,
    augment: image_options.Augment = None,
    batch_size: Annotated[
        int | None, typer.Option(min=1, help="Samples in a batch, for a step with a dynamic batch. Default: 32.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps to measure.")] = 10,
    rows: Annotated[int, typer.Option(min=1, help="Operators to show, the longest first.")] = 25,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads. Default: TVM_NUM_THREADS, or all cores.")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Write a step as a trace for chrome://tracing or Perfetto.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Write the longest operators as a picture, a PNG.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page with charts: the graph of the step and the roofline, measured.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Measure each operator of a training step: time, share, FLOP/s and bytes/s, compared with the machine's limits.

    On a GPU each call is waited for, so that its time includes the launch.
    """
    from tvm_convgrad.bench.configuration import configuration_of
    from tvm_convgrad.bench.gpu_roofline import measure_gpu_roofline
    from tvm_convgrad.bench.peak import Peak
    from tvm_convgrad.bench.roofline import measure_roofline
    from tvm_convgrad.codegen.hardware import native_target
    from tvm_convgrad.core.files import check_destination, write_atomic
    from tvm_convgrad.core.json_text import json_text
    from tvm_convgrad.report.plot import save_profile
    from tvm_convgrad.report.profile import Limits, as_json, chrome_trace, rows_of, show
    from tvm_convgrad.report.tables import print_json
    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.training.runtime.data import random_samples
    from tvm_convgrad.training.runtime.loop import batch_size_of
    from tvm_convgrad.training.runtime.reader import Reader
    from tvm_convgrad.training.runtime.session import Session
    from tvm_convgrad.training.runtime.source import Order
    from tvm_convgrad.training.runtime.timeline import record

    # Of all images one batch is decoded, here and when it is needed.
    images = image_options.image_options(mean, std, fit, convert_channels, augment, workers=0, memory=0)
    if html is not None:
        from tvm_convgrad.report.html.measured import Measured
        from tvm_convgrad.report.html.page import check_packages, page_of

        check_packages()
    for path in (trace, plot, html):
        if path is not None:
            check_destination(path)
    used = use_threads(threads)
    session = Session(step)
    reader = Reader(session, images)
    if data is None:
        size = session.batch or batch_size or 32
        samples: Samples | ImageSource = random_samples(session.inputs, session.target, session.classes, size)
    else:
        found = reader.read(data, "train", given=True)
        assert found is not None  # `given` parts are there, or an error
        samples = found
    size = batch_size_of(session, batch_size, len(samples))
    with closing(reader):
        batch = next(samples.batches(Order(seed=0, epoch=0, size=size)))
        timeline = record(session, batch.inputs, batch.target, steps)
    if session.on_gpu:
        gpu = configuration_of("cuda", dtype=str(session.artifact.options.get("dtype") or "float32"))
        measured, where = measure_gpu_roofline(gpu), gpu.gpu_name
    else:
        measured, where = measure_roofline(Peak(native_target(), used)), f"threads {used}"
    limits = Limits(measured.gflops, measured.bandwidth)
    convolutions = [*session.artifact.gradients, *session.artifact.forward]
    table = rows_of(timeline, convolutions, size)
    title = f"a step of {step.name}, batch {size}, {where}"
    if trace is not None:
        write_atomic(trace, json_text(chrome_trace(timeline), indent=None).encode())
    if plot is not None:
        save_profile(plot, [(row.problem or row.name, row.phase, row.seconds * 1e3) for row in table[:rows]], title)
    if html is not None:
        profiled = Measured(timeline, table, limits, size, used)
        write_atomic(html, page_of(_content(str(step), session.artifact, profiled)).encode())
    if json:
        print_json({"batch": size, "threads": used, **as_json(table, timeline, limits)})
    else:
        show(title, table, timeline, limits, rows)


def _content(source: str, artifact: Artifact, measured: Profiled) -> Content:
    """The page of a profile."""
    from tvm_convgrad.core.errors import UnsupportedError
    from tvm_convgrad.report.html.page import Content
    from tvm_convgrad.report.matching import with_batch
    from tvm_convgrad.report.step_graph import graph_of
    from tvm_convgrad.training.runtime.dataflow import dataflow_of, with_shapes
    from tvm_convgrad.training.runtime.memory import StepMemory, memory_of

    try:
        memory: StepMemory | str = memory_of(artifact)
    except UnsupportedError as error:  # the rest of the page does not depend on it
        memory = str(error)
    calls = with_shapes(dataflow_of(artifact), measured.timeline)
    gradients, forward = artifact.gradients, artifact.forward
    batch = measured.batch
    convolutions = [
        {"op": each["op"], "descriptor": with_batch(each["descriptor"], batch)} for each in (*gradients, *forward)
    ]
    manifest = artifact.manifest
    graph = graph_of(calls, convolutions)
    return Content(
        source, str(manifest["target"]), manifest.get("cores"), gradients, forward, memory, (), graph, measured
    )
