# SPDX-License-Identifier: Apache-2.0
"""Setting the batch extent of a finished Relax module."""

from __future__ import annotations

import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import static_shape


def bind_batch(
    module: tvm.IRModule, function: str, num_inputs: int, batch: int | str | None, remedy: str, source: str
) -> tvm.IRModule:
    """The module with `batch` as extent of axis 0 of its inputs, where that axis is symbolic.

    Raises:
        ModelError: the axis has another fixed extent; `remedy` is how to make a model with a free one.
    """
    if batch is None or function not in {variable.name_hint for variable in module.get_global_vars()}:
        return module
    for number in range(num_inputs):
        param = module[function].params[number]  # of the module as it is: inputs may share their batch
        shape = static_shape(param)
        if not shape:
            continue
        extent = shape[0]
        if isinstance(extent, int):
            if batch == "dynamic" or extent != batch:
                raise ModelError(
                    f"{source}: input {param.name!r} has the fixed batch {extent}, which cannot become {batch}; "
                    f"{remedy}."
                )
        elif isinstance(batch, int):
            if not isinstance(extent, tvm.ir.Var):
                raise ModelError(
                    f"{source}: the batch of input {param.name!r} is {extent}, so it cannot be set; {remedy}."
                )
            module = relax.transform.BindSymbolicVars({extent: tvm.tirx.IntImm("int64", batch)}, function)(module)
    return module
