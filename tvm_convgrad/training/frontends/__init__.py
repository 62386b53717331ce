# SPDX-License-Identifier: Apache-2.0
"""Reading model files: `load_model`, and the formats that it reads, which the folder `formats` has."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends.registry import Batch, Format, Request, all_formats, require_file, shown_formats

if TYPE_CHECKING:  # the help of commands lists the formats without TVM
    from tvm_convgrad.training.model.model import Model
    from tvm_convgrad.training.model.outputs import Outputs
    from tvm_convgrad.training.model.own_loss import OwnLoss
    from tvm_convgrad.training.model.program import TrainingProgram

__all__ = ["Batch", "Format", "Request", "all_formats", "load_model", "require_file", "shown_formats"]


def load_model(
    path: str | Path, *, batch: Batch = None, params: str | Path | None = None, outputs: Outputs | OwnLoss | None = None
) -> Model | TrainingProgram:
    """Read a model from a file, or a program that computes its own gradients.

    Args:
        path: an ONNX file (`.onnx`); a program of torch.export.save (`.pt2`); Relax or Relay as JSON of
            tvm.ir.save_json (`.json`, with values of parameters in an `.npz` file of the same stem); Relay as text
            (`.relay`, `.ir`) or from TVMC (`.tar`), or one of these compressed (`.gz`); or `file.py:function`, a Python
            function without required arguments that returns an IRModule.
        batch: extent of axis 0 of every input: an int, "dynamic" for a symbolic extent, or None for that of the file.
        params: a file of relay.save_param_dict with the values of a Relay program's parameters.
        outputs: names of the outputs to train, with the weights of their losses; the first one is the predictions.
            None means the only output. `OwnLoss`: the model takes the target and returns its loss itself.

    Raises:
        ModelError: the file is missing, damaged or of an unknown format; it has unsupported operators (all are named);
            its batch cannot be changed; or it has several outputs (all are listed) and `outputs` is None.
        SetupError: the package that reads this format is not installed.

    Example:
        model = load_model("model.onnx", batch="dynamic")
        step = build_step(model, loss="cross_entropy", optimizer="sgd", lr=0.05)
    """
    text = str(path)
    try:
        return _loaded(text, batch, params, outputs)
    except ModelError as error:
        if text.partition(":")[0] in str(error):
            raise
        raise ModelError(f"{text}: {error}") from error


def _loaded(
    text: str, batch: Batch, params: str | Path | None, outputs: Outputs | OwnLoss | None
) -> Model | TrainingProgram:
    if batch is not None and batch != "dynamic" and (not isinstance(batch, int) or batch < 1):
        raise ModelError(f"{text}: batch must be a positive integer or 'dynamic', but is {batch!r}.")
    chosen, path, function = _format_of(text)
    if params is not None and not chosen.takes_params:
        takers = ", ".join(each.name for each in all_formats() if each.takes_params)
        raise ModelError(
            f"{text} is a model of the format {chosen.name}, and only {takers} takes a file of parameters; leave "
            "--params out."
        )
    values = None if params is None else require_file(params, "the parameters (--params)")
    chosen.check_package(text)
    return chosen.load(Request(path, function, batch, values, outputs))


def _format_of(text: str) -> tuple[Format, Path, str]:
    """The format of a path, the file, and the name of the function behind it, or ""."""
    known = all_formats()
    file, _, function = text.rpartition(":")
    candidates = [each for each in known if each.takes_function and file.lower().endswith(each.suffixes)]
    if not candidates:
        file, function = text, ""
        suffix = Path(text).suffix.lower()
        candidates = [each for each in known if suffix in each.suffixes]
        if not candidates:
            raise ModelError(f"{text}: the suffix {suffix!r} is not that of a model; give {shown_formats()}.")
        if all(each.takes_function for each in candidates):
            raise ModelError(f"{text} names no function; write {text}:FUNCTION, a function that returns an IRModule.")
    path = require_file(file)
    for each in candidates:
        if each.is_of(path):
            return each, path, function
    raise ModelError(f"{text} is not a file of {' or '.join(each.name for each in candidates)}.")
