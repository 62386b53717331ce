# SPDX-License-Identifier: Apache-2.0
"""The optimizer's update in the memory of the state: a step takes its state and gives the same tensors back.

TVM has DataflowUseInplaceCalls, but that leaves parameters of functions alone, since in general a caller may still
want them. The step consumes its state: whoever calls `step` goes on with the state that it returns. `init`
therefore returns copies of the constants that it has, if it has any.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import tvm
import tvm_ffi
from tvm import relax, te, topi

from relax_ops.compat import Constant
from tvm_convgrad.training.ir.graph import bindings_of, element_type, operator_name, static_shape
from tvm_convgrad.training.ir.views import owners
from tvm_convgrad.training.schedule.cpu import scheduled_in_place, sharing_memory

STEP, APPLY, INIT = "step", "apply", "init"


def UpdateStateInPlace() -> tvm.transform.Pass:
    """The pass that lets calls of `step` and `apply` overwrite the old state with the new one; `init` copies."""
    return tvm.transform.module_pass(_state_in_place, opt_level=0, name="ConvgradStateInPlace")


def _state_in_place(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
    names = {str(variable.name_hint): variable for variable in module.get_global_vars()}
    if STEP not in names or INIT not in names:
        return module
    builder = relax.BlockBuilder(module)
    found = {name: _Update(builder, module, module[names[name]]).apply() for name in (STEP, APPLY) if name in names}
    changed = {name: function for name, function in found.items() if function is not None}
    if not changed:
        return module
    for name, function in changed.items():
        builder.update_func(names[name], function)
    constants = _state_of(module[names[INIT]])
    if constants is not None:
        builder.update_func(names[INIT], _with_copies(builder, module[names[INIT]], constants))
    return builder.get()


class StateFlow:
    """Which variables of `step` or `apply` are tensors of the state that it takes, and of the state that it gives.

    Attributes:
        old, new: the number in the state, by variable.
    """

    def __init__(self, function: relax.Function) -> None:
        self._values = {binding.var: binding.value for binding in bindings_of(function)}
        self.old: dict[relax.Var, int] = {}
        self.new: dict[relax.Var, int] = {}
        if not function.params:
            return
        state = function.params[-1]
        self.old = {
            var: int(value.index)
            for var, value in self._values.items()
            if isinstance(value, relax.TupleGetItem) and value.tuple_value.same_as(state)
        }
        result = self._resolved(function.body.body)
        is_state = tvm_ffi.structural_equal(function.ret_ty, state.ty)  # else the state is the last of several results
        last = result if is_state else self._resolved(result.fields[-1]) if isinstance(result, relax.Tuple) else None
        # A function that does not return a literal tuple gives no state that is recognised.
        same_size = isinstance(last, relax.Tuple) and len(last.fields) == len(getattr(state.ty, "fields", ()))
        fields = list(last.fields) if same_size and last is not None else []
        self.new = {field: number for number, field in enumerate(fields) if isinstance(field, relax.Var)}

    def _resolved(self, expr: relax.Expr) -> relax.Expr:
        while isinstance(expr, relax.Var) and expr in self._values:
            expr = self._values[expr]
        return expr


class _Update:
    """The calls of a function whose result may take the place of an operand.

    Attributes:
        items: the number in the old state, by variable; of views of its tensors, too.
        wanted: the number in the new state, by variable.
        last_use: where a tensor of the old state, or a view of it, is read for the last time.
    """

    def __init__(self, builder: relax.BlockBuilder, module: tvm.IRModule, function: relax.Function) -> None:
        self.builder, self.function = builder, function
        self._made: dict[tuple[str, int], Overwriting | None] = {}
        self.bindings = list(bindings_of(function))
        flow = StateFlow(function)
        views = {view: flow.old[tensor] for view, tensor in owners(module, function).items() if tensor in flow.old}
        self.items, self.wanted = flow.old | views, flow.new
        self.last_use: dict[int, int] = {}
        for place, binding in enumerate(self.bindings):
            for variable in relax.analysis.free_vars(binding.value):
                if variable in self.items:
                    self.last_use[self.items[variable]] = place
        for variable in relax.analysis.free_vars(function.body.body):
            if variable in self.items:
                self.last_use[self.items[variable]] = len(self.bindings)

    def apply(self) -> relax.Function | None:
        """The function with calls in place, or None where there is none."""
        replaced: dict[Any, Any] = {}
        for place, binding in enumerate(self.bindings):
            if binding.var in self.wanted:
                call = self._in_place(binding, self.wanted[binding.var], place)
                if call is not None:
                    replaced[binding.var] = call
        if not replaced:
            return None
        blocks = [
            type(block)(
                [
                    relax.VarBinding(binding.var, replaced[binding.var]) if binding.var in replaced else binding
                    for binding in block.bindings
                ]
            )
            for block in self.function.body.blocks
        ]
        body, old = relax.SeqExpr(blocks, self.function.body.body), self.function
        return relax.Function(old.params, body, old.ret_ty, old.is_pure, old.attrs)

    def _in_place(self, binding: relax.Binding, number: int, place: int) -> relax.Call | None:
        """The call over the old tensor of this number, or None if that is needed later, or read in another order."""
        call = binding.value
        if not isinstance(call, tvm.ir.Call) or operator_name(call) != "relax.call_tir" or len(call.args) != 2:
            return None
        operands = list(call.args[1].fields)
        uses = Counter(self.items.get(operand) for operand in operands)
        old = next((i for i, operand in enumerate(operands) if self.items.get(operand) == number), None)
        if old is None or uses[number] != 1 or self.last_use[number] > place:
            return None
        before, after = operands[old], binding.var
        if static_shape(before) != static_shape(after) or element_type(before) != element_type(after):
            return None
        made = self._overwriting(call.args[0], old)
        return None if made is None else made.call(operands, binding.var.ty)

    def _overwriting(self, variable: relax.GlobalVar, onto: int) -> Overwriting | None:
        """The function of this name over an operand, made once for all of its calls."""
        key = (str(variable.name_hint), onto)
        if key not in self._made:
            self._made[key] = overwriting(self.builder, self.builder.get()[variable], key[0], onto)
        return self._made[key]


@dataclass(frozen=True)
class Overwriting:
    """A function that stores its result in the memory of one of its operands.

    Attributes:
        variable: its name in the module.
        onto: the number of the operand.
        repeated: it takes this operand once more, as its last parameter.
    """

    variable: relax.GlobalVar
    onto: int
    repeated: bool

    def call(self, operands: Sequence[relax.Expr], result: relax.TensorType) -> relax.Call:
        """The call with these operands, whose result has this type."""
        operands = [*operands, operands[self.onto]] if self.repeated else list(operands)
        number = len(operands) - 1 if self.repeated else self.onto
        return relax.op.call_tir_inplace(self.variable, operands, [number], [result])


def overwriting(builder: relax.BlockBuilder, function: tvm.tirx.PrimFunc, name: str, onto: int) -> Overwriting | None:
    """The TIR function that stores its result in the memory of operand number `onto`, or None.

    Args:
        builder: to whose module the function is added, as `name` and "in_place".
        function: its parameters are the operands and the result.
    """
    loops = scheduled_in_place(function, onto)
    if loops is not None:
        if "op_pattern" in (function.attrs or {}):  # else TVM looks at the loops, and may fuse them
            loops = loops.with_attr("op_pattern", function.attrs["op_pattern"])
        return Overwriting(builder.add_func(loops, f"{name}_in_place"), onto, False)
    sharing = sharing_memory(function, onto)
    return None if sharing is None else Overwriting(builder.add_func(sharing, f"{name}_in_place"), onto, True)


def _with_copies(builder: relax.BlockBuilder, function: relax.Function, fields: Sequence[relax.Expr]) -> relax.Function:
    """`init` with a copy of every constant that it returns."""
    own = relax.BlockBuilder()
    copies: dict[tuple[Any, ...], Any] = {}
    with own.function(INIT, []):
        with own.dataflow():
            results = []
            for field in fields:
                shape, dtype = tuple(int(extent) for extent in field.ty.shape.values), element_type(field)
                if (shape, dtype) not in copies:
                    copies[shape, dtype] = builder.add_func(_copy(shape, dtype), "copy_state")
                one = relax.const(1, dtype)
                results.append(own.emit(relax.op.call_tir(copies[shape, dtype], [field, one], field.ty)))
            output = own.emit_output(relax.Tuple(results))
        own.emit_func_output(output)
    made = own.get()[INIT]
    return made.with_attr(dict(function.attrs.items())) if function.attrs else made


def _state_of(function: relax.Function) -> list[relax.Expr] | None:
    """The constants that `init` returns; None if it makes new tensors, as that of an artifact does."""
    values = {binding.var: binding.value for binding in bindings_of(function)}
    result = function.body.body
    while isinstance(result, relax.Var):
        result = values[result]
    fields = [values.get(field, field) if isinstance(field, relax.Var) else field for field in result.fields]
    return fields if all(isinstance(field, Constant) for field in fields) else None


def copied(x: te.Tensor, one: te.Tensor) -> te.Tensor:
    """A copy that no pass takes for a view: a product with one, or "and" with true for conditions."""
    return (topi.logical_and if str(x.dtype) == "bool" else topi.multiply)(x, one)


def _copy(shape: tuple[int, ...], dtype: str) -> Any:
    x, one = te.placeholder(shape, dtype, name="x"), te.placeholder((), dtype, name="one")
    return te.create_prim_func([x, one, copied(x, one)])
