# SPDX-License-Identifier: Apache-2.0
"""Half-precision operands for convolutions and matrix products of a finished float32 step.

TVM's Gradient pass refuses bfloat16, so the step is differentiated in float32 and narrowed afterwards: operands of
convolutions (forward, wgrad, dgrad) and of matmul are cast, the result is accumulated in float32, and stored in it or
in the operands' type. Weights, statistics, losses and the optimizer stay float32 (master weights).
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.training.ir.graph import Environment, element_type, fresh_parameters, function_scope, replay

_RANKS = (1, 2, 3)
NARROWED = (
    "relax.matmul",
    *(f"relax.nn.conv{rank}d" for rank in _RANKS),
    *(f"relax.nn.conv{rank}d_transpose" for rank in _RANKS),
    *(f"relax.nn.conv{rank}d_backward_weight" for rank in _RANKS),
    *(f"relax.nn.conv{rank}d_backward_data" for rank in _RANKS),
)


def narrow(module: tvm.IRModule, dtype: str, results: str = "float32") -> tvm.IRModule:
    """The module with operands of convolutions and matrix products in `dtype`; "float32" leaves it as it is.

    Args:
        results: of `names.RESULTS`; what reads a result stored in the operands' type gets it as float32 all the same.
    """
    if dtype == "float32":
        return module
    builder = relax.BlockBuilder()
    for variable in module.get_global_vars():
        function = module[variable]
        if not isinstance(function, relax.Function):
            builder.add_func(function, variable.name_hint)
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function):
            _narrow_function(
                builder, variable.name_hint, function, dtype, dtype if results == "operands" else "float32"
            )
    return builder.get()


def _narrow_function(
    builder: relax.BlockBuilder, name: str, function: relax.Function, dtype: str, result_dtype: str
) -> None:
    fresh = fresh_parameters(function)
    environment = Environment(function.params, fresh)
    narrowed: dict[Any, Any] = {}

    def cast(tensor: relax.Expr) -> relax.Expr:
        if element_type(tensor) != "float32":
            return tensor
        if tensor not in narrowed:
            narrowed[tensor] = builder.emit(relax.op.astype(tensor, dtype))
        return narrowed[tensor]

    def rewrite(_builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
        if element_type(call.args[0]) != "float32":
            return None
        operands = [cast(argument) if isinstance(argument.ty, relax.TensorType) else argument for argument in call.args]
        narrow = relax.Call(call.op, operands, _with_result(call.attrs, result_dtype), list(call.ty_args))
        return narrow if result_dtype == "float32" else relax.op.astype(builder.emit(narrow), "float32")

    with function_scope(builder, name, fresh, dict(function.attrs.items()) if function.attrs else None):
        with builder.dataflow():
            result = replay(builder, function, environment, dict.fromkeys(NARROWED, rewrite))
            output = builder.emit_output(result)
        builder.emit_func_output(output)


def _with_result(attributes: tvm.ir.Attrs, dtype: str) -> tvm.ir.Attrs:
    """The attributes with another out_dtype."""
    if hasattr(attributes, "__replace__"):  # declared in Python, with out_dtype as text: our own operators
        return attributes.__replace__(out_dtype=dtype)
    info = type(attributes).__tvm_ffi_type_info__
    fields = {field.name: getattr(attributes, field.name) for field in info.fields}
    return tvm.ir.make_node(str(info.type_key), **{**fields, "out_dtype": tvm.DataType(dtype)})
