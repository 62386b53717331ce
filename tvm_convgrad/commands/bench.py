# SPDX-License-Identifier: Apache-2.0
"""`convgrad bench`: the kernels of a network's convolutions against PyTorch or stock TVM."""

from __future__ import annotations

import json as json_format
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options

FACES = ("backward_weight", "backward_data", "forward")


def bench(
    suite: Annotated[str, typer.Option(metavar="NAME[,…]|all", help="Networks: resnet50, mobilenet_v2, …")] = "all",
    problem: Annotated[str | None, typer.Option(metavar="DESC", help="One problem instead of a suite.")] = None,
    batch: Annotated[str, typer.Option(metavar="N[,…]", help="Batch sizes.")] = "8",
    layout: Annotated[str, typer.Option(metavar="NCHW[,NHWC]", help="Layouts.")] = "NCHW,NHWC",
    face: Annotated[str, typer.Option(metavar="FACE[,…]", help="backward_weight, backward_data, forward.")] = (
        "backward_weight,backward_data"
    ),
    against: Annotated[str, typer.Option(metavar="torch|stock", help="The rival.")] = "torch",
    seconds: Annotated[float, typer.Option(min=0.0, help="Time for the pairs of each measurement.")] = 0.5,
    target: options.Target = "native",
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all measurements as JSON.")] = None,
) -> None:
    """Interleaved pairs, medians; worst first, then geometric means by suite, layout and face."""
    faces, layouts, sizes = face.split(","), layout.split(","), batch.split(",")
    if set(faces) - set(FACES):
        raise typer.BadParameter(f"--face {face}: use {', '.join(FACES)}.")
    if set(layouts) - {"NCHW", "NHWC"}:
        raise typer.BadParameter(f"--layout {layout}: use NCHW, NHWC or both.")
    if against not in ("torch", "stock"):
        raise typer.BadParameter(f"--against {against}: use torch or stock.")
    if not all(size.isdecimal() and int(size) for size in sizes):
        raise typer.BadParameter(f"--batch {batch}: give positive numbers.")
    from tvm_convgrad.bench.measure import Measurement, geometric_mean, measure
    from tvm_convgrad.bench.suites import SUITES
    from tvm_convgrad.bench.suites import suite as problems_of
    from tvm_convgrad.problem import ConvProblem
    from tvm_convgrad.report.tables import print_table
    from tvm_convgrad.threads import use_threads
    from tvm_convgrad.training.cpu import parse_target

    names = list(SUITES) if suite == "all" else suite.split(",")
    if set(names) - set(SUITES):
        raise typer.BadParameter(f"--suite {suite}: use all or {', '.join(SUITES)}.")
    threads = use_threads()
    if against == "torch" and find_spec("torch"):
        import torch

        torch.set_num_threads(threads)
    machine = parse_target(target)
    work: list[tuple[str, ConvProblem, int]] = []
    if problem is not None:
        work.append(("problem", ConvProblem.from_descriptor(problem), 1))
    else:
        for name in names:
            for size in sizes:
                for order in layouts:
                    work += [(f"{name} {order} b{size}", p, n) for p, n in problems_of(name, int(size), order).items()]
    found: list[Measurement] = []
    for group, each, count in work:
        for one in faces:
            result = measure(one, each, target=machine, against=against, seconds=seconds, suite=group, count=count)
            found.append(result)
            typer.echo(f"{result.ratio:6.2f}x  {one:15}  {each.descriptor}  [{result.kernel}]", err=True)
    if json is not None:
        json.write_text(json_format.dumps([m.plain() for m in found], indent=1) + "\n")
    columns = ("ratio", "face", "problem", "kernel", "ms", "GFLOP/s", "rival", "suite", "count")
    rows = [
        (
            f"{m.ratio:.2f}",
            m.face,
            m.descriptor,
            m.kernel,
            f"{m.ours * 1e3:.3f}",
            f"{m.gflops:.0f}",
            m.rival,
            m.suite,
            m.count,
        )
        for m in sorted(found, key=lambda m: m.ratio)
    ]
    print_table(f"time of {against} / ours, worst first", columns, rows, right=("ratio", "ms", "GFLOP/s", "count"))
    groups = sorted({(m.suite, m.face) for m in found})
    means = [
        (group, one, f"{geometric_mean(m.ratio for m in found if (m.suite, m.face) == (group, one)):.2f}")
        for group, one in groups
    ]
    means.append(("all", "all", f"{geometric_mean(m.ratio for m in found):.2f}"))
    print_table("geometric means", ("suite", "face", "ratio"), means, right=("ratio",))
