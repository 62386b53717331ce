# SPDX-License-Identifier: Apache-2.0
"""The gradients of micro-batches are added in the place of the first one's, where no kernel of a convolution does it.

A sum over samples (a bias's gradient), or a matrix product for which there is no kernel, becomes one function with the
addition, so that it has no memory of its own. What else is added, such as a batch norm's gradients, which the data's
gradient reads too, is computed by itself first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax, te, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.ir import constant_extents
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name
from tvm_convgrad.training.ir.micro_batches import MICRO_BATCHES, micro_batches_of
from tvm_convgrad.training.ir.views import VIEWS, is_reshape
from tvm_convgrad.training.passes.in_place import overwriting

_TRANSPOSE = "relax.permute_dims"

_FRESH = frozenset({"relax.matmul", "relax.sum"})
"""Their result is a tensor of its own. Elementwise operations TVM makes one with the addition."""

_OPAQUE = 8
"""TVM's kOpaque: FuseOps takes calls in place for others, and must not fuse them."""

Compute = Callable[..., Any]
"""Of tensor expressions of the operands, that of the result."""


def AddGradientsInPlace() -> tvm.transform.Pass:
    """The pass that replaces sums of the tensors of different micro-batches by calls in place."""
    return tvm.transform.module_pass(_gradient_sums, opt_level=0, name="ConvgradGradientSums")


