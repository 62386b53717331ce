# SPDX-License-Identifier: Apache-2.0
"""Rematerialisation (activation checkpointing): values of the forward pass are computed again in the backward pass.

The pass takes a function whose calls are fused and in their final order, and repeats calls of kernels right before the
later readers of what they give (see `remat_choice`). The same kernels read the same values, so that gradients, updates
and predictions have the same bits as without it; running statistics are results of other calls, which stay as they are.
No pass behind it joins equal calls. Calls in place and calls of libraries are not repeated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import tvm
from tvm import relax

from relax_ops.ir import constant_shape
from tvm_convgrad.codegen.hardware import Machine
from tvm_convgrad.training.ir.graph import bindings_of, fixed_bytes, operator_name
from tvm_convgrad.training.ir.recomputation import ALL, AUTO, NONE, RECOMPUTING, Recomputation, recomputation_of
from tvm_convgrad.training.ir.views import owners
from tvm_convgrad.training.passes.call_costs import CallCosts
from tvm_convgrad.training.passes.in_place import StateFlow
from tvm_convgrad.training.passes.remat_choice import FOREVER, Call, Program, Schedule

_HARDLY = 0.05
"""The share of a step's estimated time that `AUTO` may cost."""
_PRICE = 0.2
"""What `AUTO` pays for memory: 1 % of a step's time for 5 % of its tensors. MobileNetV2 would pay 5 % for 17 %."""
_WORTH = 32 << 20
"""Bytes of a step's tensors below which `AUTO` repeats nothing."""


@dataclass(frozen=True)
class Repeated:
    """What a function computes again.

    Attributes:
        calls: how many.
        bytes: of their results.
        seconds: estimated, on one core; total: of all calls with those.
    """

    calls: int
    bytes: int
    seconds: float
    total: float

    @property
    def share(self) -> float:
        """The seconds by those of the function without repetitions."""
        once = self.total - self.seconds
        return self.seconds / once if once else 0.0

    def to_json(self) -> dict[str, int | float]:
        """For a manifest."""
        return {"calls": self.calls, "bytes": self.bytes, "share": round(self.share, 4)}


_record: ContextVar[dict[str, Repeated] | None] = ContextVar("tvm_convgrad_repeated", default=None)


@contextmanager
def recorded_repetitions() -> Iterator[dict[str, Repeated]]:
    """A dict that gets what `step` and `gradients` repeat, by their names, if they may."""
    record: dict[str, Repeated] = {}
    token = _record.set(record)
    try:
        yield record
    finally:
        _record.reset(token)


