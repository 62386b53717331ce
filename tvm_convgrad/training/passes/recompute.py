# SPDX-License-Identifier: Apache-2.0
"""Computing cheap values again where they are used, so that they are never written to memory.

TVM's fusion writes a value out if several kernels read it: the centred data of a batch norm, the masked gradient of a
relu. Each is one or two operations on one or two tensors, which their readers have to load anyhow or could as well.
This pass gives each reader its own copy of such a value; fusion then puts the copy inside the reader.

Of steps that keep tensors in 16 bits each reader widens them for itself, and a tensor of the state, or an input, is
narrowed again in the backward pass: it is there all the time, in float32.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.training.ir.cheap import CHEAP, READERS, SOURCES, is_large, variables_of
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name

CAST = frozenset({"relax.astype"})
FLOAT32 = ("float32",)


def Recompute() -> tvm.transform.Pass:
    """The pass that gives each reader of a cheap value its own copy of it, in all straight-line functions."""
    return tvm.transform.module_pass(_recompute, opt_level=0, name="ConvgradRecompute")


def _recompute(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function) and len(function.body.blocks) == 1:
            copied = _Copies(function)
            if copied.chosen:
                module[variable] = copied.apply(function)
    return module


class _Copies:
    """Which variables of a function are computed again for each reader."""

    def __init__(self, function: relax.Function) -> None:
        values = {binding.var: binding.value for binding in bindings_of(function)}
        readers: dict[Any, list[Any]] = defaultdict(list)
        for var, value in values.items():
            for operand in variables_of(value):
                readers[operand].append(var)
        for operand in variables_of(function.body.body):
            readers[operand].append(None)
        sources: dict[Any, set[Any]] = {}
        lasting = set(function.params)
        casts: set[Any] = set()  # that each reader has for itself
        for var, value in values.items():
            if isinstance(value, relax.TupleGetItem) and value.tuple_value in lasting:
                lasting.add(var)
            again = _is_between(value, FLOAT32, SHORT_FLOATS) and value.args[0] in lasting
            only_calls = all(isinstance(values.get(reader), tvm.ir.Call) for reader in readers[var])
            if only_calls and (again or _is_between(value, SHORT_FLOATS, FLOAT32)):
                casts.add(var)
            if not (_is_call(value, CHEAP) or var in casts) or not is_large(var):
                continue
            if not isinstance(var, relax.DataflowVar):
                continue
            if not all(reader in values and _reads_cheaply(values[reader]) for reader in readers[var]):
                continue
            found: set[Any] = set()
            for operand in variables_of(value):
                if is_large(operand):
                    found |= sources.get(operand, {operand})
            if len(found) <= SOURCES:
                sources[var] = found
        self.chosen: set[Any] = set()
        for var in reversed(values):
            if (var in sources or var in casts) and (len(readers[var]) > 1 or readers[var][0] in self.chosen):
                self.chosen.add(var)
        self._values = values

    def apply(self, function: relax.Function) -> Any:
        """The function with the copies."""
        block = function.body.blocks[0]
        bindings: list[Any] = []
        for binding in block.bindings:
            if binding.var in self.chosen:
                continue
            value = binding.value
            copies: dict[Any, Any] = {}
            if any(operand in self.chosen for operand in variables_of(value)):
                value = self._rewritten(value, bindings, copies)
                bindings.append(relax.VarBinding(binding.var, value))
            else:
                bindings.append(binding)
        body = relax.SeqExpr([type(block)(bindings)], function.body.body)
        return relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)

    def _rewritten(self, call: relax.Call, bindings: list[relax.Binding], copies: dict[Any, Any]) -> Any:
        arguments = [self._copy(argument, bindings, copies) for argument in call.args]
        result = relax.Call(call.op, arguments, call.attrs, list(call.ty_args))
        relax.expr._update_type(result, call.ty)
        return result

    def _copy(self, operand: relax.Expr, bindings: list[relax.Binding], copies: dict[Any, Any]) -> Any:
        if isinstance(operand, relax.Tuple):
            return relax.Tuple([self._copy(field, bindings, copies) for field in operand.fields])
        if operand not in self.chosen:
            return operand
        if operand not in copies:
            value = self._rewritten(self._values[operand], bindings, copies)
            copies[operand] = relax.DataflowVar(str(operand.name), operand.ty)
            bindings.append(relax.VarBinding(copies[operand], value))
        return copies[operand]


def _is_call(value: relax.Expr, names: frozenset[str]) -> bool:
    return isinstance(value, tvm.ir.Call) and operator_name(value) in names


def _is_between(value: relax.Expr, source: Collection[str], result: Collection[str]) -> bool:
    """Whether a value is a tensor cast from a type of `source` to one of `result`."""
    if not _is_call(value, CAST):
        return False
    return element_type(value.args[0]) in source and str(value.attrs.dtype) in result


def _reads_cheaply(value: relax.Expr) -> bool:
    return (
        _is_call(value, READERS)
        or _is_between(value, FLOAT32, SHORT_FLOATS)
        or _is_between(value, SHORT_FLOATS, FLOAT32)
    )
