# SPDX-License-Identifier: Apache-2.0
"""A pass that removes from gradients what relay.transform.FirstOrderGradient leaves there and what computes nothing.

That pass adds each partial to zeros_like, multiplies by ones_like, and sums with collapse_sum_like also where no axis
was broadcast. ConvertLayout stops at collapse_sum_like, and the operand of each such operator stays in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relay

Rule = Callable[[relay.Call, Sequence[relay.Expr]], "relay.Expr | None"]


def simplify_gradients() -> tvm.transform.Pass:
    """A pass: x + 0 and x * 1 become x, collapse_sum_like becomes x or relay.sum, reshape_like becomes reshape.

    x + x becomes x * 2. TVM's SimplifyExpr does that, too, but copies the whole graph behind x each time: the gradient
    of a square in each of 20 batch norms makes 2^20 copies of it.

    collapse_sum_to, broadcast_to_like, broadcast_to and cast_like are treated alike, and a field of a tuple that is
    there is taken. Calls with unknown or empty extents stay.
    """

    @relay.transform.function_pass(opt_level=0, name="tvm_convgrad.SimplifyGradients")
    def simplify(function: relay.Function, module: tvm.IRModule, context: tvm.transform.PassContext) -> relay.Function:
        return rewrite_calls(function, RULES)

    return tvm.transform.Sequential([relay.transform.InferType(), simplify, relay.transform.InferType()])


def rewrite_calls(function: relay.Function, rules: dict[str, Rule]) -> relay.Function:
    """The function with calls replaced by what the rule of their operator returns, and fields of known tuples taken.

    Args:
        function: with inferred types.
        rules: by operator; a rule gets a call whose types are static and not empty, and its rewritten operands; if it
            returns None the call stays.
    """
    mutator = _Calls(rules)
    # Operands first: else the recursion is as deep as the graph.
    relay.analysis.post_order_visit(function.body, mutator.visit)
    return mutator.visit(function)


class _Calls(relay.ExprMutator):
    def __init__(self, rules: dict[str, Rule]) -> None:
        super().__init__()
        self._rules = rules

    def visit_call(self, call: relay.Call) -> relay.Expr:
        rule = self._rules.get(str(call.op.name)) if isinstance(call.op, tvm.ir.Op) else None
        if rule is not None and all(_is_static(each) for each in (call, *call.args)):
            found = rule(call, [self.visit(argument) for argument in call.args])
            if found is not None:
                return found
        return super().visit_call(call)

    def visit_function(self, fn: relay.Function) -> relay.Function:
        # What is fused or matched already stays as it was matched.
        whole = fn.attrs is not None and any(name in fn.attrs for name in ("Primitive", "Composite", "Compiler"))
        return fn if whole else super().visit_function(fn)

    def visit_tuple_getitem(self, item: relay.TupleGetItem) -> relay.Expr:
        value = self.visit(item.tuple_value)
        return value.fields[item.index] if isinstance(value, relay.Tuple) else super().visit_tuple_getitem(item)


def shape_of(value: relay.Expr) -> tuple[int, ...]:
    """The extents of a tensor of static type."""
    return tuple(int(extent) for extent in value.checked_type.shape)


def _is_static(value: relay.Expr) -> bool:
    """Whether it is a tensor of known extents, none empty: 0 has a meaning of its own in relay.reshape."""
    ty = value.checked_type
    return isinstance(ty, relay.TensorType) and all(isinstance(e, tvm.tir.IntImm) and int(e) > 0 for e in ty.shape)


def _is_filled(value: relay.Expr, number: int) -> bool:
    """Whether all elements are `number`, as the operator or the scalar shows."""
    names = ("zeros_like", "zeros") if number == 0 else ("ones_like", "ones")
    if isinstance(value, relay.Call) and isinstance(value.op, tvm.ir.Op):
        return str(value.op.name) in names
    return isinstance(value, relay.Constant) and not value.data.shape and value.data.numpy() == number


def _neutral(number: int) -> Rule:
    """x where the other operand of a commutative operator is `number`."""

    def rule(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
        for this, other in ((0, 1), (1, 0)):
            if _is_filled(operands[other], number) and call.args[this].checked_type == call.checked_type:
                return operands[this]
        return None

    return rule


def _add(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
    """What stays of a sum with zeros, or twice the operand of a sum with itself."""
    found = _neutral(0)(call, operands)
    if found is None and _computes_the_same(*operands):
        found = relay.multiply(operands[0], relay.const(2, call.checked_type.dtype))
    return found


def _computes_the_same(first: relay.Expr, second: relay.Expr) -> bool:
    """Whether both are one expression, or the same operator of the same operands."""
    if not (isinstance(first, relay.Call) and isinstance(second, relay.Call)):
        return bool(first.same_as(second))
    alike = len(first.args) == len(second.args) and all(map(relay.Expr.same_as, first.args, second.args))
    return bool(first.op.same_as(second.op)) and alike and tvm.ir.structural_equal(first.attrs, second.attrs)


def _collapse(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
    """The operand, or its sum over the axes that broadcasting added or stretched."""
    if call.args[0].checked_type.dtype != call.checked_type.dtype:
        return None
    given, wanted = shape_of(call.args[0]), shape_of(call)
    added = len(given) - len(wanted)
    stretched = [i + added for i, extent in enumerate(wanted) if extent == 1 and given[i + added] != 1]
    axes = [*range(added), *stretched]
    total = relay.sum(operands[0], axis=axes) if axes else operands[0]
    return relay.reshape(total, wanted) if stretched else total


def _same_type(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
    return operands[0] if call.args[0].checked_type == call.checked_type else None


def _reshape(call: relay.Call, operands: Sequence[relay.Expr]) -> relay.Expr | None:
    same = _same_type(call, operands)
    return relay.reshape(operands[0], shape_of(call)) if same is None else same


RULES: dict[str, Rule] = {
    "add": _add,
    "multiply": _neutral(1),
    "collapse_sum_like": _collapse,
    "collapse_sum_to": _collapse,
    "broadcast_to_like": _same_type,
    "broadcast_to": _same_type,
    "cast_like": _same_type,
    "reshape_like": _reshape,
}
"""What each operator is replaced by."""
