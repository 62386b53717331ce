# SPDX-License-Identifier: Apache-2.0
"""Matrix products with a result in 16 bits, summed in float32 and rounded once.

TVM sums in the type of the result: in float16, 5000 products of ones are 2048; in bfloat16 its passes widen the sums,
but fail on those that are kept in a vector, as of a matrix and a column.
"""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.training.ir.graph import element_type, is_call, rewritten


def WidenProducts() -> tvm.transform.Pass:
    """The pass that makes products with a result in 16 bits those in float32, and a cast, which is fused into them."""
    return tvm.transform.module_pass(_widened, opt_level=0, name="ConvgradWidenProducts")


def _widened(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    return rewritten(module, _Widener(module))


@mutator
class _Widener(PyExprMutator):
    def visit_call_(self, call: relax.Call) -> Any:
        """A product, or any other call."""
        call = super().visit_call_(call)
        if not is_call(call, "relax.matmul") or element_type(call) not in SHORT_FLOATS:
            return call
        wide = self.builder_.emit(relax.op.matmul(*call.args, out_dtype="float32"))
        return relax.op.astype(wide, element_type(call))


__all__ = ["WidenProducts"]
