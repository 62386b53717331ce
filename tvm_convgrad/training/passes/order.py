# SPDX-License-Identifier: Apache-2.0
"""The order of a function's calls, so that less is in memory at a time.

Differentiation gives a weight's gradient when it comes to the weight, which may be long after the gradients of the
data around it; until then all that it reads is kept. Here a call moves to the place where its operands are there, if
it is the last reader of more bytes than its result has. Everything else stays in its order.

FuseOps, which runs before, may move a call in place before a reader of what it overwrites: it sees who needs a result,
not who overwrites one. Here that reader comes first again, in all functions.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from itertools import islice
from typing import Any

import tvm
from tvm import relax

from tvm_convgrad.core.dtypes import SHORT_FLOATS
from tvm_convgrad.training.ir.graph import bindings_of, element_type, fixed_bytes, operator_name
from tvm_convgrad.training.ir.micro_batches import micro_batches_of
from tvm_convgrad.training.ir.views import owners
from tvm_convgrad.training.passes.flat_gradients import GRADIENTS
from tvm_convgrad.training.passes.in_place import STEP, StateFlow


def OrderCalls() -> tvm.transform.Pass:
    """The pass that reorders the calls of `step` and `gradients`, between fusion and memory planning.

    In other functions it does what `ReadersFirst` does.
    """
    return tvm.transform.module_pass(lambda module, _: _ordered(module, (STEP, GRADIENTS)), 0, "ConvgradOrder")


def ReadersFirst() -> tvm.transform.Pass:
    """The pass after fusion that moves calls in place, and what needs them, behind the readers of what they overwrite.

    Everything else stays in its order.
    """
    return tvm.transform.module_pass(lambda module, _: _ordered(module, ()), 0, "ConvgradReadersFirst")


def _ordered(module: tvm.IRModule, saving: Collection[str]) -> tvm.IRModule:
    """The module in which the functions of the names `saving` are reordered to save memory, others as they must be."""
    for variable in module.get_global_vars():
        function = module[variable]
        if not isinstance(function, relax.Function) or not isinstance(function.body, relax.SeqExpr):
            continue
        blocks = list(function.body.blocks)
        saves = str(variable.name_hint) in saving and len(blocks) == 1
        if saves or any(_overwritten(binding.value) for binding in bindings_of(function)):
            order = _Order(module, function)
            bindings = iter(order.bindings() if saves else order.kept())
            reordered = [type(block)(list(islice(bindings, len(block.bindings)))) for block in blocks]
            body = relax.SeqExpr(reordered, function.body.body)
            module[variable] = relax.Function(function.params, body, function.ret_ty, function.is_pure, function.attrs)
    return module


class _Order:
    """A list schedule of a function: which bindings wait for which, and what is freed by them.

    Blocks stay one behind the other; what is in no dataflow block has effects or branches, and stays as it is.
    """

    def __init__(self, module: tvm.IRModule, function: relax.Function) -> None:
        self._bindings = list(bindings_of(function))
        place = {binding.var: number for number, binding in enumerate(self._bindings)}
        self._reads = [
            [place[v] for v in relax.analysis.free_vars(binding.value) if v in place] for binding in self._bindings
        ]
        self._readers: dict[int, set[int]] = defaultdict(set)
        for number, reads in enumerate(self._reads):
            for read in reads:
                self._readers[read].add(number)
        kept = {place[v] for v in relax.analysis.free_vars(function.body.body) if v in place}
        self._left = {number: len(self._readers[number]) + (number in kept) for number in range(len(self._bindings))}
        self._bytes = [fixed_bytes(binding.var.ty) for binding in self._bindings]  # 0 of tuples, whose tensors count
        self._waits = [set(reads) for reads in self._reads]
        self._add_blocks(function)
        self._later: list[set[int]] = [set() for _ in self._bindings]
        self._add_overwriting(StateFlow(function), place, owners(module, function))
        self._turn = micro_batches_of(function)  # FuseOps mixes them, as operations of several become one function
        for number, binding in reversed(list(enumerate(self._bindings))):
            if _is_narrow(binding.var) and self._readers[number]:  # a weight is cast when it is read, not at the start
                self._turn[number] = max(self._turn[number], min(self._turn[each] for each in self._readers[number]))

    def _add_blocks(self, function: relax.Function) -> None:
        """A binding waits for those of the blocks before its own; outside of dataflow also for the one before it."""
        first = 0
        for block in function.body.blocks:
            for own in range(first, first + len(block.bindings)):
                self._waits[own].update(range(first if isinstance(block, relax.DataflowBlock) else own))
            first += len(block.bindings)

    def _add_overwriting(self, flow: StateFlow, place: dict[Any, int], owner: dict[Any, Any]) -> None:
        """Who overwrites a tensor waits for the others that read it, or a view of it."""
        memory = [place.get(owner.get(binding.var, binding.var), own) for own, binding in enumerate(self._bindings)]
        readers: dict[int, set[int]] = defaultdict(set)
        for number, reads in enumerate(self._reads):
            for read in reads:
                readers[memory[read]].add(number)

        def wait(own: int, tensor: int) -> None:
            self._waits[own] |= {reader for reader in readers[memory[tensor]] if reader < own}

        olds = {number: place[var] for var, number in flow.old.items() if var in place}
        following = self._following()
        for var, number in flow.new.items():
            if var in place and number in olds:
                self._bytes[olds[number]] = 0  # the state is there all the time
                own = place[var]
                wait(own, olds[number])
                # FuseOps puts the update of a weight before the gradient of the data, which reads the weight.
                later = (reader for reader in readers[memory[olds[number]]] if reader > own)
                self._later[own] = {reader for reader in later if not following[own] >> reader & 1}
        sharing: dict[int, list[int]] = defaultdict(list)
        for number, tensor in enumerate(memory):
            sharing[tensor].append(number)
        for own, binding in enumerate(self._bindings):
            for taken in (place[operand] for operand in _overwritten(binding.value) if operand in place):
                # Who reads it behind the call, too: FuseOps has moved the call there.
                before = [each for each in sharing[memory[taken]] if each != own and not following[own] >> each & 1]
                others = {reader for each in before for reader in self._readers[each] if reader != own}
                # Those in later blocks, or later where nothing moves, are meant to read what was written.
                self._waits[own].update(reader for reader in others if own not in self._waits[reader])

    def _following(self) -> list[int]:
        """Which bindings depend on each: a bit for each of them."""
        found = [0] * len(self._bindings)
        for number in reversed(range(len(self._bindings))):
            for reader in self._readers[number]:
                found[number] |= 1 << reader | found[reader]
        return found

    def bindings(self) -> list[Any]:
        """The bindings in their new order; updates of the state behind all that reads it, if that is possible."""
        behind = [waits | later for waits, later in zip(self._waits, self._later, strict=True)]
        found = self._in_order(behind) or self._in_order(self._waits)
        assert found is not None, "nothing waits for itself"
        return found

    def kept(self) -> list[Any]:
        """The bindings in their own order, but for those that wait for a later one."""
        found = self._in_order(self._waits, saves=False)
        assert found is not None, "nothing waits for itself"
        return found

    def _in_order(self, waits: list[set[int]], *, saves: bool = True) -> list[Any] | None:
        """The bindings, each behind those that it waits for; None if some wait for each other.

        Args:
            saves: whether they move to where they free memory.
        """
        waiting = [set(each) for each in waits]
        left = dict(self._left)
        followers: dict[int, list[int]] = defaultdict(list)
        for number, awaited in enumerate(waiting):
            for other in awaited:
                followers[other].append(number)
        ready = {number for number, awaited in enumerate(waiting) if not awaited}
        result = []
        while ready:
            gains = {number: self._gain(number, left) if saves else 0 for number in ready}
            best = min(ready, key=lambda number: (-gains[number], number))
            chosen = best if gains[best] > 0 or not saves else min(ready, key=lambda each: (self._turn[each], each))
            ready.remove(chosen)
            result.append(self._bindings[chosen])
            for read in set(self._reads[chosen]):
                left[read] -= 1
            for follower in followers[chosen]:
                waiting[follower].discard(chosen)
                if not waiting[follower]:
                    ready.add(follower)
        return result if len(result) == len(self._bindings) else None

    def _gain(self, number: int, left: dict[int, int]) -> int:
        """Bytes that are free after a binding and were not before; `left` are the readers of each that are to come."""
        freed = sum(self._bytes[read] for read in set(self._reads[number]) if left[read] == 1)
        return freed - self._bytes[number]


def _overwritten(value: relax.Expr) -> list[Any]:
    """The operands that a call in place overwrites."""
    if not isinstance(value, tvm.ir.Call) or operator_name(value) != "relax.call_tir_inplace":
        return []
    operands = value.args[1].fields
    return [operands[int(number)] for number in value.attrs.inplace_indices if int(number) >= 0]


def _is_narrow(var: relax.Var) -> bool:
    return isinstance(var.ty, relax.TensorType) and element_type(var) in SHORT_FLOATS


__all__ = ["OrderCalls", "ReadersFirst"]
