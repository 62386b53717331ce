# SPDX-License-Identifier: Apache-2.0
"""erf, exp and tanh as polynomials, in vectors, where LLVM would call the C library for one element after the other.

TVM's own approximations are taken (topi.fast_erf, fast_exp, fast_tanh); in float32 they are within 4e-7 of the true
value: absolutely for erf and tanh, relatively for exp, and within 8e-7 relatively for special.expm1. On a CPU that is
what makes gelu and its gradient cost as much as the memory that they read; otherwise they take a third of a ConvNeXt's
step.
"""

from __future__ import annotations

import math

import tvm
from tvm import relax, te, tirx, topi
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.ir import constant_extents
from relax_ops.rules.gelu import GELU_DERIVATIVE, fast_derivative_of
from relax_ops.rules.near_zero import EXPM1, expm1_of
from tvm_convgrad.training.ir.graph import element_type, operator_name, rewritten

SMALL = 4096  # elements; for fewer the C library is quick enough, and rounds better


def VectoriseFunctions() -> tvm.transform.Pass:
    """The pass that replaces the calls on large float32 tensors, in all functions of a module."""
    return tvm.transform.module_pass(_vectorised_functions, opt_level=0, name="ConvgradVectorisedFunctions")


def _vectorised_functions(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    return rewritten(module, _Rewriter(module))


def _erf(x: te.Tensor) -> te.Tensor:
    """As topi.fast_erf, which makes 1 of NaN; that beyond 5 the result is 1 in float32 leaves only NaN for the rest."""
    fast = topi.fast_erf(x)
    one, five = tirx.const(1.0, "float32"), tirx.const(5.0, "float32")

    def value(*place: tirx.Expr) -> tirx.Expr:
        here = x(*place)
        beyond = tirx.Select(here > five, one, tirx.Select(here < -five, -one, here))
        return tirx.Select(tirx.And(here >= -five, here <= five), fast(*place), beyond)

    return te.compute(x.shape, value, name="erf", tag="elemwise")


_HELD, _HIGH = 88.3762626647949, 88.0
"""The argument of topi.fast_exp is held between -_HELD and _HELD."""


def _exp(x: te.Tensor) -> te.Tensor:
    """As topi.fast_exp, but infinite where exp is, since from 88 on it is exp(x - 1) e, and 0 below -_HELD."""
    zero, one, e = (tirx.const(number, "float32") for number in (0.0, 1.0, math.e))
    low, high = tirx.const(-_HELD, "float32"), tirx.const(_HIGH, "float32")
    fast = topi.fast_exp(te.compute(x.shape, lambda *at: x(*at) - tirx.Select(x(*at) > high, one, zero)))

    def value(*place: tirx.Expr) -> tirx.Expr:
        here = x(*place)
        return tirx.Select(here < low, zero, fast(*place) * tirx.Select(here > high, e, one))

    return te.compute(x.shape, value, name="exp", tag="elemwise")


def _gelu(x: te.Tensor) -> te.Tensor:
    """x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2 (Hendrycks and Gimpel 2016)."""
    half = topi.multiply(x, tirx.const(0.5, "float32"))
    return topi.add(half, topi.multiply(half, topi.fast_erf(topi.multiply(x, tirx.const(math.sqrt(0.5), "float32")))))


def _gelu_derivative(x: te.Tensor) -> te.Tensor:
    """Φ(x) + x φ(x), with one exponential for both: exp(-x²/2), 0 where topi.fast_exp no longer falls."""
    zero, half = tirx.const(0.0, "float32"), tirx.const(-0.5, "float32")
    fast = topi.fast_exp(te.compute(x.shape, lambda *at: x(*at) * x(*at) * half))

    def value(*place: tirx.Expr) -> tirx.Expr:
        here = x(*place)
        far = here * here > tirx.const(2 * _HELD, "float32")
        return fast_derivative_of(here, tirx.Select(far, zero, fast(*place)))

    return te.compute(x.shape, value, name="gelu_derivative", tag="elemwise")


def _sigmoid(x: te.Tensor) -> te.Tensor:
    one = tirx.const(1.0, "float32")
    return topi.divide(one, topi.add(topi.fast_exp(topi.negative(x)), one))


def _silu(x: te.Tensor) -> te.Tensor:
    return topi.multiply(x, _sigmoid(x))


def _expm1(x: te.Tensor) -> te.Tensor:
    """A series up to 1 and down to -1, else exp(x) - 1."""
    fast = _exp(x)
    return te.compute(x.shape, lambda *place: expm1_of(x(*place), lambda _: fast(*place)), name="expm1", tag="elemwise")


FUNCTIONS = {
    "relax.erf": _erf,
    "relax.exp": _exp,
    EXPM1: _expm1,
    "relax.tanh": topi.fast_tanh,
    "relax.sigmoid": _sigmoid,
    "relax.nn.gelu": _gelu,
    GELU_DERIVATIVE: _gelu_derivative,
    "relax.nn.silu": _silu,
}
"""What each operator is computed by."""


@mutator
class _Rewriter(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """A TIR function in the place of a call of one of FUNCTIONS."""
        function = FUNCTIONS.get(operator_name(call)) if isinstance(call.op, tvm.ir.Op) else None
        if function is not None and _is_large(call):
            return self.builder_.call_te(function, self.visit_expr(call.args[0]))
        return super().visit_call_(call)


def _is_large(call: relax.Call) -> bool:
    """Whether the result is a float32 tensor of many elements, their number known."""
    extents = constant_extents(call)
    return extents is not None and element_type(call) == "float32" and math.prod(extents) > SMALL


__all__ = ["FUNCTIONS", "VectoriseFunctions"]
