# SPDX-License-Identifier: Apache-2.0
"""Divisions by symbolic extents: known to be positive, and computed before an innermost loop that does not change them.

TVM does not know that an extent is positive, and writes a division that rounds down with choices between signs, one in
the other; the index of a view of five axes compiled for minutes.

LLVM's loop vectorizer takes the address of a guarded load as uniform if its index is a division that does not change in
the loop, and reads the address in the first lane. But it computes the division only in lanes whose guard holds: where
the first lane's does not, the others load from anywhere (the bug is that of llvm-project#142957). A division by a
number is none of those, as LLVM may compute it in any lane.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import tvm
import tvm_ffi
from tvm import tirx

from relax_ops.compat import TensorLoad, TirCall, arithmetic, nodes_within, replaced
from tvm_convgrad.codegen.loops import MAX_INDEX

_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


def with_simple_divisions(function: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with such divisions; a divisor of 0, which is that of a loop without iterations, is taken for 1."""
    if not any(map(_is_symbolic, nodes_within(function.body, *_DIVISIONS))):
        return function
    with ExitStack() as facts:
        extents = _Extents(function, facts)
        body = replaced(function.body, _DIVISIONS, extents.with_positive_divisor)
    return function.with_body(replaced(body, (tirx.For,), _hoisted))


def _is_symbolic(division: Any) -> bool:
    """Whether a division is one of integers, not of vectors of them, by what is not a number."""
    return str(division.ty.dtype) in ("int32", "int64") and not isinstance(division.b, tirx.IntImm)


class _Extents:
    """What a lowered function reads from its arguments' shapes, and what it computes of that."""

    def __init__(self, function: tirx.PrimFunc, facts: ExitStack) -> None:
        """Extents are known not to be negative while `facts` is open."""
        self._analyzer = arithmetic.Analyzer()
        self._known: list[Any] = []
        self._values: list[Any] = []  # of those that are computed, by what is read
        self._slices: list[list[Any]] = []  # shapes of which TVM does not see that no extent is negative
        computed = []
        for bound in nodes_within(function.body, tirx.Bind):
            dtype = str(bound.var.ty.dtype) if isinstance(bound.var.ty, tvm.ir.PrimType) else ""
            if isinstance(bound.value, TirCall) and dtype == "int64":  # reads a field of an argument
                one, most = (tirx.IntImm(dtype, number) for number in (1, MAX_INDEX))
                self._analyzer.bind(bound.var, tvm.ir.Range.from_min_extent(one, most))
                self._known.append(bound.var)
                self._values.append(bound.var)
            elif dtype.startswith("int"):
                computed.append(bound)
        for declared in nodes_within(function.body, tirx.DeclBuffer):
            shape = list(declared.buffer.shape)
            unclear = [each for each in shape if self._is_known(each) and self._lowest(each) < 0]
            for extent in unclear:
                fact = self._analyzer.simplify(extent >= 0)
                facts.enter_context(self._analyzer.constraint_scope(fact))
            if unclear:
                self._slices.append(shape)
        for bound in computed:
            if self._is_known(bound.value):
                value = self._expanded(bound.value)
                self._analyzer.bind(bound.var, value)
                self._known.append(bound.var)
                self._values.append(value)

    def _lowest(self, value: Any) -> int:
        return int(self._analyzer.const_int_bound(value).min_value)

    def _expanded(self, value: Any) -> Any:
        """A value by what is read from arguments."""

        def of(variable: Any) -> Any:
            return next(
                (its for known, its in zip(self._known, self._values, strict=True) if known.same_as(variable)), variable
            )

        return replaced(value, (tirx.Var,), of)

    def _is_extent(self, value: Any) -> bool:
        """Whether a value is the product of some extents of one shape that follow each other, as of fused loops."""
        value = self._expanded(value)
        for shape in self._slices:
            for first in range(len(shape)):
                product: Any = 1
                for extent in shape[first:]:
                    product = product * extent
                    if self._analyzer.can_prove_equal(value, product):
                        return True
        return False

    def _is_known(self, value: Any) -> bool:
        """Whether a value is made of extents alone."""
        variables = nodes_within(value, tirx.Var)
        known = all(any(each.same_as(one) for one in self._known) for each in variables)
        return known and not nodes_within(value, TensorLoad, TirCall)

    def with_positive_divisor(self, division: Any) -> Any:
        """A division by an extent as one by a number that TVM sees is positive; another as it is."""
        divisor = division.b
        if not _is_symbolic(division) or isinstance(divisor, tirx.Max) or not self._is_known(divisor):
            return division
        if self._lowest(divisor) < 0 and not self._is_extent(divisor):
            return division
        return type(division)(division.a, tirx.max(divisor, tirx.IntImm(str(divisor.ty.dtype), 1)))


def _hoisted(loop: tirx.For) -> tirx.Stmt:
    """An innermost loop behind the divisions in it that do not change; another loop as it is."""
    if nodes_within(loop.body, tirx.For, tirx.While):
        return loop
    first: list[tirx.Bind] = []
    while True:  # a division may stand behind a common subexpression that divides, too
        moved, loop = _moved(loop)
        if not moved:
            return tirx.SeqStmt([*first, loop]) if first else loop
        first += moved


def _moved(loop: tirx.For) -> tuple[list[tirx.Bind], tirx.For]:
    """Divisions that do not change in a loop, each bound to a variable, and the loop without them."""
    changing = [loop.loop_var, *(each.var for each in nodes_within(loop.body, tirx.Let))]
    first: list[tuple[Any, tirx.Bind]] = []

    def is_fixed(value: Any) -> bool:
        if nodes_within(value, TensorLoad, TirCall):
            return False
        return not any(each.same_as(one) for each in nodes_within(value, tirx.Var) for one in changing)

    for bound in nodes_within(loop.body, tirx.Bind):  # such as common subexpressions
        if is_fixed(bound.value) and not _divides(bound.value):
            first.append((None, bound))
        else:
            changing.append(bound.var)

    def variable_of(division: Any) -> Any:
        if not _is_symbolic(division) or not is_fixed(division):
            return division
        for known, binding in first:
            if known is not None and tvm_ffi.structural_equal(known, division):
                return binding.var
        quotient = type(division)(division.a, _not_zero(division.b))
        binding = tirx.Bind(tirx.Var("invariant", str(division.ty.dtype)), quotient)
        first.append((division, binding))
        return binding.var

    subexpressions = [binding for _, binding in first]
    body = replaced(
        loop.body, (tirx.Bind,), lambda bound: _NOTHING if any(bound.same_as(one) for one in subexpressions) else bound
    )
    body = replaced(body, _DIVISIONS, variable_of)
    if len(first) == len(subexpressions):
        return [], loop
    again = tirx.For(
        loop.loop_var, loop.min, loop.extent, loop.kind, body, loop.thread_binding, loop.annotations, loop.step
    )
    return [binding for _, binding in first], again


def _not_zero(divisor: Any) -> Any:
    """A divisor, or 1 for 0, which it is where the loop does not run."""
    if isinstance(divisor, tirx.Max):  # of 1, by `with_positive_divisor`
        return divisor
    zero, one = (tirx.IntImm(str(divisor.ty.dtype), number) for number in (0, 1))
    return tirx.Select(tirx.EQ(divisor, zero), one, divisor)


_NOTHING = tirx.Evaluate(tirx.IntImm("int32", 0))


def _divides(value: Any) -> bool:
    return bool(nodes_within(value, *_DIVISIONS))


__all__ = ["with_simple_divisions"]
