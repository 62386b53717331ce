# SPDX-License-Identifier: Apache-2.0
"""Models from a Python function that returns Relax."""

from __future__ import annotations

import inspect
import runpy
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tvm

from tvm_convgrad.core.errors import ConvGradError, ModelError, first_line
from tvm_convgrad.core.quiet import release
from tvm_convgrad.training.frontends.batch import bind_batch
from tvm_convgrad.training.model.model import Model, from_module, input_count
from tvm_convgrad.training.model.outputs import Outputs
from tvm_convgrad.training.model.own_loss import OwnLoss

_RETURNS = "an IRModule, a pair (IRModule, {name: array}), or a tvm_convgrad.training.model.model.Model"


def load_function(path: Path, name: str, batch: int | str | None, outputs: Outputs | OwnLoss | None = None) -> Model:
    """Run `path` and call its function `name`, which returns an IRModule with `main`, (IRModule, params) or a Model.

    A function that takes an argument `batch` gets the chosen batch if there is one (an int, or "dynamic").

    Raises:
        ModelError: no such function, it fails, needs arguments, returns something else, or its batch is fixed.
    """
    source = f"{path}:{name}"
    try:
        namespace = runpy.run_path(str(path), run_name="convgrad_model")
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ModelError(f"{path} fails when run: {_described(error, path)}.") from error
    function = namespace.get(name)
    if not callable(function):
        raise ModelError(f"{path} has no function {name!r}; name one that returns {_RETURNS}.")
    arguments = _arguments(function, batch, source)
    try:
        result = function(**arguments)
    except ConvGradError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's function raises
        raise ModelError(f"{source} fails: {_described(error, path)}.") from error
    return _as_model(result, batch, outputs, source)


def _described(error: BaseException, path: Path) -> str:
    """The type of an error, its message, and the last line of the file that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    text = f": {first_line(error)}" if str(error).strip() else " without a message"
    where = f" ({path.name}, line {frames[-1].lineno})" if frames else ""
    release(error)
    return f"{type(error).__name__}{text}{where}"


def _arguments(function: Callable[..., Any], batch: int | str | None, source: str) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    given = {"batch": batch} if batch is not None and "batch" in parameters else {}
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    needed = [p.name for p in parameters.values() if p.kind in kinds and p.default is p.empty and p.name not in given]
    if needed:
        raise ModelError(
            f"{source} needs the arguments {', '.join(needed)}; give them defaults (batch comes from --batch)."
        )
    return given


def _as_model(result: object, batch: int | str | None, outputs: Outputs | OwnLoss | None, source: str) -> Model:
    if isinstance(result, Model):
        if outputs is not None:
            raise ModelError(
                f"{source} returned a Model, whose outputs are chosen already; leave "
                "--model-output and --loss model out, or return a module."
            )
        return result
    module, values = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
    if not isinstance(module, tvm.IRModule) or not isinstance(values, Mapping):
        raise ModelError(f"{source} returned a {type(result).__name__}; return {_RETURNS}.")
    if "main" in {variable.name_hint for variable in module.get_global_vars()}:
        count = input_count(module["main"], None, source)
        remedy = "let the function take an argument batch, or use a symbolic extent"
        module = bind_batch(module, "main", count, batch, remedy, source)
    arrays = {
        str(key): value.numpy() if hasattr(value, "numpy") else np.asarray(value) for key, value in values.items()
    }
    return from_module(module, parameters=arrays, outputs=outputs, source=source)
