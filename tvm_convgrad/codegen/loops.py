# SPDX-License-Identifier: Apache-2.0
"""The builder of TIR loop nests: `Loops` collects the statements of one PrimFunc, the functions below make expressions.

All memory is addressed as flat buffers by int32 indices in elements, so kernels refuse tensors of more than
MAX_INDEX / 2 elements. An index may be a Python int, which is folded while the kernel is generated, or an expression.
See the package's docstring for an example.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TypeAlias

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.stack_slots import StackSlots, fits_slot
from tvm_convgrad.codegen.tir import buffer_data, decl_buffer
from tvm_convgrad.codegen.tir import dtype_of as dtype_of
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.geometry import DTYPE_BYTES

Expr: TypeAlias = "tir.Expr"
"""A scalar or vector TIR expression, or a condition."""

Index: TypeAlias = "int | tir.Expr"
"""An int32 index or extent: a number known when the kernel is generated, or an expression of the kernel."""

Buffer: TypeAlias = "tir.Buffer"

INDEX = "int32"

MAX_INDEX = 2**31 - 1
"""The largest int32."""

Extent: TypeAlias = "int | str | tir.Var"
"""An extent of a parameter: a number, the name of a batch known only at run time, or its variable."""

Shapes: TypeAlias = dict[str, tuple[tuple[Extent, ...], str]]
"""Shape and dtype of each parameter of a kernel, by name."""

_KINDS = {
    "serial": tir.ForKind.SERIAL,
    "parallel": tir.ForKind.PARALLEL,
    "vectorized": tir.ForKind.VECTORIZED,
}


class Loops:
    """Collects the statements of one PrimFunc, in the order in which the methods are called."""

    def __init__(self) -> None:
        self._blocks: list[list[tir.Stmt]] = [[]]
        self._panels: list[list[tuple[Buffer, int]]] = [[]]
        self._names: dict[str, int] = {}
        self._slots: list[StackSlots | None] = []
        self._helpers: dict[str, str] = {}

    # -- structure --------------------------------------------------------------------------------------------

    def emit(self, statement: tir.Stmt) -> None:
        """Append a statement to the innermost open block."""
        self._blocks[-1].append(statement)

    @contextmanager
    def loop(self, extent: Index, name: str = "i", kind: str = "serial") -> Iterator[Index]:
        """A loop from 0 to `extent`; yields its variable, or the number 0 where a serial loop runs once.

        Args:
            kind: "serial", "parallel" (over threads) or "vectorized".
        """
        if kind == "serial" and isinstance(extent, int) and extent == 1:
            yield 0
            return
        variable = tir.Var(self._name(name), INDEX)
        self._open()
        # Each thread needs slots of its own, and no slot can be written by a vectorized loop.
        own = kind != "serial" or not self._slots
        if own:
            self._slots.append(None if kind == "vectorized" else StackSlots(self._name))
        yield variable
        slots = self._slots.pop() if own else None
        if slots is not None:
            self._blocks[-1] = [*slots.begin(), *self._blocks[-1], *slots.end()]
        body = self._close()
        self.emit(tir.For(variable, constant(0), expr(extent), _KINDS[kind], body))

    @contextmanager
    def when(self, condition: Expr) -> Iterator[None]:
        """Statements that run only if `condition` holds."""
        self._open()
        yield
        self.emit(tir.IfThenElse(condition, self._close(), None))

    @contextmanager
    def otherwise(self, condition: Expr) -> Iterator[None]:
        """Statements that run only if `condition` does not hold."""
        with self.when(tir.Not(condition)):
            yield

    def let(self, value: Index, name: str = "v") -> Index:
        """Compute a value once and name it; numbers and variables are returned as they are.

        Inside loops the value goes to a stack slot (see `stack_slots`), elsewhere to a TIR variable.
        """
        if isinstance(value, int | tir.IntImm | tir.Var):
            return value
        dtype, lanes = _element_of(value)
        slots = self._slots[-1] if self._slots else None
        if slots is not None and fits_slot(dtype):
            buffer, at = slots.take(dtype, lanes)
            span = _span(at, lanes)
            self.emit(tir.BufferStore(buffer, value, [span]))
            return buffer[span]
        variable = tir.Var(self._name(name), tir.type_of(value))
        self.emit(tir.Bind(variable, value))
        return variable

    def divmod(self, value: Index, divisor: int) -> tuple[Index, Index]:
        """The named quotient and remainder of value >= 0."""
        return self.let(quotient(value, divisor), "q"), self.let(remainder(value, divisor), "r")

    def opaque(self, value: Index, name: str = "v") -> Index:
        """Name an index and hide it from TVM's analysis: long sums of minima cost the simplifier minutes."""
        slot = self.buffer(f"{name}_cell", 1, INDEX)
        self.store(slot, 0, value)
        return self.let(load(slot, 0), name)

    def prefetch(self, buffer: Buffer, index: Index, write: bool = False, near: bool = False) -> None:
        """Prefetch the cache line of an element into L2, or into L1 if `near`.

        It never faults: the index may lie outside of the buffer.
        """
        flags = [constant(i) for i in (int(write), 3 if near else 2, 1)]
        self.emit(tir.prefetch(buffer, expr(index), *flags))

    def finish(self, parameters: Sequence[Buffer], name: str) -> tir.PrimFunc:
        """The PrimFunc of everything emitted; with an empty name it gets one when it is added to a module."""
        body = self._close()
        if self._helpers:
            body = tir.with_helpers(body, "".join(self._helpers.values()))
        function = tir.PrimFunc(list(parameters), body)
        attributes = {tir.SCHEDULED: True, tir.NO_ALIAS: True}
        return function.with_attr({**attributes, "global_symbol": name} if name else attributes)

    def helper(self, name: str, code: str) -> None:
        """Define a function that expressions of the kernel call by `tir.call_helper`; again is the same as once.

        Args:
            name: of the function.
            code: its definition in LLVM's language.
        """
        self._helpers[name] = code

    # -- memory -----------------------------------------------------------------------------------------------

    def buffer(self, name: str, size: Index, dtype: str) -> Buffer:
        """Allocate a flat buffer of the innermost open block (on the stack if under 1 KiB)."""
        result = decl_buffer((size,), dtype, name=self._name(name))
        self.emit(tir.AllocBuffer(result))
        return result

    def panel(self, name: str, size: int, dtype: str) -> Buffer:
        """Allocate a flat buffer and return an alias of it: TVM would analyse for minutes which part of it is used.

        TVM does not see the uses of the alias, and could reuse the memory for another buffer. Therefore one extra
        element is stored to as the first and the last statement of the block, which keeps the memory reserved.
        """
        buffer = self.buffer(name, size + 1, dtype)
        self.store(buffer, size, zero(dtype))
        self._panels[-1].append((buffer, size))
        return self.flat(buffer, size)

    def flat(self, buffer: Buffer, size: Index, dtype: str = "") -> Buffer:
        """A one-dimensional alias of a parameter, as elements of another type of the same bits if `dtype` is given."""
        result = decl_buffer(
            (size,),
            dtype or str(buffer.dtype),
            name=self._name(f"{buffer.name}_flat"),
            data=buffer_data(buffer),
            data_alignment=numpy_dtype(str(buffer.dtype)).itemsize,
        )
        self.emit(tir.DeclBuffer(result, data=buffer_data(buffer)))
        return result

    def table(self, name: str, values: Sequence[int]) -> Buffer:
        """A buffer of constants that loops can index. `LookupTable` avoids the memory where all are equal."""
        result = self.buffer(name, max(1, len(values)), INDEX)
        for position, value in enumerate(values):
            self.store(result, position, constant(value))
        return result

    def store(self, buffer: Buffer, index: Index, value: Expr) -> None:
        """Store a scalar or a vector from `index` on, converted to the buffer's type."""
        (element, lanes), dtype = _element_of(value), str(buffer.dtype)
        if dtype == "bfloat16" and lanes == 1 and element in ("float32", "float64"):
            value = _bfloat16(convert(value, "float32"), index)
        elif element != dtype:
            value = convert(value, dtype)
        self.emit(tir.BufferStore(buffer, value, [_span(index, lanes)]))

    def store_masked(self, buffer: Buffer, index: Index, value: Expr, mask: Expr) -> None:
        """Store the lanes whose mask is true; memory of the others is not written."""
        self.emit(tir.store_masked(buffer, expr(index), value, mask))

    def require(self, condition: Expr, message: str) -> None:
        """Make calls of the kernel raise a ValueError where the condition does not hold."""
        kind, text = (tir.StringImm(words) for words in ("ValueError", message))
        self.emit(tir.AssertStmt(condition, kind, [text]))

    def batch(self, variable: tir.Var, largest: int) -> Index:
        """The batch of a call as an int32 index; calls whose indices would overflow raise a ValueError.

        Args:
            variable: the int64 batch in the parameters' shapes.
            largest: elements per image of the largest tensor or panel.
        """
        limit = MAX_INDEX // 2 // largest
        self.require(variable <= limit, f"this convolution's kernel takes batches of at most {limit}")
        return self.let(tir.Cast(INDEX, variable), "batch")

    def _open(self) -> None:
        self._blocks.append([])
        self._panels.append([])

    def _close(self) -> tir.Stmt:
        for buffer, size in self._panels.pop():
            self.store(buffer, size, zero(str(buffer.dtype)))
        return tir.sequence(self._blocks.pop())

    def _name(self, name: str) -> str:
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        return f"{name}_{number}" if number else name


