# SPDX-License-Identifier: Apache-2.0
"""Reading models: ONNX, torch.export, a Python function that returns Relax, Relax JSON, and Relay programs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tvm_convgrad.errors import ModelError
from tvm_convgrad.training.model import Model
from tvm_convgrad.training.outputs import Outputs
from tvm_convgrad.training.program import TrainingProgram

Batch = int | Literal["dynamic"] | None
_RELAY = (".relay", ".ir", ".tar", ".gz")
_ENDINGS = ".onnx, .pt2, .json, .relay, .tar or file.py:function"


def load_model(
    path: str | Path, *, batch: Batch = None, params: str | Path | None = None, outputs: Outputs | None = None
) -> Model | TrainingProgram:
    """Read a model file, or a program that computes its own gradients.

    Args:
        path: `.onnx`; `.pt2` (torch.export.save); `.json` (tvm.ir.save_json, parameters in an `.npz` of the same
            stem, if any), of Relax or Relay; `.relay`, `.ir` (Relay's text), `.tar` (of TVMC), `.gz` of these; or
            `file.py:function`, a function without required arguments (see `python_function`).
        params: values of a Relay program's parameters, a file of relay.save_param_dict.
        batch: extent of axis 0 of every input: an int, "dynamic" for a symbolic one, None for what the model says.
        outputs: names of the outputs to train, each with the weight of its loss; the first one is the predictions.
            None takes the only output of the model; a model with several is refused then, and its outputs are listed.

    Raises:
        ModelError: the file is missing, damaged or of another kind, uses operators that cannot be imported (all of
            them are named), has a batch that cannot be changed, or several outputs without a choice.
        SetupError: the package that reads this kind of file is not installed.
    """
    text = str(path)
    try:
        return _loaded(text, batch, params, outputs)
    except ModelError as error:
        if text.partition(":")[0] in str(error):
            raise
        raise ModelError(f"{text}: {error}") from error


def _loaded(text: str, batch: Batch, params: str | Path | None, outputs: Outputs | None) -> Model | TrainingProgram:
    if batch is not None and batch != "dynamic" and (not isinstance(batch, int) or batch < 1):
        raise ModelError(f"{text}: batch must be a positive integer or 'dynamic', but is {batch!r}.")
    file, _, function = text.rpartition(":")
    if file.endswith(".py"):
        from tvm_convgrad.training.frontends.python_function import load_function

        return load_function(require_file(file), function, batch, outputs)
    suffix = Path(text).suffix.lower()
    relay = suffix in _RELAY
    if suffix == ".json":
        from tvm_convgrad.importer.sources import looks_like_relay

        relay = looks_like_relay(require_file(text))
    if relay:
        from tvm_convgrad.training.frontends.relay import load_relay

        return load_relay(require_file(text), batch, None if params is None else require_file(params), outputs)
    if params is not None:
        raise ModelError(f"{text} is no Relay program, and only these take a file of parameters; leave --params out.")
    if suffix == ".py":
        raise ModelError(f"{text} names no function; write {text}:FUNCTION, a function that returns an IRModule.")
    if suffix not in (".onnx", ".pt2", ".json"):
        raise ModelError(f"{text}: the ending {suffix!r} is not that of a model; give {_ENDINGS}.")
    found = require_file(text)
    if suffix == ".onnx":
        from tvm_convgrad.training.frontends.onnx import load_onnx

        return load_onnx(found, batch, outputs)
    if suffix == ".pt2":
        from tvm_convgrad.training.frontends.torch_export import load_pt2

        return load_pt2(found, batch, outputs)
    from tvm_convgrad.training.frontends.relax_json import load_json

    return load_json(found, batch, outputs)


def require_file(path: str | Path) -> Path:
    """The path, if a file that can be read is there.

    Raises:
        ModelError: it is missing, or is a folder.
    """
    found = Path(path)
    if not found.is_file():
        what = "is a folder, not a model file" if found.is_dir() else "does not exist"
        raise ModelError(f"{path} {what}; check the path of the model.")
    return found
