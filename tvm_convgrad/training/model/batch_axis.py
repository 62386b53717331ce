# SPDX-License-Identifier: Apache-2.0
"""Whether a model computes with the batch of its inputs everywhere, or has another batch fixed in one of its shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.core.errors import ModelError, first_line
from tvm_convgrad.core.quiet import native_stderr_discarded
from tvm_convgrad.training.ir.graph import (
    Environment,
    Extent,
    builder_with_tir,
    function_scope,
    replay,
    static_shape,
)

PROBE = 8191
"""A batch that no model has fixed in its shapes: a large prime, which is not a product or quotient of other extents."""


class BatchError(ModelError):
    """A model some shape of which fixes another batch than the one of its inputs."""


def check_batch(module: tvm.IRModule, function: str, num_inputs: int, behind: int, source: str) -> None:
    """Check that what a function returns behind its first `behind` results has the batch of its inputs on axis 0.

    TVM's shape inference accepts what it cannot refute, such as a reshape of [n, 8] to [16, 8]. So a function with a
    symbolic batch is inferred once more with a number for it.

    Raises:
        BatchError: the batch is symbolic, and a shape within the function is fixed.
        ModelError: an input or a result has no batch on axis 0.
    """
    batch = _batch_of(module[function].params[:num_inputs], source)
    results = _result_types(module[function])[behind:]
    if isinstance(batch, int):
        for result in results:
            _check_result(result, batch, str(batch), source)
        return
    for result in _result_types(_with_batch(module, function, batch, source))[behind:]:
        _check_result(result, PROBE, str(batch), source)


def _batch_of(inputs: Sequence[relax.Var], source: str) -> Any:
    """The extent of axis 0 of the inputs: a number, or a symbolic variable."""
    found: list[Any] = []
    for value in inputs:
        shape = static_shape(value)
        if not shape:
            raise ModelError(
                f"{source}: input {value.name!r} is a scalar; axis 0 of every input must be the batch, so make it a "
                "constant or a parameter of the model."
            )
        found.append(shape[0])
    if len(set(map(str, found))) != 1:
        listed = ", ".join(f"{value.name} {extent}" for value, extent in zip(inputs, found, strict=True))
        first, other = (inputs[found.index(extent)].name for extent in list(dict.fromkeys(found))[:2])
        raise ModelError(
            f"{source}: axis 0 of its inputs has different extents ({listed}), but must be the batch of each; give "
            "every input one row a sample. Of one torch.export.Dim PyTorch may make several: then write "
            f"torch._check({first}.shape[0] == {other}.shape[0]) into forward."
        )
    batch = found[0]
    if not isinstance(batch, int | tvm.tirx.Var):
        raise ModelError(f"{source}: the batch of its inputs is {batch}; use one symbolic extent, or a number.")
    return batch


def _result_types(function: relax.Function) -> list[Any]:
    return list(function.ret_ty.fields) if isinstance(function.ret_ty, relax.TupleType) else [function.ret_ty]


def _check_result(result: relax.Expr, batch: int, shown: str, source: str) -> None:
    shape = static_shape(relax.Var("output", result))
    if not shape:
        raise ModelError(
            f"{source}: its predictions are a scalar; return one row a sample, and leave the loss to the step "
            "(--loss), or, if this is the loss, build with --loss model."
        )
    if shape[0] != batch:
        found = [_with_symbol(extent, shown) if batch == PROBE else str(extent) for extent in shape]
        raise BatchError(
            f"{source}: the batch of its inputs is {shown}, but its predictions are [{', '.join(found)}]; axis 0 of "
            "both must be the batch, one row a sample."
        )
    if 0 in shape:
        raise ModelError(
            f"{source}: its predictions are [{', '.join(map(str, shape))}] and have no elements, so that a step would "
            "train nothing; check the slices and reshapes before them."
        )


def _with_symbol(extent: Extent, symbol: str) -> str:
    """An extent that was inferred for the batch PROBE, as a multiple of the batch's symbol where it is one."""
    if not isinstance(extent, int) or extent == 0 or extent % PROBE:
        return str(extent)
    return symbol if extent == PROBE else f"{extent // PROBE} * {symbol}"


def _with_batch(module: tvm.IRModule, function: str, batch: relax.Expr, source: str) -> Any:
    """The function with a number for its symbolic batch, all types inferred again."""
    try:
        with native_stderr_discarded():  # where this pass fails, TVM warns of its own builder first
            bound = relax.transform.BindSymbolicVars({batch: tvm.tirx.IntImm("int64", PROBE)}, function)(module)
        original = bound[function]
        environment = Environment()
        params = [relax.Var(str(param.name), param.ty) for param in original.params]
        for param, var in zip(original.params, params, strict=True):
            environment[param] = var
        builder = builder_with_tir(bound)
        with function_scope(builder, function, params):
            with builder.dataflow():
                output = builder.emit_output(replay(builder, original, environment))
            builder.emit_func_output(output)
    except ModelError:
        raise
    except Exception as error:  # TVM's shape inference raises ValueError, TypeError and errors of its own
        reason = first_line(error).replace(str(PROBE), str(batch))
        raise BatchError(
            f"{source}: it does not compute with every batch, though that of its inputs is {batch} ({reason}); write "
            "no fixed batch into shapes of the model, or build it with that batch."
        ) from error
    return builder.get()[function]