class LookupTable:
    """Constants that the kernel looks up by an index; without a table in memory where all are equal."""

    def __init__(self, loops: Loops, name: str, values: list[int]) -> None:
        values = values or [0]  # without any values it is looked up only in loops that run zero times
        self._constant = values[0] if len(set(values)) == 1 else None
        self._values = values
        self._table = None if self._constant is not None else loops.table(name, values)

    def __len__(self) -> int:
        return len(self._values)

    def at(self, index: Index) -> Index:
        """The constant at an index."""
        if self._constant is not None:
            return self._constant
        if isinstance(index, int):
            return self._values[index]
        return load(self._table, index)


# ------------------------------------------------------------------------------------------------- expressions


def load(buffer: Buffer, index: Index, lanes: int = 1) -> Expr:
    """One element, or `lanes` contiguous elements as a vector."""
    return buffer[_span(index, lanes)]


def load_masked(buffer: Buffer, index: Index, mask: Expr, lanes: int) -> Expr:
    """The lanes whose mask is true, zero elsewhere; memory of the others is not read."""
    return tir.load_masked(buffer, expr(index), mask, splat(tir.const(0.0, str(buffer.dtype)), lanes))


def lanes_below(first: Index, limit: Index, lanes: int) -> Expr:
    """The mask of the lanes l with first + l < limit."""
    return ramp(first, lanes) < splat(expr(limit), lanes)


