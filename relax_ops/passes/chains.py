# SPDX-License-Identifier: Apache-2.0
"""Convolutions and what follows them, found in a function: chains that one kernel or one call of a library computes.

    conv(x, w) [+ acc] [+ bias] [-> relu, relu6]   forward and transposed convolutions
    acc + dgrad(dy, w),  acc + wgrad(dy, x)
    wgrad(dy, x) and the sum of dy over pixels     the gradients of weight and bias, however the sum is written;
                                                   either one added to what there is, both if weight's is

An intermediate that anything else reads is left alone. A `Taker` computes the chains: the generated
kernels, or a vendor's library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import tvm
import tvm_ffi
from tvm import relax

from relax_ops.ir import (
    PREFIX,
    TRANSPOSED,
    direction_of,
    dtype_of,
    is_part,
    problem_of,
    shape_values,
    transposed_problem_of,
)
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, BY_NAME
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.epilogue import Epilogue

_FRESH = frozenset(f"relax.{name}" for name in ("add", "subtract", "multiply", "divide", "where", "nn.relu"))
"""Elementwise operations: their result is a tensor of its own."""


class Taker(Protocol):
    """What computes convolutions: the generated kernels, or a vendor's library.

    Attributes:
        in_place: whether a sum can be written to the place of the summand, if nothing else reads that afterwards.
        copies: whether a sum can have a place of its own as well, which takes a copy of the summand.
    """

    in_place: bool
    copies: bool

    def take(self, op: str, direction: str, problem: ConvProblem) -> Any:
        """What computes a direction of a problem, or None if this taker does not."""

    def refusal(self, convolution: Convolution, epilogue: Epilogue) -> str:
        """Why what was taken cannot do the epilogue as well, or nothing."""


@dataclass(frozen=True)
class Convolution:
    """A convolution that is taken: the number of its binding, its number among convolutions, how the taker does it."""

    index: int
    number: int
    op: str
    direction: str
    problem: ConvProblem
    how: Any
    call: relax.Call

    @property
    def operands(self) -> list[Any]:
        """The two tensors of the direction, in its order."""
        return list(self.call.args)[:2]


@dataclass(frozen=True)
class Chain:
    """What one call does: the convolution, with `epilogue`; the variable it gives; acc and bias where it has them.

    For a bias gradient, `second` is its variable, and `second_acc` what it is added to; the call is where the first of
    the two variables is. Without an epilogue it is the convolution alone. With `in_place` the sums may take the
    places of `acc` and `second_acc`: nothing reads those afterwards.
    """

    convolution: Convolution
    epilogue: Epilogue
    result: Any
    last: int
    acc: relax.Expr = None
    bias: relax.Expr = None
    second: Any = None
    second_acc: Any = None
    in_place: bool = False


class Finder:
    """The chains of one function."""

    def __init__(self, function: relax.Function, taker: Taker) -> None:
        self._taker = taker
        self._bindings = [binding for block in function.body.blocks for binding in block.bindings]
        self._place = {binding.var: index for index, binding in enumerate(self._bindings)}
        self._readers: dict[Any, list[int]] = {}
        self._varying = set(function.params)
        for index, binding in enumerate(self._bindings):
            used = relax.analysis.free_vars(binding.value)
            for variable in used:
                self._readers.setdefault(variable, []).append(index)
            if any(variable in self._varying for variable in used):
                self._varying.add(binding.var)
        for variable in relax.analysis.free_vars(function.body.body):
            self._readers.setdefault(variable, []).append(len(self._bindings))
        self._convolutions = {found.index: found for found in self._find()}
        self._called: dict[int, int] = {}  # where the kernel is called that computes a fused binding
        self._taken: set[Any] = set()  # results of chains
        self._bias_gradients: set[Any] = set()  # second results of chains

    def chains(self) -> list[Chain]:
        """Those of all convolutions that are taken, in order."""
        found = []
        for convolution in self._convolutions.values():
            chain = self._follow(convolution)
            if (
                chain.epilogue in (Epilogue(), Epilogue(accumulate=True))
                and convolution.direction == BACKWARD_WEIGHT.name
            ):
                chain = self._with_bias_gradient(chain)
            if chain.epilogue != Epilogue():
                self._called[convolution.index] = chain.last
                self._taken.add(chain.result)
            if chain.second is not None:
                self._bias_gradients.add(chain.second)
            found.append(chain)
        return found

    def _find(self) -> list[Convolution]:
        found, number = [], -1
        for index, binding in enumerate(self._bindings):
            call = binding.value
            op = _operator(call).removeprefix(PREFIX)
            if op not in BY_NAME and op not in TRANSPOSED:
                continue
            number += 1
            try:
                problem = transposed_problem_of(call) if op in TRANSPOSED else problem_of(call)
            except (ProblemError, DTypeError, UnsupportedError):
                continue  # legalization handles it
            direction = direction_of(op)
            how = None if is_part(call) else self._taker.take(op, direction, problem)
            if how is not None:
                found.append(Convolution(index, number, op, direction, problem, how, call))
        return found

    def _follow(self, convolution: Convolution) -> Chain:
        """The longest chain behind a convolution."""
        chain = Chain(convolution, Epilogue(), self._bindings[convolution.index].var, convolution.index)
        while (longer := self._extended(chain)) is not None:
            chain = longer
        return chain

    def _extended(self, chain: Chain) -> Chain | None:
        readers, before = self._readers.get(chain.result, []), chain.epilogue
        if len(readers) != 1 or readers[0] == len(self._bindings) or before.relu or before.relu6:
            return None
        binding = self._bindings[readers[0]]
        if binding.var in self._taken:
            return None
        call = binding.value
        grown = replace(chain, result=binding.var, last=readers[0])
        if _operator(call) == "relax.nn.relu":
            grown = replace(grown, epilogue=replace(before, relu=True))
        elif _is_relu6(call):
            grown = replace(grown, epilogue=replace(before, relu6=True))
        elif _operator(call) == "relax.add" and tvm_ffi.structural_equal(binding.var.ty, chain.result.ty):
            other = call.args[0] if call.args[1].same_as(chain.result) else call.args[1]
            if not before.bias and self._bias(chain, other) is not None:
                grown = replace(grown, epilogue=replace(before, bias=True), bias=self._bias(chain, other))
            elif not before.accumulate and self._can_add(other, chain, readers[0]):
                free = self._is_overwritten(other, chain, readers[0])
                grown = replace(grown, epilogue=replace(before, accumulate=True), acc=other, in_place=free)
            else:
                return None
        else:
            return None
        return None if self._taker.refusal(chain.convolution, grown.epilogue) else grown

    def _bias(self, chain: Chain, other: relax.Expr) -> relax.Expr:
        """The vector of one number a channel that `other` is, seen as the result's shape, or None."""
        direction, problem = chain.convolution.direction, chain.convolution.problem
        data = direction == BACKWARD_DATA.name
        layout = problem.data_layout if data else problem.grad_layout
        channels = problem.in_channels if data else problem.out_channels
        if direction == BACKWARD_WEIGHT.name or not isinstance(other, relax.Var):
            return None
        shape = shape_of(other)
        wide = [channels if letter == "C" else 1 for letter in layout]
        while wide and wide[0] == 1 and len(wide) > len(shape):
            wide.pop(0)
        if shape != wide or dtype_of(other.ty) != dtype_of(chain.result.ty):
            return None
        made = self._bindings[self._place[other]].value if other in self._place else None
        vector = made.args[0] if made is not None and _operator(made) == "relax.reshape" else other
        return vector if shape_of(vector) == [channels] else None

    def _can_add(self, acc: relax.Expr, chain: Chain, reader: int) -> bool:
        """Whether the summand `acc` may become part of the call, and should."""
        if acc.same_as(chain.result) or not isinstance(acc, relax.Var):
            return False
        if not tvm_ffi.structural_equal(acc.ty, chain.result.ty):
            return False
        free = self._is_overwritten(acc, chain, reader)
        if not free and not self._taker.copies:
            return False
        return (acc not in self._place or self._pays(acc, free)) and not self._later_adds(acc, chain, reader)

    def _later_adds(self, acc: relax.Expr, chain: Chain, reader: int) -> bool:
        """Whether `acc` comes from a later convolution that can add this one's result.

        Then that one does: this one's operands would have to be kept for it.
        """
        later = self._convolutions.get(self._place.get(acc, -1))
        if later is None or later.index < chain.convolution.index or len(self._readers[acc]) != 1:
            return False
        if self._taker.refusal(later, Epilogue(accumulate=True)):
            return False
        return self._taker.copies or self._is_free(chain.result, Chain(later, Epilogue(), acc, later.index), reader)

    def _is_overwritten(self, acc: relax.Expr, chain: Chain, reader: int, call: int | None = None) -> bool:
        """Whether the taker can put the sum of `acc` and a chain to the place of `acc`; the rest as for `_is_free`."""
        return self._taker.in_place and self._is_free(acc, chain, reader, call)

    def _is_free(self, acc: relax.Expr, chain: Chain, reader: int, call: int | None = None) -> bool:
        """Whether the kernel may write to the place of `acc` at `reader`, or where it is called, if that is given."""
        place = self._place.get(acc)
        if place is None or acc not in self._varying:
            return False
        if place not in self._convolutions and _operator(self._bindings[place].value) not in _FRESH:
            return False
        others = [index for index in self._readers[acc] if index != reader]
        return all(
            (index in self._convolutions or index in self._called)
            and max(index, self._called.get(index, index)) < (chain.convolution.index if call is None else call)
            for index in others
        )

    def _pays(self, acc: relax.Expr, free: bool) -> bool:
        """Whether a sum is better done by the call: not if elementwise operations make `acc` for it alone.

        They become one with the sum otherwise, which reads and writes no more, and an optimizer's keeps its place. A
        sum that another call has made takes no copy where its place is `free`.
        """
        return self._place[acc] in self._convolutions or (free and acc in self._taken) or len(self._readers[acc]) > 1

    def _with_bias_gradient(self, chain: Chain) -> Chain:
        """The chain with the sum of its dY over everything but channels, if the function has that."""
        c, grown = chain.convolution, replace(chain.epilogue, bias_grad=True)
        dy = c.operands[0]
        if self._taker.refusal(c, grown):
            return chain
        for reader in self._readers.get(dy, []):
            index = self._channel_sum(dy, c.problem, reader)
            if index is None or index in self._called:
                continue
            vector = self._vector(index, c.problem)
            alone = replace(chain, epilogue=grown, second=self._bindings[vector].var)
            for pair in (*self._summed(alone, vector), alone):
                ready = self._ready(pair)
                if ready is not None:
                    place = self._place[pair.second]
                    self._called |= dict.fromkeys((reader, index, vector, place), chain.last)
                    return ready
        return chain

    def _vector(self, index: int, problem: ConvProblem) -> int:
        """The reshape of the sum at binding `index` to one number a channel, if nothing else reads it, or that sum."""
        readers = self._readers.get(self._bindings[index].var, [])
        if len(readers) == 1 and readers[0] < len(self._bindings):
            binding = self._bindings[readers[0]]
            if _operator(binding.value) == "relax.reshape" and shape_of(binding.var) == [problem.out_channels]:
                return readers[0]
        return index

    def _summed(self, chain: Chain, vector: int) -> list[Chain]:
        """The chain with what the bias gradient at binding `vector` is added to, an earlier chain's, if it is."""
        grown = replace(chain.epilogue, bias_accumulate=True)
        readers = self._readers.get(self._bindings[vector].var, [])
        if not grown.accumulate or self._taker.refusal(chain.convolution, grown):
            return []
        if len(readers) != 1 or readers[0] == len(self._bindings):
            return []
        binding = self._bindings[readers[0]]
        if _operator(binding.value) != "relax.add":
            return []
        return [
            replace(chain, epilogue=grown, second=binding.var, second_acc=acc)
            for acc in binding.value.args
            if acc in self._bias_gradients & self._varying
            and len(self._readers[acc]) == 1
            and tvm_ffi.structural_equal(acc.ty, binding.var.ty)
        ]

    def _ready(self, pair: Chain) -> Chain | None:
        """The pair, if all is there, and sums have a place, where the first of two gradients is."""
        call = min(self._place[pair.result], self._place[pair.second])
        operands = [*pair.convolution.operands, pair.acc, pair.second_acc]
        if any(self._place.get(operand, -1) >= call for operand in operands if operand is not None):
            return None
        if pair.acc is None:
            return pair
        free = self._is_overwritten(pair.acc, pair, pair.last, call)
        return replace(pair, in_place=free) if free or self._taker.copies else None

    def _channel_sum(self, dy: relax.Expr, problem: ConvProblem, index: int) -> int | None:
        """Where the sum of dY over everything but channels is done, in the kernel's type, that binding `index` begins.

        It may take several sums, collapse_sum_to (TVM's own gradient of a broadcast), casts to wider types before it is
        done, and any cast afterwards.
        """
        axes = list(zip(problem.grad_layout, shape_of(dy), strict=False))
        before = dy
        while index < len(self._bindings):
            call, variable = self._bindings[index].value, self._bindings[index].var
            widens = _width(variable) > _width(before)
            if _operator(call) in ("relax.sum", "relax.collapse_sum_to") and axes:
                axes = _left_by(call, axes)
            elif _operator(call) != "relax.astype" or not (widens or _is_sum(axes, problem.out_channels)):
                return None
            if _is_sum(axes, problem.out_channels) and dtype_of(variable.ty) == problem.kernel_dtype:
                return index
            readers, before = self._readers.get(variable, []), variable
            if len(readers) != 1:
                return None
            index = readers[0]
        return None


