# SPDX-License-Identifier: Apache-2.0
"""Convolutions with what follows them as one kernel: a pass to run before LegalizeOps, with a target in scope.

    conv(x, w) [+ acc] [+ bias] [-> relu]          forward and transposed convolutions
    acc + dgrad(dy, w),  acc + wgrad(dy, x)        in the place of acc
    wgrad(dy, x) and the sum of dy over pixels     the gradients of weight and bias

An intermediate that anything else reads is left alone. A sum goes to the place of `acc` only if nobody can read that
place afterwards: `acc` is made in this function by an operation that gives a new tensor, of values that depend on a
parameter (constants are folded and shared), and its other readers are convolutions before the kernel, kernels too.
Passes after this one move elementwise readers, and do not know that the kernel writes.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.chains import Chain, Convolution, Finder, shape_of
from relax_ops.lowering import Lowered, add_kernel, decide, record_lowered, result_type
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.target import Machine
from tvm_convgrad.problem import ConvProblem


class _Kernels:
    """The taker of what the plan has a generated kernel for."""

    in_place = True

    def take(self, op: str, face: str, problem: ConvProblem) -> tuple[plan.Choice, Machine] | None:
        """The kernel's choice and machine."""
        choice, machine = decide(op, face, problem)
        return (choice, machine) if choice.is_kernel and machine is not None else None

    def refusal(self, convolution: Convolution, epilogue: Epilogue) -> str:
        """As the plan says."""
        return plan.epilogue_refusal(convolution.how[0], epilogue)


@tvm.transform.module_pass(opt_level=0, name="ConvgradFuseEpilogues")
def fuse_epilogues(module: Any, _context: Any) -> Any:
    """Fuse bias, relu, sums and bias gradients into the convolutions that the plan has kernels for."""
    module = relax.transform.CanonicalizeBindings()(module)  # Gradient binds one tensor to several names
    rewriter = _Rewriter(module)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function) and isinstance(function.body, relax.SeqExpr):
            chains = [chain for chain in Finder(function, _Kernels()).chains() if chain.epilogue != NO_EPILOGUE]
            for chain in chains:
                _record(variable.name_hint, chain)
            if chains:
                module = rewriter.rewritten(variable, function, chains)
    return relax.transform.DeadCodeElimination()(module)


def _record(function: str, chain: Chain) -> None:
    c, (choice, machine) = chain.convolution, chain.convolution.how
    fused = tuple(name for name, value in vars(chain.epilogue).items() if value)
    record_lowered(Lowered(c.op, c.face, c.problem, choice, machine, choice.kind, fused, (function, c.number)))


@mutator
class _Rewriter(PyExprMutator):
    """Puts the kernels' calls into functions."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._chains: dict[Any, Chain] = {}
        self._pairs: dict[Any, Any] = {}

    def rewritten(self, variable: Any, function: Any, chains: list[Chain]) -> Any:
        """The module with one more function rewritten."""
        self._chains = {chain.result: chain for chain in chains}
        self._chains |= {chain.second: chain for chain in chains if chain.second is not None}
        self._pairs = {}
        self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def visit_var_binding_(self, binding: Any) -> None:
        """A kernel's call in the place of the last operation of a chain."""
        chain = self._chains.get(binding.var)
        if chain is None:
            super().visit_var_binding_(binding)
            return
        value = self._pair(chain, binding.var) if chain.second is not None else self._call(chain)
        super().visit_var_binding_(relax.VarBinding(binding.var, value))

    def _kernel(self, chain: Chain) -> tuple[Any, list[Any]]:
        c, (choice, machine) = chain.convolution, chain.convolution.how
        kernel = add_kernel(self.builder_, c.face, c.problem, choice, machine, chain.epilogue)
        extra = [tensor for tensor in (chain.bias, chain.acc) if tensor is not None]
        return kernel, [*c.operands, *extra]

    def _call(self, chain: Chain) -> Any:
        kernel, arguments = self._kernel(chain)
        result = result_type(chain.convolution.face, chain.convolution.problem, arguments)
        if chain.acc is None:
            return relax.op.call_tir(kernel, arguments, result)
        return relax.op.call_tir_inplace(kernel, arguments, [len(arguments) - 1], result)

    def _pair(self, chain: Chain, variable: Any) -> Any:
        """One of the two results of a wgrad with bias gradient; the first time, its call."""
        if chain.result not in self._pairs:
            kernel, arguments = self._kernel(chain)
            weight = result_type(chain.convolution.face, chain.convolution.problem, arguments)
            bias = relax.TensorType([chain.convolution.problem.out_channels], chain.convolution.problem.kernel_dtype)
            call = relax.op.call_tir(kernel, arguments, [weight, bias])
            self._pairs[chain.result] = self.builder_.emit(self.visit_expr(call))
        pair = self._pairs[chain.result]
        if variable.same_as(chain.result):
            return relax.TupleGetItem(pair, 0)
        vector = relax.TupleGetItem(pair, 1)
        shape = shape_of(variable)
        return vector if len(shape) == 1 else relax.op.reshape(self.builder_.emit(vector), relax.ShapeExpr(shape))


__all__ = ["fuse_epilogues"]