def _gradient_sums(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    rewriter = _Sums(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and MICRO_BATCHES in (function.attrs or {}):
            rewriter.look_at(function)
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


@mutator
class _Sums(PyExprMutator):
    def __init__(self, module: tvm.IRModule) -> None:
        super().__init__(module)
        self.module = module

    def look_at(self, function: relax.Function) -> None:
        """Find what each variable is bound to, how many read it, and which micro-batch it is of."""
        bindings = list(bindings_of(function))
        self.values = {binding.var: binding.value for binding in bindings}
        self.micro_batch = dict(zip(self.values, micro_batches_of(function), strict=True))
        self.readers: Counter[Any] = Counter()
        self.fields: Counter[Any] = Counter()
        self.varying = set(function.params)
        for variable, value in self.values.items():
            used = relax.analysis.free_vars(value)
            self.readers.update(used)
            if any(each in self.varying for each in used):
                self.varying.add(variable)
            if isinstance(value, relax.TupleGetItem):
                self.fields[value.tuple_value, int(value.index)] += 1
        self.readers.update(relax.analysis.free_vars(function.body.body))
        self.sums: set[Any] = set()
        for variable, value in self.values.items():
            if self._is_sum(value):
                self.sums.add(variable)
        self.first = {self.values[variable].args[0] for variable in self.sums}

    def _is_sum(self, call: relax.Call) -> bool:
        """Whether a value adds a tensor to one of an earlier micro-batch whose place it may take."""
        if not isinstance(call, tvm.ir.Call) or operator_name(call) != "relax.add":
            return False
        acc, more = call.args
        if self.micro_batch.get(acc, 0) >= self.micro_batch.get(more, 0) or not self._is_free(acc):
            return False
        types = {(constant_extents(each), element_type(each)) for each in (acc, more, call)}
        return len(types) == 1 and all(extents is not None for extents, _ in types)

    def visit_var_binding_(self, binding: relax.Binding) -> None:
        """A call in the place of a sum; a transposed product that is added to is computed as that."""
        value, call = binding.value, None
        if binding.var in self.sums:
            call = self._in_place(value)
        elif binding.var in self.first and isinstance(value, tvm.ir.Call) and operator_name(value) == _TRANSPOSE:
            found = self._reduction(binding.var)
            if found is not None and _is_static(found[0]):
                call = self.builder_.call_te(found[1], *map(self.visit_expr, found[0]))
        super().visit_var_binding_(binding if call is None else relax.VarBinding(binding.var, call))

    def _in_place(self, call: relax.Call) -> relax.Call | None:
        """The call that adds to the first summand, or None where no function does both."""
        acc, more = call.args
        found = self._reduction(more)
        given, compute = found if found is not None and _is_static(found[0]) else ([more], _itself)
        operands = [*given, acc]
        own = [te.placeholder(constant_extents(each), element_type(each), f"p{i}") for i, each in enumerate(operands)]
        function = te.create_prim_func([*own, topi.add(own[-1], compute(*own[:-1]))]).with_attr("op_pattern", _OPAQUE)
        made = overwriting(self.builder_, function, "add_gradient", len(own) - 1)
        return None if made is None else made.call(operands, call.ty)

    def _is_free(self, variable: relax.Var) -> bool:
        """Whether nobody but the sum sees the memory of a variable."""
        if self.readers[variable] != 1:
            return False
        value = self.values.get(variable)
        if isinstance(value, relax.TupleGetItem):
            return self.fields[value.tuple_value, int(value.index)] == 1 and self._is_kernel(value.tuple_value)
        if not isinstance(value, tvm.ir.Call):
            return False
        name = operator_name(value)
        if name in VIEWS:
            return self._is_free(value.args[0])
        return variable in self.sums or (variable in self.varying and (name in _FRESH or self._is_kernel(variable)))

    def _is_kernel(self, variable: relax.Var) -> bool:
        """Whether a TIR function gives a value, in new memory or in that of a sum."""
        value = self.values.get(variable)
        if not isinstance(value, tvm.ir.Call):
            return False
        name = operator_name(value)
        if name == "relax.call_tir":
            return not is_reshape(self.module[value.args[0]])
        return name == "relax.call_tir_inplace"

    def _reduction(self, variable: relax.Var) -> tuple[list[relax.Expr], Compute] | None:
        """The operands and the meaning of the sum or product behind views that only the sum reads."""
        value = self.values.get(variable)
        if self.readers[variable] != 1 or not isinstance(value, tvm.ir.Call):
            return None
        name = operator_name(value)
        if name == "relax.sum":
            return [value.args[0]], lambda x: topi.sum(x, _axes(value.attrs.axis), bool(value.attrs.keepdims))
        if name == "relax.matmul" and all(len(constant_extents(a) or ()) == 2 for a in value.args):
            return list(value.args), lambda a, b: _product(a, b, element_type(value))
        if name not in ("relax.reshape", _TRANSPOSE):
            return None
        inner = self._reduction(value.args[0])
        if inner is None:
            return None
        operands, compute = inner
        if name == "relax.reshape":
            source, shape = self.values[value.args[0]], constant_extents(value)
            if operator_name(source) == "relax.sum" and shape is not None and shape == _kept(source):
                return operands, lambda x: topi.sum(x, _axes(source.attrs.axis))
            return operands, lambda *given: topi.reshape(compute(*given), shape)
        axes = _axes(value.attrs.axes)
        if operator_name(self.values[value.args[0]]) == "relax.matmul" and axes in (None, [1, 0]):
            return operands, lambda a, b: _product(a, b, element_type(value), transposed=True)
        return operands, lambda *given: topi.transpose(compute(*given), axes)


def _axes(given: Any) -> list[int] | None:
    return None if given is None else [int(axis) for axis in given]


def _kept(total: Any) -> tuple[int, ...] | None:
    """The extents of the axes that a sum leaves; axes are identified by number, as one may have a single element.

    None, if an extent is a symbol.
    """
    extents, axes = constant_extents(total.args[0]), _axes(total.attrs.axis)
    if extents is None:
        return None
    gone = set(range(len(extents))) if axes is None else {axis % len(extents) for axis in axes}
    return tuple(extent for axis, extent in enumerate(extents) if axis not in gone)


def _itself(value: relax.Expr) -> te.Tensor:
    return value


def _is_static(operands: list[relax.Expr]) -> bool:
    """Whether all extents are numbers."""
    return all(constant_extents(operand) is not None for operand in operands)


def _product(a: Any, b: Any, dtype: str, transposed: bool = False) -> te.Tensor:
    """A matrix product, or its transpose, summed in `dtype`."""
    k = te.reduce_axis((0, a.shape[1]), "k")

    def element(i: Any, j: Any) -> Any:
        i, j = (j, i) if transposed else (i, j)
        return te.sum(a[i, k].astype(dtype) * b[k, j].astype(dtype), axis=k)

    m, n = a.shape[0], b.shape[1]
    return te.compute((n, m) if transposed else (m, n), element)


__all__ = ["AddGradientsInPlace"]
