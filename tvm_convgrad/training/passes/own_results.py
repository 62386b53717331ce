# SPDX-License-Identifier: Apache-2.0
"""Results in memory of their own: a copy of what shares it with an argument, a constant or another result.

A step overwrites the tensors of its state in the next step, and its caller may overwrite the inputs and what it was
given. A buffer of a model that keeps its input, another buffer or a parameter would change with them: to TVM a
reshape, or the same value under two names, is the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from relax_ops.compat import Constant
from tvm_convgrad.training.ir.graph import bindings_of, element_type
from tvm_convgrad.training.ir.views import owners
from tvm_convgrad.training.passes.flat_gradients import GRADIENTS
from tvm_convgrad.training.passes.in_place import APPLY, STEP, copied

_GRADIENTS_PLACE = 2
"""Which result of `gradients` has a buffer of its own (`flat_gradients`)."""

_STATE_DEPTH = {STEP: 2, APPLY: 1}
"""How deep the new state's tensors lie in the results: that of `step` is the last of several, that of `apply` alone."""


def OwnResults(*others: str) -> tvm.transform.Pass:
    """The pass that copies shared results of `step`, `gradients` and `apply`, and of other functions of these names."""
    names = (STEP, GRADIENTS, APPLY, *others)

    def own(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        builder = relax.BlockBuilder(module)
        for variable, function in module.functions_items():
            name = str(variable.name_hint)
            if name in names and isinstance(function, relax.Function):
                changed = _Results(builder, module, name, function).apply()
                if changed is not None:
                    builder.update_func(variable, changed)
        return builder.get()

    return tvm.transform.module_pass(own, opt_level=0, name="ConvgradOwnResults")


class _Results:
    """The results of a function, and the bindings that copy some of them.

    Attributes:
        taken: the variables in whose memory a result lies already.
    """

    def __init__(self, builder: relax.BlockBuilder, module: tvm.IRModule, name: str, function: relax.Function) -> None:
        self.builder, self.name, self.function = builder, name, function
        self.values = {binding.var: binding.value for binding in bindings_of(function)}
        self.owner = owners(module, function)
        self.arguments = set(function.params)
        self.taken: set[relax.Var] = set()
        self.copies: list[relax.Binding] = []

    def apply(self) -> relax.Function | None:
        """The function with copies, or None where all results have memory of their own."""
        result = self._own(self.function.body.body, ())
        if not self.copies:
            return None
        # A function that returns an argument, or constants, has no bindings.
        blocks = list(self.function.body.blocks) or [relax.DataflowBlock([])]
        last = blocks[-1]
        output = relax.Var("results", result.ty)
        blocks[-1] = type(last)([*last.bindings, *self.copies, relax.VarBinding(output, result)])
        body, old = relax.SeqExpr(blocks, output), self.function
        return relax.Function(old.params, body, old.ret_ty, old.is_pure, old.attrs)

    def _own(self, result: relax.Expr, place: Sequence[int]) -> relax.Expr:
        """The result at this place, such as (2, 5) for a field of a tuple of a tuple, with copies."""
        whole = self._resolved(result)
        if isinstance(whole, relax.Tuple):
            if self.name == GRADIENTS and place == (_GRADIENTS_PLACE,):
                self.taken |= {self._owner_of(field) for field in whole.fields}
                return result
            # The last of them, the state, first: it is updated in place, and so a copy of another result is cheaper.
            order = reversed(list(enumerate(whole.fields)))
            found = {number: self._own(field, (*place, number)) for number, field in order}
            return self.builder.normalize(relax.Tuple([found[number] for number in range(len(whole.fields))]))
        if not isinstance(result.ty, relax.TensorType):
            return result
        root = self._owner_of(result)
        if self._is_own(root, result, place):
            self.taken.add(root)
            return result
        return self._copied(result)

    def _is_own(self, root: relax.Expr, result: relax.Expr, place: Sequence[int]) -> bool:
        """Whether nothing but the result at this place will be read or written in the memory of `root`."""
        if isinstance(root, Constant) or root in self.taken or root in self.arguments:
            return False
        value = self.values.get(root)
        if isinstance(value, Constant):
            return False
        if isinstance(value, relax.TupleGetItem) and value.tuple_value in self.arguments:
            # A tensor of the state that goes on in its own place.
            in_state = self.name in _STATE_DEPTH and len(place) == _STATE_DEPTH[self.name]
            return in_state and place[-1] == int(value.index) and result.same_as(root)
        return True

    def _owner_of(self, result: relax.Expr) -> relax.Expr:
        return self.owner.get(result, result)

    def _resolved(self, expr: relax.Expr) -> relax.Expr:
        while isinstance(expr, relax.Var) and isinstance(self.values.get(expr), (relax.Var, relax.Tuple)):
            expr = self.values[expr]
        return expr

    def _copied(self, result: relax.Expr) -> relax.Var:
        one = relax.const(1, element_type(result))
        call = self.builder.normalize(self.builder.call_te(copied, result, one, primfunc_name_hint="copy_result"))
        variable = relax.DataflowVar("copied", call.ty)
        self.copies.append(relax.VarBinding(variable, call))
        return variable


__all__ = ["OwnResults"]
