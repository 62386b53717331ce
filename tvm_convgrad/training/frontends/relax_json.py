# SPDX-License-Identifier: Apache-2.0
"""Models as Relax JSON (tvm.ir.save_json), with parameters in an .npz file of the same stem, if there is one."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import tvm

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends.batch import bind_batch
from tvm_convgrad.training.model.model import Array, Model, from_module, input_count
from tvm_convgrad.training.model.outputs import Outputs
from tvm_convgrad.training.model.own_loss import OwnLoss


def load_json(path: Path, batch: int | str | None, outputs: Outputs | OwnLoss | None = None) -> Model:
    """Read a Relax IRModule with a function `main`: inputs first (attribute `num_input`, default 1), then weights.

    Parameters are taken by name from the .npz file beside it; without that file, or for names that it lacks, they
    are initialised (see `tvm_convgrad.training.model.initialise`).

    Raises:
        ModelError: either file cannot be read, or the module is not such a model.
    """
    try:
        module = tvm.ir.load_json(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RuntimeError, KeyError, TypeError, IndexError, AttributeError) as error:
        line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(
            f"{path} is not Relax JSON that TVM {tvm.__version__} can read ({line}); "
            "write it with tvm.ir.save_json(module)."
        ) from error
    if not isinstance(module, tvm.IRModule):
        raise ModelError(f"{path} holds a {type(module).__name__}, not an IRModule; write tvm.ir.save_json(module).")
    source = str(path)
    if "main" in {variable.name_hint for variable in module.get_global_vars()}:
        count = input_count(module["main"], None, source)
        remedy = "write the module with a symbolic batch extent"
        module = bind_batch(module, "main", count, batch, remedy, source)
    return from_module(module, parameters=_sidecar(path.with_suffix(".npz")), outputs=outputs, source=source)


def _sidecar(path: Path) -> dict[str, Array]:
    if not path.exists():
        return {}
    try:
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
        raise ModelError(
            f"{path} is not a readable .npz of parameters ({error}); write it with numpy.savez."
        ) from error