def lanes_within(first: Index, limit: Index, lanes: int) -> Expr:
    """The mask of the lanes l with 0 <= first + l < limit."""
    positions = ramp(first, lanes)
    return tir.And(positions >= splat(expr(0), lanes), positions < splat(expr(limit), lanes))


def load_sum(buffer: Buffer, index: Index, lanes: int, count: int, step: int) -> Expr:
    """The sum of `count` elements or vectors, `step` elements apart, added in that order."""
    value = load(buffer, index, lanes)
    for number in range(1, count):
        value = value + load(buffer, index + number * step, lanes)
    return value


def splat(value: Expr, lanes: int) -> Expr:
    """A value broadcast to all lanes of a vector."""
    return tir.Broadcast(value, lanes) if lanes > 1 else value


def ramp(first: Index, lanes: int) -> Expr:
    """The vector (first, first + 1, …)."""
    return tir.Ramp(expr(first), expr(1), lanes)


def zero(dtype: str, lanes: int = 1) -> Expr:
    """A zero, or a vector of zeros."""
    return splat(tir.const(0.0, dtype), lanes)


def convert(value: Expr, dtype: str) -> Expr:
    """A scalar or vector cast to another element type.

    bfloat16 is widened to float32 by shifting its bits: TVM 0.27 does not lower its casts in a Bind, and 0.26 fails on
    vectors of them.
    """
    element, lanes = _element_of(value)
    if element == "bfloat16" and dtype != "bfloat16":
        bits = tir.Cast(_vector("uint32", lanes), tir.reinterpret(_vector("uint16", lanes), value))
        high = tir.shift_left(bits, splat(tir.const(16, "uint32"), lanes))
        element, value = "float32", tir.reinterpret(_vector("float32", lanes), high)
    if element == dtype:
        return value
    return bfloat16_of(value) if (element, dtype) == ("float32", "bfloat16") else tir.Cast(_vector(dtype, lanes), value)


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def bfloat16_bits(value: Expr) -> Expr:
    """The bits of a float32, or of a vector of them, as bfloat16 in the high half of a uint32: to nearest even.

    NaN stay NaN: the rounding would carry those with a large payload, such as NVIDIA's 0x7fffffff, into the sign, and
    make infinity of those with a small one.
    """
    lanes = lanes_of(value)

    def number(bits: int) -> Expr:
        return splat(tir.const(bits, "uint32"), lanes)

    bits = tir.reinterpret(_vector("uint32", lanes), value)
    odd = tir.bitwise_and(tir.shift_right(bits, number(16)), number(1))
    is_nan = tir.bitwise_and(bits, number(0x7FFFFFFF)) > number(0x7F800000)
    return tir.Select(is_nan, tir.bitwise_or(bits, number(0x00400000)), bits + number(0x7FFF) + odd)


