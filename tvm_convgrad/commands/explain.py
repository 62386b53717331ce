# SPDX-License-Identifier: Apache-2.0
"""`convgrad explain`: the gradient operators of a step, what computes each and why nothing else does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tvm_convgrad.commands import options


def explain(
    model: Annotated[str, typer.Argument(metavar="MODEL|STEP.so", help="A model, or a library that build wrote.")],
    layout: options.Layout = "NCHW",
    batch: options.Batch = None,
    loss: options.Loss = "cross_entropy",
    dtype: options.DType = "float32",
    json: options.Json = False,
) -> None:
    """List the gradient operators: problem, kernel, refused alternatives, work, bytes, share. Options need a model."""
    size = options.parse_batch(batch)
    from tvm_convgrad.report.gradients import describe_gradients, show_gradients

    if Path(model).suffix == ".so":
        from tvm_convgrad.training.artifact import read_artifact

        entries = read_artifact(Path(model)).gradients
    else:
        from tvm_convgrad.training.frontends import load_model
        from tvm_convgrad.training.step import build_step

        step = build_step(load_model(model, batch=size), loss=loss, dtype=dtype, layout=layout)
        entries = describe_gradients(step.gradients)
    show_gradients(f"gradient operators of {model}", entries, json)
