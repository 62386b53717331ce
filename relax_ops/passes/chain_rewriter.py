# SPDX-License-Identifier: Apache-2.0
"""Puts one call in the place of each chain (relax_ops.passes.chains); what is called is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.passes.chains import Chain, shape_of


@mutator
class ChainRewriter(PyExprMutator):
    """Rewrites functions of a module, one after another."""

    def __init__(self, module: tvm.IRModule, call: Callable[[Any, Chain], Any]) -> None:
        """Prepare.

        Args:
            module: whose functions are rewritten.
            call: call(builder, chain) is the expression for a chain; a tuple of the gradients of weight and bias for
                one that has both.
        """
        super().__init__(module)
        self._call = call
        self._chains: dict[Any, Chain] = {}
        self._pairs: dict[Any, Any] = {}
        self._vectors: dict[Any, Any] = {}

    def rewritten(self, variable: relax.Var, function: relax.Function, chains: Sequence[Chain]) -> Any:
        """The module with one more function rewritten."""
        self._chains = {chain.result: chain for chain in chains}
        self._chains |= {chain.second: chain for chain in chains if chain.second is not None}
        self._pairs, self._vectors = {}, {}
        self.builder_.update_func(variable, self.visit_expr(function))
        return self.builder_.get()

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """A call in the place of the last operation of a chain."""
        chain = self._chains.get(binding.var)
        if chain is None:
            super().visit_var_binding_(binding)
            return
        one = chain.second is None
        value = self._call(self.builder_, chain) if one else self._one_of_pair(chain, binding.var)
        super().visit_var_binding_(relax.VarBinding(binding.var, value))

    def _one_of_pair(self, chain: Chain, variable: relax.Var) -> Any:
        """One of the gradients of weight and bias; the first time, their call, which takes a bias's as a vector."""
        if chain.result not in self._pairs:
            given = replace(chain, second_acc=self._vectors.get(chain.second_acc, chain.second_acc))
            self._pairs[chain.result] = self.builder_.emit(self.visit_expr(self._call(self.builder_, given)))
        pair = self._pairs[chain.result]
        if variable.same_as(chain.result):
            return relax.TupleGetItem(pair, 0)
        vector = relax.TupleGetItem(pair, 1)
        shape = shape_of(variable)
        if len(shape) == 1:
            return vector
        self._vectors[variable] = self.builder_.emit(vector)
        return relax.op.reshape(self._vectors[variable], relax.ShapeExpr(shape))


__all__ = ["ChainRewriter"]