def bfloat16_of(value: Expr) -> Expr:
    """A float32, or a vector of them, as bfloat16: `bfloat16_bits`."""
    lanes = lanes_of(value)
    high = tir.shift_right(bfloat16_bits(value), splat(tir.const(16, "uint32"), lanes))
    return tir.reinterpret(_vector("bfloat16", lanes), tir.Cast(_vector("uint16", lanes), high))


def _bfloat16(value: Expr, index: Index) -> Expr:
    """A float32 as bfloat16, rounded to nearest even; `index` is where it is stored.

    LLVM, up to that of TVM 0.27's wheel (22), compiles a masked store of one truncated lane, which it generates for the
    end of a short loop on AVX-512, to a store of four bytes (llvm/llvm-project#179489). To avoid the pattern the
    truncated number is combined with the lowest bit of i * (i + 1), which is always zero, though LLVM does not find
    that out.
    """
    place = tir.Cast("uint16", expr(index))
    hidden = tir.bitwise_and(place * (place + tir.const(1, "uint16")), tir.const(1, "uint16"))
    high = tir.Cast("uint16", tir.shift_right(bfloat16_bits(value), tir.const(16, "uint32")))
    return tir.reinterpret("bfloat16", tir.bitwise_xor(high, hidden))


def lanes_of(value: Expr) -> int:
    """The number of lanes of an expression."""
    return _element_of(value)[1]


def _element_of(value: Expr) -> tuple[str, int]:
    """The type of an expression's elements, and its number of lanes."""
    dtype, _, lanes = dtype_of(value).partition("x")
    return dtype, int(lanes or 1)


def smaller(a: Index, b: Index) -> Index:
    """The minimum of two indices."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return tir.min(expr(a), expr(b))


def larger(a: Index, b: Index) -> Index:
    """The maximum of two indices."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return tir.max(expr(a), expr(b))


def quotient(a: Index, b: int) -> Index:
    """a // b for a >= 0."""
    return a // b if isinstance(a, int) else (a if b == 1 else tir.truncdiv(a, b))


def remainder(a: Index, b: int) -> Index:
    """a % b for a >= 0."""
    return a % b if isinstance(a, int) else (0 if b == 1 else tir.truncmod(a, b))


def ceiling(a: Index, b: int) -> Index:
    """a / b rounded up, for a >= 0."""
    return -(-a // b) if isinstance(a, int) else quotient(a + (b - 1), b)


def within(value: Index, limit: int) -> Expr:
    """The condition 0 <= value < limit."""
    if isinstance(value, int):
        return tir.IntImm("bool", int(0 <= value < limit))
    return tir.And(value >= 0, value < limit)


def less(value: Index, limit: int) -> Expr:
    """The condition value < limit."""
    return value < limit if not isinstance(value, int) else tir.IntImm("bool", int(value < limit))


def choose(condition: Expr, value: Index, other: Index) -> Expr:
    """`value` where the condition holds, else `other`; only the chosen one is evaluated."""
    return tir.if_then_else(condition, expr(value), expr(other))


def _span(index: Index, lanes: int) -> Expr:
    return expr(index) if lanes == 1 else tir.Ramp(expr(index), constant(1), lanes)


def expr(value: Index) -> Expr:
    """A Python number as an int32 constant; expressions are returned as they are."""
    return constant(value) if isinstance(value, int) else value


@cache
def constant(value: int) -> tir.IntImm:
    """An int32 constant; one for each number, as kernels have thousands of few numbers."""
    return tir.IntImm(INDEX, value)


def make_parameter(name: str, shape: Sequence[Extent], dtype: str) -> Buffer:
    """A tensor parameter of the kernel; its alignment is that of an element."""
    return decl_buffer(tuple(shape), dtype, name=name, data_alignment=DTYPE_BYTES[dtype])


def with_variable(shapes: Shapes) -> tuple[Shapes, tir.Var | None]:
    """The shapes with an int64 variable in place of the batch's name, and the variable; None if the batch is known."""
    name = next((extent for shape, _ in shapes.values() for extent in shape if isinstance(extent, str)), None)
    if name is None:
        return shapes, None
    variable = tir.Var(name, "int64")

    def renamed(shape: tuple[Extent, ...]) -> tuple[Extent, ...]:
        return tuple(variable if isinstance(extent, str) else extent for extent in shape)

    return {key: (renamed(shape), dtype) for key, (shape, dtype) in shapes.items()}, variable