def Rematerialise(seconds: Mapping[str, float], machine: Machine | None) -> tvm.transform.Pass:
    """The pass that repeats calls of `step` and `gradients` if they say so, between ordering and updates in place.

    Args:
        seconds: the estimates of generated kernels, by name.
        machine: that of the target.
    """

    def repeat(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        record = _record.get()
        for variable in module.get_global_vars():
            function, name = module[variable], str(variable.name_hint)
            if name not in RECOMPUTING or len(function.body.blocks) != 1:
                continue
            wanted = recomputation_of(function)
            if wanted.values == NONE:
                continue
            code = _Code(module, function, CallCosts(module, seconds, machine), cheap=wanted.values != ALL)
            schedule = code.chosen(wanted)
            if record is not None:
                record[name] = code.repeated(schedule)
            if schedule.repeated:
                module[variable] = code.rewritten(schedule)
        return module

    return tvm.transform.module_pass(repeat, opt_level=0, name="ConvgradRematerialise")


class _Code:
    """A function as a program of `remat_choice`, and back."""

    def __init__(self, module: tvm.IRModule, function: relax.Function, costs: CallCosts, *, cheap: bool) -> None:
        """The program of a function; with `cheap`, convolutions and matrix products are not repeated."""
        self.function, self._costs, self._cheap = function, costs, cheap
        self.bindings = list(bindings_of(function))
        self._place = {binding.var: number for number, binding in enumerate(self.bindings)}
        self._owner = owners(module, function)
        self._lasting = self._found_lasting()
        self._until, self._updates = self._overwritten()
        calls = [self._call(binding) for binding in self.bindings]
        results = [self._place[v] for v in relax.analysis.free_vars(function.body.body) if v in self._place]
        self.program = Program(calls, self._with_fields(results))

    def _memory(self, var: Any) -> Any:
        """The first variable that has the memory of a variable."""
        return self._owner.get(var, var)

    def _found_lasting(self) -> set[Any]:
        """Parameters, their fields, and views of those, which are there all the time."""
        lasting = set(self.function.params)
        for binding in self.bindings:
            value = binding.value
            is_field = isinstance(value, relax.TupleGetItem) and value.tuple_value in lasting
            if is_field or self._owner.get(binding.var) in lasting:
                lasting.add(binding.var)
        return lasting

    def _overwritten(self) -> tuple[dict[Any, int], set[Any]]:
        """For tensors of the old state the place of their update; and the updates, which take no new memory."""
        flow = StateFlow(self.function)
        places = {number: self._place[var] for var, number in flow.new.items() if var in self._place}
        until, updates = {}, set()
        for var in self._lasting:
            number = flow.old.get(self._memory(var))
            if number in places:
                update = self.bindings[places[number]]
                if any(self._memory(v).same_as(self._memory(var)) for v in _read(update.value)):
                    until[var] = places[number]
                    updates.add(update.var)
        return until, updates

    def _with_fields(self, results: list[int]) -> list[int]:
        """Places of a function's results, and of the fields of tuples among them."""
        found, waiting = set(), list(results)
        while waiting:
            place = waiting.pop()
            if place in found:
                continue
            found.add(place)
            if isinstance(self.bindings[place].value, relax.Tuple):
                waiting += [self._place[v] for v in _read(self.bindings[place].value) if v in self._place]
        return sorted(found)

    def _call(self, binding: relax.Binding) -> Call:
        var, value = binding.var, binding.value
        reads = [v for v in dict.fromkeys(_read(value)) if v in self._place]
        places = tuple(self._place[v] for v in reads)
        if var in self._lasting:
            return Call(places, 0, until=self._until.get(var, FOREVER))
        name = operator_name(value) if isinstance(value, tvm.ir.Call) else ""
        if name == "relax.call_tir_inplace":
            operands = list(value.args[1].fields)
            taken = [operands[int(number)] for number in value.attrs.inplace_indices if int(number) >= 0]
            number_of = {v: number for number, v in enumerate(reads)}
            overwrites = tuple(number_of[v] for v in taken if v in number_of)
            if overwrites:
                return Call(places, 0, overwrites[0], self._seconds(binding), overwrites=overwrites)
        own = self._memory(var)
        view = next((number for number, v in enumerate(reads) if self._memory(v).same_as(own)), None)
        if view is None and isinstance(value, relax.TupleGetItem):
            view = 0
        if view is not None:
            return Call(places, 0, view, repeatable=True)
        size = 0 if var in self._updates or isinstance(value, (relax.Tuple, relax.Var)) else _bytes(var.ty)
        if name != "relax.call_tir":
            return Call(places, size)
        repeatable = len(value.args) == 2  # no extents that are known at run time
        if repeatable and self._cheap:
            elements = sum(_elements(v.ty) for v in (*dict.fromkeys(_read(value)), var))
            repeatable = self._costs.is_cheap(value.args[0], elements)
        return Call(places, size, None, self._seconds(binding), repeatable)

    def _seconds(self, binding: relax.Binding) -> float:
        moved = sum(_bytes(v.ty) for v in (*dict.fromkeys(_read(binding.value)), binding.var))
        return self._costs.seconds(binding.value.args[0], moved)

    def chosen(self, wanted: Recomputation) -> Schedule:
        """The schedule for what a function says."""
        if wanted.values == AUTO:
            plain = self.program.within(FOREVER)
            return (plain if plain[1].peak < _WORTH else self.program.affordable(_HARDLY, _PRICE))[1]
        return (self.program.least() if wanted.budget is None else self.program.within(wanted.budget))[1]

    def repeated(self, schedule: Schedule) -> Repeated:
        """What a schedule repeats."""
        again = schedule.repeated
        seconds = self.program.seconds(again)
        own = [call for call in again if self.program.calls[call].view is None]
        return Repeated(
            len(own), sum(self.program.calls[call].bytes for call in own), seconds, self.program.seconds() + seconds
        )

    def rewritten(self, schedule: Schedule) -> relax.Function:
        """The function with the calls of a schedule."""
        copies: dict[int, relax.Var] = {}
        block = self.function.body.blocks[0]
        result = []
        for entry in schedule.entries:
            binding = self.bindings[entry.call]
            taken = {self.bindings[read].var: copies[read] for read, again in entry.reads if again}
            value = _substituted(binding.value, taken) if taken else binding.value
            if entry.again:
                copies[entry.call] = relax.DataflowVar(f"{binding.var.name}_again", binding.var.ty)
                result.append(relax.VarBinding(copies[entry.call], value))
            else:
                result.append(relax.VarBinding(binding.var, value) if taken else binding)
        old = self.function
        body = relax.SeqExpr([type(block)(result)], old.body.body)
        return relax.Function(old.params, body, old.ret_ty, old.is_pure, old.attrs)


def _read(value: relax.Expr) -> list[Any]:
    """The variables that a value reads."""
    return list(relax.analysis.free_vars(value))


def _substituted(value: relax.Expr, taken: Mapping[Any, relax.Var]) -> relax.Expr:
    """A value in A-normal form with other variables; it has the type that it had."""
    if isinstance(value, relax.Var):
        return taken.get(value, value)
    if isinstance(value, relax.Tuple):
        return relax.Tuple([_substituted(each, taken) for each in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return relax.TupleGetItem(_substituted(value.tuple_value, taken), value.index)  # typed by its tuple
    if isinstance(value, tvm.ir.Call):
        made: Any = relax.Call(
            value.op, [_substituted(each, taken) for each in value.args], value.attrs, list(value.ty_args)
        )
        relax.expr._update_type(made, value.ty)
        return made
    return value


def _tensors(type_: relax.Type) -> list[relax.TensorType]:
    if isinstance(type_, relax.TupleType):
        return [tensor for each in type_.fields for tensor in _tensors(each)]
    return [type_] if isinstance(type_, relax.TensorType) else []


def _elements(type_: relax.Type) -> int:
    """How many elements values of a type have, without those whose extents are symbolic."""
    return sum(math.prod(extents) for extents in map(constant_shape, _tensors(type_)) if extents is not None)


def _bytes(type_: relax.Type) -> int:
    """What these have in memory."""
    return sum(map(fixed_bytes, _tensors(type_)))


__all__ = ["Rematerialise", "Repeated", "recorded_repetitions"]
