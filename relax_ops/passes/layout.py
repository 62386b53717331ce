# SPDX-License-Identifier: Apache-2.0
"""Layout conversion with what ConvertLayout leaves to do before and after: `ConvertLayout` and `SimplifyTransposes`.

Before: ConvertLayout transforms back at every binding of one variable to another, and relax.transform.Gradient leaves
many of them: CanonicalizeBindings takes them away. After: ConvertLayout makes a transpose at each use (a weight is
transposed for the forward convolution and again for backward_data), transposes constants, and transposes where only
axes of extent 1 change places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.relax.expr_functor import PyExprMutator, mutator

from relax_ops.active import rules
from relax_ops.compat import Constant, array_of
from relax_ops.expressions import axis_order, known_shape, same_extent
from relax_ops.ir import dtype_of

_PERMUTE = "relax.permute_dims"


def ConvertLayout(desired: Mapping[str, Sequence[str]]) -> tvm.transform.Pass:
    """A pass that converts layouts: relax.transform.ConvertLayout(desired), with simplifications before and after it.

    Args:
        desired: layouts by operator name, such as {"relax.nn.conv2d": ["NHWC", "OHWI"], ...}; see
            relax_ops.rules.convolution_backward for what they mean for the six operators.

    Returns:
        The pass. Parameters and results of functions keep their layouts; transposes are inserted where they differ.

    Raises:
        UnsupportedError: when the pass runs, if layouts of one of the six operators are too few, too many or packed.
        ProblemError: when the pass runs, if a layout is not a permutation of the tensor's axes.

    Example:
        >>> from tvm import relax
        >>> from relax_ops.passes.layout import ConvertLayout
        >>> x, w = (relax.Var(name, relax.TensorType((4, 4, 3, 3), "float32")) for name in "xw")
        >>> builder = relax.BlockBuilder()
        >>> with builder.function("main", [x, w]):
        ...     with builder.dataflow():
        ...         y = builder.emit_output(builder.emit(relax.op.nn.conv2d(x, w)))
        ...     _ = builder.emit_func_output(y)
        >>> converted = ConvertLayout({"relax.nn.conv2d": ["NHWC", "OHWI"]})(builder.get())
        >>> 'data_layout="NHWC"' in converted.script()
        True
    """
    passes = tvm.transform.Sequential(
        [
            relax.transform.CanonicalizeBindings(),
            _each_function(_unpack_parameters, "UnpackParameters"),
            relax.transform.ConvertLayout({name: list(layouts) for name, layouts in desired.items()}),
            _each_function(_join_blocks, "JoinBlocks"),
            SimplifyTransposes(),
        ]
    )

    @rules()
    def convert(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        return passes(module)

    return tvm.transform.module_pass(convert, opt_level=0, name="ConvertLayoutAndSimplify")


def SimplifyTransposes() -> tvm.transform.Pass:
    """The pass that makes transposes fewer without moving any: equal ones are made once, chains become one.

    Those that change nothing vanish, those that only move axes of extent 1 become reshapes, which copy nothing; those
    of constants, zeros, ones and spread scalars are done at compile time.
    """

    return tvm.transform.Sequential(
        [
            _each_function(lambda function: _Simplifier().visit_expr(function), "SimplifyTransposes"),
            relax.transform.CanonicalizeBindings(),
        ],
        name="SimplifyTransposes",
    )


def _each_function(change: Callable[[relax.Function], relax.Function], name: str) -> tvm.transform.Pass:
    """The pass that applies `change` to every Relax function and drops what is then unused in it."""

    @tvm.transform.module_pass(opt_level=0, name=name)
    def apply(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        for global_var, function in module.functions_items():
            if isinstance(function, relax.Function):
                module.update_func(global_var, relax.analysis.remove_all_unused(change(function)))
        return module

    return apply


def _unpack_parameters(function: relax.Function) -> relax.Function:
    """Take the fields of parameters that are tuples in a block of their own, which ConvertLayout does not enter.

    It makes layouts for all fields at each of them: half a minute for a tuple of some hundred tensors.
    """
    parameters = set(function.params)
    first, *others = function.body.blocks or [None]
    if not isinstance(first, relax.DataflowBlock):
        return function
    fields = [
        b for b in first.bindings if isinstance(b.value, relax.TupleGetItem) and b.value.tuple_value in parameters
    ]
    if not fields:
        return function
    renamed = {b.var: relax.Var(b.var.name, b.var.ty) for b in fields if isinstance(b.var, relax.DataflowVar)}
    taken = relax.BindingBlock([relax.VarBinding(renamed.get(b.var, b.var), b.value) for b in fields])
    moved = {b.var for b in fields}
    rest = relax.DataflowBlock([b for b in first.bindings if b.var not in moved])
    body = relax.SeqExpr([rest, *others], function.body.body)
    body = _Renamer(renamed).visit_expr(body)
    return _with_blocks(function, [taken, *body.blocks], body.body)


def _join_blocks(function: relax.Function) -> relax.Function:
    """Undo `_unpack_parameters`: its bindings become part of the dataflow block that follows."""
    blocks = list(function.body.blocks)
    if len(blocks) < 2 or isinstance(blocks[0], relax.DataflowBlock) or not isinstance(blocks[1], relax.DataflowBlock):
        return function
    if not all(isinstance(b.value, relax.TupleGetItem) for b in blocks[0].bindings):
        return function
    joined = relax.DataflowBlock([*blocks[0].bindings, *blocks[1].bindings])
    return _with_blocks(function, [joined, *blocks[2:]], function.body.body)


def _with_blocks(function: relax.Function, blocks: Sequence[relax.BindingBlock], result: relax.Expr) -> relax.Function:
    return relax.Function(
        function.params, relax.SeqExpr(list(blocks), result), function.ret_ty, function.is_pure, function.attrs
    )


@mutator
class _Renamer(PyExprMutator):
    """Puts variables in the place of others that are bound elsewhere."""

    def __init__(self, renamed: Mapping[relax.Var, relax.Var]) -> None:
        super().__init__()
        self.renamed = renamed

    def visit_dataflow_var_(self, var: relax.Var) -> Any:
        """One use of a variable."""
        return self.renamed[var] if var in self.renamed else super().visit_dataflow_var_(var)


@mutator
class _Simplifier(PyExprMutator):
    """Rewrites the calls of permute_dims in dataflow blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[tuple[Any, tuple[int, ...]], Any] = {}
        self.inside = False

    def visit_dataflow_block_(self, block: relax.DataflowBlock) -> Any:
        """One block: what is made in it is seen in it only."""
        self.made, self.inside = {}, True
        block = super().visit_dataflow_block_(block)
        self.inside = False
        return block

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """One call: a variable that holds its value."""
        call = self.visit_expr_post_order(call)
        if not self.inside or not _is_permute(call):
            return call
        value, order = call.args[0], tuple(axis_order(call))
        while True:
            maker = self._maker(value)
            if maker is None or not _is_permute(maker):
                break
            inner = axis_order(maker)
            value, order = maker.args[0], tuple(inner[axis] for axis in order)
        if order == tuple(range(len(order))):
            return value
        key = (value, order)
        if key not in self.made:
            self.made[key] = self.builder_.emit(self._transposed(value, order))
        return self.made[key]

    def _maker(self, value: relax.Expr) -> relax.Expr:
        """The expression that a variable of this block is bound to, looking through other names; None if unknown."""
        bound = self.builder_.lookup_binding(value) if isinstance(value, relax.DataflowVar) else None
        return self._maker(bound) if isinstance(bound, relax.Var) else bound

    def _transposed(self, value: relax.Expr, order: Sequence[int]) -> relax.Expr:
        if isinstance(value, Constant):
            array = np.ascontiguousarray(np.transpose(array_of(value), order))
            return relax.const(array, dtype_of(value.ty))
        shape = known_shape(value.ty)
        if shape is None:
            return relax.op.permute_dims(value, list(order))
        new_shape = relax.ShapeExpr([shape[axis] for axis in order])
        long_axes = [axis for axis in order if not same_extent(shape[axis], 1)]
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


def _is_permute(expr: relax.Expr) -> bool:
    return isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op) and str(expr.op.name) == _PERMUTE
