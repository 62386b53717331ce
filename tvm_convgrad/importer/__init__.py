# SPDX-License-Identifier: Apache-2.0
"""Relay programs (TVM up to 0.19) on today's TVM: JSON, text and TVMC archives become Relax. No Relay is needed.

from_relay       a program as a Relax IRModule
import_relay     the same, with parameters apart and a report
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import tvm
from numpy.typing import ArrayLike
from tvm import relax

from relax_ops.register import register_all
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.convert import convert, unique_names
from tvm_convgrad.importer.sources import load
from tvm_convgrad.importer.tensors import Array
from tvm_convgrad.training.model.model import schema_of


@dataclass(frozen=True)
class Imported:
    """An imported program.

    Attributes:
        module: the Relax IRModule; its function `main` takes all parameters of the Relay function, in order.
        params: the values of parameters that were given or came with the program, by name in `module`.
        version: what wrote the program, or "".
        lifted: what was recognised as a convolution's gradient, with counts.
    """

    module: tvm.IRModule
    params: dict[str, Array]
    version: str
    lifted: dict[str, int]


def import_relay(source: str | Path, params: str | Path | Mapping[str, ArrayLike] | None = None) -> Imported:
    """Read a Relay program and convert it. Arguments and errors as `from_relay`."""
    register_all()
    loaded = load(source, params)
    converted = convert(loaded.program)
    main = loaded.program.functions["main"]
    names = list(zip((var.name for var in main.params), unique_names(main), strict=True))
    values: dict[str, Array] = {}
    for old, new in names:
        found = loaded.params.get(new, loaded.params.get(old))
        if found is not None:
            values[new] = _fitting(new, found, converted.module)
    known = {name for pair in names for name in pair}
    unknown = sorted(set(loaded.params) - known)
    if unknown and len(unknown) == len(loaded.params):
        raise ModelError(
            f"{loaded.program.source}: values were given for {', '.join(unknown[:8])}, which are not parameters of it; "
            f"it has {', '.join(sorted(known)[:8]) or 'none'}."
        )
    return Imported(converted.module, values, loaded.program.version, dict(Counter(converted.lifted)))


def _fitting(name: str, value: Array, module: tvm.IRModule) -> Array:
    (param,) = [param for param in module["main"].params if str(param.name) == name]
    schema = schema_of(param)
    fixed = all(
        not isinstance(want, int) or want == have for want, have in zip(schema.shape, value.shape, strict=False)
    )
    if len(schema.shape) != value.ndim or not fixed or str(value.dtype) != schema.dtype:
        raise ModelError(f"The value for {name!r} is {value.dtype}{list(value.shape)}; it must be {schema.describe()}.")
    return value


def from_relay(source: str | Path, params: str | Path | Mapping[str, ArrayLike] | None = None) -> tvm.IRModule:
    """Convert a Relay program to a Relax IRModule with the function `main`.

    Args:
        source: a file, or the text of one: JSON of tvm.ir.save_json or text of mod.astext(). A file may also be either
            of these as .gz, or a .tar of TVMC.
        params: a file of relay.save_param_dict, or arrays by name. As in relay.build, these parameters become
            constants. If a text lacks its metadata section, give its constants here, by names such as
            `meta[relay.Constant][0]`.

    Returns:
        The module. Parameters keep their order; of several parameters with the same name, later ones get a number.

    Raises:
        ModelError: the program cannot be parsed, is not well-typed, or has unsupported operators (all are named).
    """
    imported = import_relay(source, params)
    if not imported.params:
        return imported.module
    arrays = {name: tvm.runtime.tensor(value) for name, value in imported.params.items()}
    return relax.transform.BindParams("main", arrays)(imported.module)
