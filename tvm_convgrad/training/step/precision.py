# SPDX-License-Identifier: Apache-2.0
"""Half-precision operands for convolutions and matrix products of a finished float32 step, and activations in 16 bits.

TVM's Gradient pass refuses bfloat16, so the step is differentiated in float32 and narrowed afterwards: operands of
convolutions (forward, wgrad, dgrad) and of matmul are cast, the result is accumulated in float32, and stored in it or
in the operands' type. Weights, statistics, losses and the optimizer stay float32 (master weights). With the results
"activations" what is kept between forward and backward is in 16 bits as well (`storage`).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.training.ir.graph import (
    Environment,
    bindings_of,
    element_type,
    fresh_parameters,
    function_scope,
    operator_name,
    replay,
)
from tvm_convgrad.training.step.names import ACTIVATIONS
from tvm_convgrad.training.step.storage import CONTRACTIONS, VIEWS, Storage, is_narrowed


def narrow(module: tvm.IRModule, dtype: str, results: str = "float32", masks: Collection[int] = ()) -> tvm.IRModule:
    """The module with operands of convolutions and matrix products in `dtype`; "float32" leaves it as it is.

    Args:
        results: of `names.RESULTS`; what reads a result stored in the operands' type gets it as float32 all the same.
        masks: numbers of the fields of the state that may be masks, see `storage.may_be_mask`.
    """
    if dtype == "float32":
        return module
    if results == ACTIVATIONS:
        module = relax.transform.CanonicalizeBindings()(module)  # gradients bind one tensor to several names
    builder = relax.BlockBuilder()
    for variable in module.get_global_vars():
        function = module[variable]
        if not isinstance(function, relax.Function):
            builder.add_func(function, variable.name_hint)
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function):
            if results == ACTIVATIONS:
                _Kept(builder, function, dtype, masks).emit(variable.name_hint)
            else:
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
        return _cast(builder, tensor, dtype, narrowed)

    def rewrite(_builder: relax.BlockBuilder, call: relax.Call, _environment: Environment) -> relax.Expr | None:
        if not is_narrowed(call, builder.lookup_binding):
            return None
        operands = [cast(argument) if isinstance(argument.ty, relax.TensorType) else argument for argument in call.args]
        narrow = relax.Call(call.op, operands, _with_result(call.attrs, result_dtype), list(call.ty_args))
        return narrow if result_dtype == "float32" else relax.op.astype(builder.emit(narrow), "float32")

    with function_scope(builder, name, fresh, dict(function.attrs.items()) if function.attrs else None):
        with builder.dataflow():
            result = replay(builder, function, environment, dict.fromkeys(CONTRACTIONS, rewrite))
            output = builder.emit_output(result)
        builder.emit_func_output(output)


def _cast(builder: relax.BlockBuilder, tensor: relax.Expr, dtype: str, narrowed: dict[Any, Any]) -> Any:
    """A tensor in another type; `narrowed` has what is cast already. What a view shows is cast, so that kernels see it.

    A transpose, or a vector in the shape of a bias, is taken by kernels as it lies.
    """
    if tensor not in narrowed:
        made = builder.lookup_binding(tensor) if isinstance(tensor, relax.Var) else None
        if isinstance(made, tvm.ir.Call) and operator_name(made) in VIEWS:
            operand = _cast(builder, made.args[0], dtype, narrowed)
            cast = relax.Call(made.op, [operand, *made.args[1:]], made.attrs, list(made.ty_args))
        else:
            cast = relax.op.astype(tensor, dtype)
        narrowed[tensor] = builder.emit(cast)
    return narrowed[tensor]


class _Kept:
    """One function whose activations are kept in 16 bits: each has a variable of them, and is widened for readers."""

    def __init__(
        self, builder: relax.BlockBuilder, function: relax.Function, dtype: str, masks: Collection[int]
    ) -> None:
        self._builder, self._function, self._dtype = builder, function, dtype
        self._fresh = fresh_parameters(function)
        self._environment = Environment(function.params, self._fresh)
        self._storage = Storage(function, dtype, masks)
        self._narrowed: dict[Any, Any] = {}  # 16-bit variables, by those of the same values in float32

    def emit(self, name: str) -> None:
        """Add the function of this name to the builder."""
        builder, function = self._builder, self._function
        with function_scope(builder, name, self._fresh, dict(function.attrs.items()) if function.attrs else None):
            with builder.dataflow():
                for binding in bindings_of(function):
                    self._binding(binding)
                output = builder.emit_output(self._environment.substitute(function.body.body))
            builder.emit_func_output(output)

    def _binding(self, binding: relax.Binding) -> None:
        builder, environment, variable = self._builder, self._environment, binding.var
        if isinstance(binding, relax.MatchCast):
            environment[variable] = builder.match_cast(environment.substitute(binding.value), binding.ty)
            return
        value = environment.substitute(binding.value)
        if not isinstance(value, tvm.ir.Call):
            is_bound = isinstance(value, relax.TupleGetItem)
            environment[variable] = builder.emit(value, variable.name) if is_bound else value
            return
        kept = self._storage.keeps(variable)
        if is_narrowed(value, builder.lookup_binding):
            operands = [self._cast(each) if isinstance(each.ty, relax.TensorType) else each for each in value.args]
            attributes = _with_result(value.attrs, self._dtype if kept else "float32")
            bound = builder.emit(relax.Call(value.op, operands, attributes, list(value.ty_args)), variable.name)
        elif variable in self._storage.moved:
            operands, kept = [self._moved(each) for each in value.args], True
            bound = builder.emit(relax.Call(value.op, operands, value.attrs, list(value.ty_args)), variable.name)
        else:
            bound = builder.emit(value, variable.name)
            bound = builder.emit(relax.op.astype(bound, self._dtype)) if kept else bound
        environment[variable] = self._widened(bound) if kept else bound

    def _widened(self, narrow: relax.Var) -> relax.Var:
        wide = self._builder.emit(relax.op.astype(narrow, "float32"))
        self._narrowed[wide] = narrow
        return wide

    def _cast(self, tensor: relax.Expr) -> Any:
        """A tensor in 16 bits: what is kept of it, if it is."""
        if element_type(tensor) != "float32":
            return tensor
        return _cast(self._builder, tensor, self._dtype, self._narrowed)

    def _moved(self, operand: relax.Expr) -> Any:
        """An operand of what is computed in 16 bits."""
        if isinstance(operand, relax.Tuple):
            return relax.Tuple([self._moved(field) for field in operand.fields])
        return self._cast(operand) if isinstance(operand.ty, relax.TensorType) else operand


def _with_result(attributes: tvm.ir.Attrs, dtype: str) -> tvm.ir.Attrs:
    """The attributes with another out_dtype."""
    if hasattr(attributes, "__replace__"):  # declared in Python, with out_dtype as text: our own operators
        return attributes.__replace__(out_dtype=dtype)
    info = type(attributes).__tvm_ffi_type_info__
    fields = {field.name: getattr(attributes, field.name) for field in info.fields}
    return tvm.ir.make_node(str(info.type_key), **{**fields, "out_dtype": tvm.DataType(dtype)})
