# SPDX-License-Identifier: Apache-2.0
"""Layout conversion with what ConvertLayout leaves to do before and after: `converted` and `simplify_transposes`.

Before: ConvertLayout transforms back at every binding of one variable to another, and relax.transform.Gradient leaves
many of them: CanonicalizeBindings takes them away. After: ConvertLayout makes a transpose at each use (a weight is
transposed for the forward convolution and again for backward_data), transposes constants, and transposes where only axes
of extent 1 change places.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.compat import Constant
from relax_ops.ir import dtype_of
from relax_ops.layouts.site import equal, shape_of

_PERMUTE = "relax.permute_dims"


def converted(desired: Mapping[str, Sequence[str]]) -> Any:
    """The pass that converts layouts: relax.transform.ConvertLayout(desired) and the simplifications around it.

    Args:
        desired: layouts by operator name, such as {"relax.nn.conv2d": ["NHWC", "OHWI"], ...}; see relax_ops.layout
            for what they mean for the six operators.
    """
    return tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            relax.transform.ConvertLayout({name: list(layouts) for name, layouts in desired.items()}),
            simplify_transposes(),
        ],
        name="ConvertLayoutAndSimplify",
    )


def simplify_transposes() -> Any:
    """The pass that makes transposes fewer without moving any: equal ones are made once, chains become one.

    Those that change nothing vanish, those that only move axes of extent 1 become reshapes, which copy nothing; those
    of constants, zeros, ones and spread scalars are done at compile time.
    """

    @tvm.transform.module_pass(opt_level=0, name="SimplifyTransposes")
    def simplify(module: Any, _context: Any) -> Any:
        for global_var, function in module.functions_items():
            if isinstance(function, relax.Function):
                changed = _Simplifier(module).visit_expr(function)
                module.update_func(global_var, relax.analysis.remove_all_unused(changed))
        return relax.transform.CanonicalizeBindings()(module)

    return simplify


@mutator
class _Simplifier(PyExprMutator):  # type: ignore[misc]
    """Rewrites the calls of permute_dims in dataflow blocks."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.made: dict[tuple[Any, tuple[int, ...]], Any] = {}
        self.inside = False

    def visit_dataflow_block_(self, block: Any) -> Any:
        """One block: what is made in it is seen in it only."""
        self.made, self.inside = {}, True
        block = super().visit_dataflow_block_(block)
        self.inside = False
        return block

    def visit_call_(self, call: Any) -> Any:
        """One call: a variable that holds its value."""
        call = self.visit_expr_post_order(call)
        if not self.inside or not _is_permute(call):
            return call
        value, order = call.args[0], _order(call)
        while True:
            maker = self._maker(value)
            if maker is None or not _is_permute(maker):
                break
            inner = _order(maker)
            value, order = maker.args[0], tuple(inner[axis] for axis in order)
        if order == tuple(range(len(order))):
            return value
        key = (value, order)
        if key not in self.made:
            self.made[key] = self.builder_.emit(self._transposed(value, order))
        return self.made[key]

    def _maker(self, value: Any) -> Any:
        """The expression that a variable of this block is bound to, looking through other names; None if unknown."""
        bound = self.builder_.lookup_binding(value) if isinstance(value, relax.DataflowVar) else None
        return self._maker(bound) if isinstance(bound, relax.Var) else bound

    def _transposed(self, value: Any, order: Sequence[int]) -> Any:
        if isinstance(value, Constant):
            array = np.ascontiguousarray(np.transpose(value.value.numpy(), order))
            return relax.const(array, dtype_of(value.ty))
        shape = shape_of(value.ty)
        if shape is None:
            return relax.op.permute_dims(value, list(order))
        new_shape = relax.ShapeExpr([shape[axis] for axis in order])
        long_axes = [axis for axis in order if not equal(shape[axis], 1)]
        if long_axes == sorted(long_axes):
            return relax.op.reshape(value, new_shape)
        maker = self._maker(value)
        name = str(maker.op.name) if isinstance(maker, relax.Call) and isinstance(maker.op, tvm.ir.Op) else ""
        if name in ("relax.zeros", "relax.ones"):
            make = relax.op.zeros if name == "relax.zeros" else relax.op.ones
            return make(new_shape, dtype_of(value.ty))
        if name == "relax.broadcast_to" and maker.args[0].ty.ndim == 0:
            return relax.op.broadcast_to(maker.args[0], new_shape)
        return relax.op.permute_dims(value, list(order))


def _is_permute(expr: Any) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and str(expr.op.name) == _PERMUTE


def _order(call: Any) -> tuple[int, ...]:
    ndim = int(call.ty.ndim)
    if call.attrs.axes is None:
        return tuple(reversed(range(ndim)))
    return tuple(int(axis) % ndim for axis in call.attrs.axes)
