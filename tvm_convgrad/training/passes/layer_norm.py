# SPDX-License-Identifier: Apache-2.0
"""Layer norms over the last axis, and their gradients, row by row.

TVM lowers layer_norm to sums of pairs that nothing vectorises, and its gradient, which `relax_ops.rules.norms`
writes out, to eight passes over the data. Here the former is one function, and the latter two: each row is read from
memory once for dx, and once for the gradients of gamma and beta. The forward pass keeps each row's mean m and inverse
deviation r = 1/sqrt(v + eps). With n = (x - m) r and e = dy gamma:
dx = r (e - mean(e) - n mean(e n)), dgamma = sum(dy n), dbeta = sum(dy).

Of steps that keep tensors in 16 bits the functions read x and dy as they are kept, and store y and dx so.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.compat import Constant, array_of
from relax_ops.ir import constant_extents
from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.training.ir.graph import bindings_of, element_type, is_call

SMALL = 4096  # elements; for fewer the time of a call counts
OPAQUE = {"op_pattern": 8}  # TVM's kOpaque: nothing is fused into functions of several results


def FuseLayerNorms() -> tvm.transform.Pass:
    """The pass that makes layer norms that are written out, and their gradients, calls of TIR functions.

    They are computed in float32 or float64, with constant extents.
    """
    return tvm.transform.module_pass(_layer_norms, opt_level=0, name="ConvgradLayerNorms")


def _layer_norms(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    module = relax.transform.CanonicalizeBindings()(module)  # gradients bind one tensor to several names
    rewriter = _Rewriter(module)
    for variable in module.get_global_vars():
        function = module[variable]
        if isinstance(function, relax.Function):
            rewriter.look_at(function)
            if rewriter.norms:
                rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return relax.transform.DeadCodeElimination()(rewriter.builder_.get())


@dataclass(frozen=True)
class _Gradient:
    """The variables of the partials of one layer norm, and what they are made of; sums keep their axes."""

    norm: Any
    grad: Any
    data: Any
    gamma: Any = None
    beta: Any = None


@mutator
class _Rewriter(PyExprMutator):
    def look_at(self, function: relax.Function) -> None:
        """Find the layer norms and their gradients."""
        self.values = {binding.var: binding.value for binding in bindings_of(function)}
        self.place = {variable: number for number, variable in enumerate(self.values)}
        self.norms = {variable: value for variable, value in self.values.items() if _is_norm(value)}
        self.statistics: dict[Any, tuple[Any, Any]] = {}
        self.sums: dict[Any, Any] = {}
        self.rows: dict[Any, list[Any]] = {}
        self.partials: dict[Any, _Gradient] = {}
        own = {value.args[0]: (variable, value) for variable, value in self.norms.items()}
        for variable in self.values:
            found = self._gradient(variable, own)
            if found is not None:
                self.partials.update(
                    {part: found for part in (found.data, found.gamma, found.beta) if part is not None}
                )
        self._look_at_casts(function)

    def _look_at_casts(self, function: relax.Function) -> None:
        """Find the casts to 16 bits of norms and their dx that nothing else reads: the functions do them."""
        readers: Counter[Any] = Counter(relax.analysis.free_vars(function.body.body))
        for value in self.values.values():
            readers.update(relax.analysis.free_vars(value))
        results = {*self.norms, *(found.data for found in self.partials.values())}
        self.casts = {
            variable: value.args[0]
            for variable, value in self.values.items()
            if is_call(value, "relax.astype") and element_type(variable) in SHORT_FLOATS
            if value.args[0] in results and readers[value.args[0]] == 1
        }
        self.cast = set(self.casts.values())

    def _of(self, expr: relax.Expr, name: str) -> list[Any]:
        """The operands of a call of the operator that a variable is bound to; none if it is another one."""
        value: Any = self.values.get(expr) if isinstance(expr, relax.Var) else None
        return list(value.args) if is_call(value, name) else []

    def _gradient(self, variable: relax.Var, norms: dict[Any, tuple[Any, Any]]) -> _Gradient | None:
        """The gradient of a norm whose partial of x, (e - mean(e) - n mean(e n)) r, this is."""
        difference, r = self._of(variable, "relax.multiply") or (None, None)
        centred, projected = self._of(difference, "relax.subtract") or (None, None)
        e, mean_e = self._of(centred, "relax.subtract") or (None, None)
        n, mean_en = self._of(projected, "relax.multiply") or (None, None)
        deviation, same_r = self._of(n, "relax.multiply") or (None, None)
        x, mean_x = self._of(deviation, "relax.subtract") or (None, None)
        grad, gamma = self._of(e, "relax.multiply") or (None, None)
        if x not in norms or not _same(r, same_r):
            return None
        norm, call = norms[x]
        product = self._of(self._mean_of(mean_en), "relax.multiply") or (None, None)
        if not (_same(self._mean_of(mean_e), e) and _same(self._mean_of(mean_x), x)):
            return None
        if not (_same(product[0], e) and _same(product[1], n)):
            return None
        if not self._is_inverse(r, deviation, float(call.attrs.epsilon)) or not self._is_gamma(gamma, call.args[1]):
            return None
        return self._with_sums(_Gradient(norm, grad, variable), n)

    def _mean_of(self, expr: relax.Expr) -> Any:
        """What a variable is the mean of over the last axis, which stays, or None."""
        operands = self._of(expr, "relax.mean")
        if not operands:
            return None
        attrs, rank = self.values[expr].attrs, len(constant_extents(operands[0]) or ())
        axes = None if attrs.axis is None else [int(axis) % rank for axis in attrs.axis]
        return operands[0] if axes == [rank - 1] and attrs.keepdims else None

    def _is_inverse(self, r: Any, deviation: Any, epsilon: float) -> bool:
        """Whether r = 1 / sqrt(mean(deviation^2) + epsilon)."""
        one, root = self._of(r, "relax.divide") or (None, None)
        (shifted,) = self._of(root, "relax.sqrt") or (None,)
        variance, own = self._of(shifted, "relax.add") or (None, None)
        squares = self._of(self._mean_of(variance), "relax.multiply")
        if not squares or not all(_same(square, deviation) for square in squares):
            return False
        return _is_number(one, 1.0) and _is_number(own, epsilon)

    def _is_gamma(self, expr: relax.Expr, gamma: relax.Expr) -> bool:
        """Whether this is gamma, or gamma in a shape that broadcasts along the last axis."""
        operands = self._of(expr, "relax.reshape")
        extents = constant_extents(expr) if operands else None
        return _same(expr, gamma) or (
            extents is not None and _same(operands[0], gamma) and extents[-1] == math.prod(extents)
        )

    def _with_sums(self, found: _Gradient, n: Any) -> _Gradient:
        """With the variables of sum(dy n) and sum(dy) over all axes but the last, if there are both."""
        gamma = beta = None
        rank = len(constant_extents(found.grad) or ())
        for variable, value in self.values.items():
            if not is_call(value, "relax.sum") or value.attrs.axis is None or rank < 2:
                continue
            if [int(axis) % rank for axis in value.attrs.axis] != list(range(rank - 1)):
                continue
            if _same(value.args[0], found.grad):
                beta = variable
            factors = self._of(value.args[0], "relax.multiply")
            if len(factors) == 2 and _same(factors[0], found.grad) and _same(factors[1], n):
                gamma = variable
        both = gamma is not None and beta is not None and gamma not in self.partials and beta not in self.partials
        return _Gradient(found.norm, found.grad, found.data, gamma, beta) if both else found

    def visit_var_binding_(self, binding: relax.Binding) -> None:
        """The functions in the places of norms, and of their gradients."""
        variable = binding.var
        computed = self.casts.get(variable, variable)
        norm, gradient = self.norms.get(computed), self.partials.get(computed)
        if variable in self.cast:
            return
        if norm is not None:
            binding = relax.VarBinding(variable, self._forward(computed, norm, element_type(variable)))
        elif gradient is not None:
            binding = relax.VarBinding(variable, self._backward(gradient, computed, element_type(variable)))
        super().visit_var_binding_(binding)

    def _rows(self, expr: relax.Expr, columns: int) -> Any:
        """A tensor as rows, in 16 bits if it is kept so."""
        size = math.prod(constant_extents(expr) or ())
        value: Any = self.values.get(expr) if isinstance(expr, relax.Var) else None
        if is_call(value, "relax.astype") and element_type(value.args[0]) in SHORT_FLOATS:
            expr = value.args[0]
        return self.builder_.emit(relax.op.reshape(self.visit_expr(expr), [size // columns, columns]))

    def _forward(self, variable: relax.Var, call: relax.Call, dtype: str) -> Any:
        x, gamma, beta = call.args
        extents = constant_extents(x)
        assert extents is not None  # only norms with known extents are matched
        columns, epsilon = extents[-1], float(call.attrs.epsilon)
        operands = [self._rows(x, columns), self.visit_expr(gamma), self.visit_expr(beta)]
        made = self.builder_.emit(
            self.builder_.call_te(
                _normalised,
                *operands,
                epsilon,
                dtype,
                primfunc_name_hint="norm_rows",
                primfunc_attrs=OPAQUE,
            )
        )
        y, mean, inverse = (self.builder_.emit(relax.TupleGetItem(made, i)) for i in range(3))
        self.statistics[variable] = mean, inverse
        return relax.op.reshape(y, list(extents))

    def _backward(self, gradient: _Gradient, variable: relax.Var, dtype: str) -> Any:
        call = self.norms[gradient.norm]
        extents = constant_extents(call.args[0])
        assert extents is not None  # only norms with known extents are matched
        if gradient.data not in self.rows:
            # The same views for all partials: with views of its own, which free nothing, the sum would be put off.
            both = call.args[0], gradient.grad
            self.rows[gradient.data] = [self._rows(each, extents[-1]) for each in both]
        rows = self.rows[gradient.data]
        statistics = self.statistics[gradient.norm]
        if variable.same_as(gradient.data):
            made = self.builder_.call_te(
                _data_gradient,
                *rows,
                *statistics,
                self.visit_expr(call.args[1]),
                dtype,
                primfunc_name_hint="norm_rows_gradient",
                primfunc_attrs=OPAQUE,
            )
            return relax.op.reshape(self.builder_.emit(made), list(extents))
        if gradient.data not in self.sums:
            hint = "norm_sums"
            made = self.builder_.call_te(_sums, *rows, *statistics, primfunc_name_hint=hint, primfunc_attrs=OPAQUE)
            self.sums[gradient.data] = self.builder_.emit(made)
        item = relax.TupleGetItem(self.sums[gradient.data], int(variable.same_as(gradient.beta)))
        return relax.op.reshape(self.builder_.emit(item), list(constant_extents(variable) or ()))


# ------------------------------------------------------------------------------------------------------- functions


class _Wide:
    """The elements of a tensor in float32, if it has 16 bits."""

    def __init__(self, tensor: Any) -> None:
        self.shape, self._tensor = tensor.shape, tensor
        self._is_narrow = str(tensor.dtype) in SHORT_FLOATS
        self.dtype = "float32" if self._is_narrow else str(tensor.dtype)

    def __getitem__(self, place: Any) -> Any:
        value = self._tensor(*place)
        return value.astype(self.dtype) if self._is_narrow else value


def _as(value: Any, dtype: str) -> Any:
    return value if str(value.ty.dtype) == dtype else value.astype(dtype)


def _normalised(x16: Any, gamma: relax.Expr, beta: Any, epsilon: float, result: str) -> list[Any]:
    """(y, mean, inverse deviation) of rows; by sqrt and divide, as rsqrt may be an approximation."""
    x = _Wide(x16)
    (rows, columns), dtype = x.shape, x.dtype
    share, one, shift = (tirx.const(value, dtype) for value in (1 / int(columns), 1.0, epsilon))
    total = _summed(rows, columns, lambda m, c: x[m, c], "total")
    mean = te.compute((rows,), lambda m: total[m] * share, name="mean")
    squares = _summed(rows, columns, lambda m, c: (x[m, c] - mean[m]) * (x[m, c] - mean[m]), "squares")
    inverse = te.compute((rows,), lambda m: one / tirx.sqrt(squares[m] * share + shift), name="inverse")
    y = te.compute(
        (rows, columns),
        lambda m, c: _as((x[m, c] - mean[m]) * inverse[m] * gamma[c] + beta[c], result),
        name="normalised",
    )
    return [y, mean, inverse]


def _data_gradient(x16: Any, grad16: Any, mean: relax.Expr, inverse: relax.Expr, gamma: relax.Expr, result: str) -> Any:
    """dx of rows."""
    x, grad = _Wide(x16), _Wide(grad16)
    (rows, columns), share = x.shape, tirx.const(1 / int(x.shape[1]), x.dtype)

    def n(m: Any, c: Any) -> Any:
        return (x[m, c] - mean[m]) * inverse[m]

    total = _summed(rows, columns, lambda m, c: grad[m, c] * gamma[c], "total")
    projection = _summed(rows, columns, lambda m, c: grad[m, c] * gamma[c] * n(m, c), "projection")

    def dx(m: Any, c: Any) -> Any:
        value = (grad[m, c] * gamma[c] - total[m] * share - n(m, c) * (projection[m] * share)) * inverse[m]
        return _as(value, result)

    return te.compute((rows, columns), dx, name="data_gradient")


def _sums(x16: Any, grad16: Any, mean: relax.Expr, inverse: relax.Expr) -> list[Any]:
    """(dgamma, dbeta)."""
    x, grad = _Wide(x16), _Wide(grad16)
    rows, columns = x.shape
    m, k = te.reduce_axis((0, rows), "m"), te.reduce_axis((0, rows), "k")
    return [
        te.compute(
            (columns,), lambda c: te.sum(grad[m, c] * ((x[m, c] - mean[m]) * inverse[m]), axis=m), name="gamma_gradient"
        ),
        te.compute((columns,), lambda c: te.sum(grad[k, c], axis=k), name="beta_gradient"),
    ]


def _summed(rows: Any, columns: Any, value: relax.Expr, name: str) -> Any:
    c = te.reduce_axis((0, columns), "c")
    return te.compute((rows,), lambda m: te.sum(value(m, c), axis=c), name=name)


# --------------------------------------------------------------------------------------------------------- matching


def _is_norm(value: relax.Expr) -> bool:
    """Whether the value is a large layer norm over the last axis whose extents are known."""
    if not is_call(value, "relax.nn.layer_norm"):
        return False
    extents, dtype = constant_extents(value.args[0]), element_type(value.args[0])
    if extents is None or dtype not in ("float32", "float64") or math.prod(extents) <= SMALL:
        return False
    return _axes(value.attrs.axes, len(extents)) == [len(extents) - 1]


def _axes(axes: Sequence[Any], rank: int) -> list[int]:
    return [int(axis) % rank for axis in axes]


def _same(a: Any, b: Any) -> bool:
    return a is not None and b is not None and bool(a.same_as(b))


def _is_number(expr: relax.Expr, value: float) -> bool:
    """Whether the expression is this number, as its type rounds it."""
    number = array_of(expr) if isinstance(expr, Constant) else None
    return number is not None and number.size == 1 and bool(number == number.dtype.type(value))


__all__ = ["FuseLayerNorms"]