Axes = list[tuple[str, Any]]
"""The letters that are left of a layout in the course of a sum, with their extents."""


def _is_relu6(call: relax.Expr) -> bool:
    """Whether a value is a tensor between 0 and 6."""
    return _operator(call) == "relax.clip" and [float(getattr(each, "value", -1)) for each in call.args[1:]] == [0, 6]


def _left_by(call: relax.Call, axes: Axes) -> Axes:
    """What a sum or collapse_sum_to leaves of `axes`."""
    if _operator(call) == "relax.sum":
        wanted = call.attrs.axis
        summed = {int(a) % len(axes) for a in (range(len(axes)) if wanted is None else wanted)}
        keep = bool(call.attrs.keepdims)
        return [("1", 1) if i in summed else axis for i, axis in enumerate(axes) if keep or i not in summed]
    shape = shape_values(call.args[1]) or ()
    aligned = axes[len(axes) - len(shape) :]
    return [axis if tvm_ffi.structural_equal(axis[1], e) else ("1", 1) for axis, e in zip(aligned, shape, strict=True)]


def _is_sum(axes: Axes, channels: int) -> bool:
    """Whether nothing but channels is left."""
    return ("C", channels) in axes and all(letter == "C" or extent == 1 for letter, extent in axes)


def _width(value: relax.Expr) -> int:
    """Bytes of an element; 0 where there is none known."""
    return DTYPE_BYTES.get(dtype_of(value.ty) or "", 0) if isinstance(value.ty, relax.TensorType) else 0


def _operator(value: relax.Expr) -> str:
    """The operator that an expression calls, or nothing."""
    return str(value.op.name) if isinstance(value, tvm.ir.Call) and isinstance(value.op, tvm.ir.Op) else ""


def shape_of(value: relax.Expr) -> list[Any]:
    """The extents of a tensor; empty if they are not known."""
    known = isinstance(value.ty, relax.TensorType) and value.ty.shape is not None
    return list(shape_values(value.ty.shape) or ()) if known else []


__all__ = ["Chain", "Convolution", "Finder", "Taker", "shape_of"]
