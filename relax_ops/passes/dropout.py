# SPDX-License-Identifier: Apache-2.0
"""Real dropout in the place of TVM's nn.dropout, which does nothing: `seed_dropouts`."""

from __future__ import annotations

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.dropout import DROPOUT, dropout
from tvm_convgrad import register


def seed_dropouts(
    module: tvm.IRModule, function: str = "main", *, seed: int = 0, step: str = "dropout_step"
) -> tvm.IRModule:
    """The module with every nn.dropout of one function made real.

    The function gets one more parameter, an int64 scalar named `step`, at its end: give another number at each
    training step. Dropouts are numbered in their order. A function without dropout is left as it is, without the
    parameter. Apply before differentiating.
    """
    register()
    rewriter = _Seeder(module, seed, relax.Var(step, relax.TensorType((), "int64")))
    original = module[function]
    changed = rewriter.visit_expr(original)
    if not rewriter.count:
        return module
    attributes = original.attrs
    changed = relax.Function([*changed.params, rewriter.step], changed.body, None, original.is_pure, attributes)
    rewriter.builder_.update_func(module.get_global_var(function), changed)
    return relax.transform.Normalize()(rewriter.builder_.get())


@mutator
class _Seeder(PyExprMutator):
    """Replaces the calls of nn.dropout."""

    def __init__(self, module: tvm.IRModule, seed: int, step: relax.Var) -> None:
        super().__init__(module)
        self.seed, self.step, self.count = seed, step, 0

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """One call: the pair of the masked tensor and the mask, or the call as it is."""
        call = self.visit_expr_post_order(call)
        if call.op != tvm.ir.Op.get(DROPOUT):
            return call
        stream, self.count = self.count, self.count + 1
        kept, mask = dropout(
            self.builder_, call.args[0], self.step, rate=float(call.attrs.rate), seed=self.seed, stream=stream
        )
        return relax.Tuple([kept, mask])
