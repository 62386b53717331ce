# SPDX-License-Identifier: Apache-2.0
"""A thin builder of TIR loop nests: kernels read as their formula, statement after statement.

Indices are int32: a kernel refuses tensors of more than half of MAX_INDEX elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import ir, tirx
from tvm.tirx.buffer import buffer_data, decl_buffer

from tvm_convgrad.geometry import DTYPE_BYTES
from tvm_convgrad.kernels.cells import Cells, fits_cell

INDEX = "int32"

MAX_INDEX = 2**31 - 1
"""What an index reaches."""

Shapes = dict[str, tuple[tuple[Any, ...], str]]
"""Shape and dtype of each parameter of a kernel, by name."""

StringImm: Any = getattr(ir, "StringImm", None) or tirx.StringImm  # TVM 0.26 has it in tirx

_KINDS = {
    "serial": tirx.ForKind.SERIAL,
    "parallel": tirx.ForKind.PARALLEL,
    "vectorized": tirx.ForKind.VECTORIZED,
}


class Loops:
    """Collects the statements of one PrimFunc."""

    def __init__(self) -> None:
        self._blocks: list[list[Any]] = [[]]
        self._panels: list[list[tuple[Any, int]]] = [[]]
        self._names: dict[str, int] = {}
        self._cells: list[Cells | None] = []

    # -- structure --------------------------------------------------------------------------------------------

    def emit(self, statement: Any) -> None:
        """Append a statement to the innermost open block."""
        self._blocks[-1].append(statement)

    @contextmanager
    def loop(self, extent: Any, name: str = "i", kind: str = "serial") -> Iterator[Any]:
        """A loop from 0 to `extent`; gives its variable, or the number 0 where a serial loop runs once."""
        if kind == "serial" and isinstance(extent, int) and extent == 1:
            yield 0
            return
        variable = tirx.Var(self._name(name), INDEX)
        self._open()
        own = kind != "serial" or not self._cells  # each thread has cells of its own, and none goes through a vector
        if own:
            self._cells.append(None if kind == "vectorized" else Cells(self._name))
        yield variable
        cells = self._cells.pop() if own else None
        if cells is not None:
            self._blocks[-1] = [*cells.begin(), *self._blocks[-1], *cells.end()]
        body = self._close()
        self.emit(tirx.For(variable, tirx.IntImm(INDEX, 0), expr(extent), _KINDS[kind], body))

    @contextmanager
    def when(self, condition: Any) -> Iterator[None]:
        """Statements that run only if `condition` holds."""
        self._open()
        yield
        self.emit(tirx.IfThenElse(condition, self._close(), None))

    @contextmanager
    def otherwise(self, condition: Any) -> Iterator[None]:
        """Statements that run only if `condition` does not hold."""
        with self.when(tirx.Not(condition)):
            yield

    def let(self, value: Any, name: str = "v") -> Any:
        """Keep a value; plain numbers and names stay as they are. In loops it goes to a cell (see `cells`)."""
        if isinstance(value, int | tirx.IntImm | tirx.Var):
            return value
        lanes = lanes_of(value)
        dtype = dtype_of(value).partition("x")[0]
        cells = self._cells[-1] if self._cells else None
        if cells is not None and fits_cell(dtype):
            buffer, at = cells.take(dtype, lanes)
            self.store(buffer, at, value)
            return load(buffer, at, lanes)
        variable = tirx.Var(self._name(name), value.ty)
        self.emit(tirx.Bind(variable, value))
        return variable

    def opaque(self, value: Any, name: str = "v") -> Any:
        """Name an index that no analysis looks through: long sums of minima cost the simplifier minutes."""
        if isinstance(value, int):
            return value
        cell = self.buffer(f"{name}_cell", 1, INDEX)
        self.store(cell, 0, value)
        return self.let(load(cell, 0), name)

    def prefetch(self, buffer: Any, index: Any, write: bool = False, near: bool = False) -> None:
        """Ask for a cache line, into the second level or the first (near); never faults, wherever it points."""
        address = tirx.op.address_of(buffer[expr(index)])
        flags = [tirx.IntImm(INDEX, i) for i in (int(write), 3 if near else 2, 1)]
        self.emit(tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.prefetch", address, *flags)))

    def finish(self, parameters: Sequence[Any], name: str) -> Any:
        """The PrimFunc of everything emitted; an empty name leaves it to whoever adds it to a module."""
        function = tirx.PrimFunc(list(parameters), self._close())
        attributes = {"tirx.is_scheduled": True, "tirx.noalias": True}
        return function.with_attr({**attributes, "global_symbol": name} if name else attributes)

    # -- memory -----------------------------------------------------------------------------------------------

    def buffer(self, name: str, size: int, dtype: str) -> Any:
        """A flat buffer that lives as long as the innermost open block (on the stack if under 1 KiB)."""
        result = decl_buffer((size,), dtype, name=self._name(name))
        self.emit(tirx.AllocBuffer(result))
        return result

    def panel(self, name: str, size: int, dtype: str) -> Any:
        """A flat buffer seen through a second name: TVM then does not analyse, for minutes, which part is used.

        As it knows nothing of the second name's uses, one more element is stored to, first and last in the block:
        until then no other buffer gets this memory.
        """
        buffer = self.buffer(name, size + 1, dtype)
        self.store(buffer, size, zero(dtype))
        self._panels[-1].append((buffer, size))
        return self.flat(buffer, size)

    def flat(self, buffer: Any, size: int) -> Any:
        """A one-dimensional view of a parameter."""
        result = decl_buffer(
            (size,),
            str(buffer.dtype),
            name=self._name(f"{buffer.name}_flat"),
            data=buffer_data(buffer),
            data_alignment=DTYPE_BYTES[str(buffer.dtype)],
        )
        self.emit(tirx.DeclBuffer(result, data=buffer_data(buffer)))
        return result

    def table(self, name: str, values: Sequence[int]) -> Any:
        """Numbers that a loop looks up."""
        result = self.buffer(name, max(1, len(values)), INDEX)
        for position, value in enumerate(values):
            self.store(result, position, tirx.IntImm(INDEX, value))
        return result

    def store(self, buffer: Any, index: Any, value: Any) -> None:
        """Store a scalar or a vector (as wide as `value`) from `index` on, converted to the buffer's type."""
        lanes, dtype = lanes_of(value), str(buffer.dtype)
        single = dtype == "bfloat16" and lanes == 1 and dtype_of(value) in ("float32", "float64")
        stored = _bfloat16(convert(value, "float32"), index) if single else convert(value, dtype)
        self.emit(tirx.BufferStore(buffer, stored, [_span(index, lanes)]))

    def store_masked(self, buffer: Any, index: Any, value: Any, mask: Any) -> None:
        """Store the lanes whose mask is true; the others are not touched."""
        address = tirx.op.address_of(buffer[expr(index)])
        self.emit(tirx.Evaluate(tirx.call_llvm_intrin("void", "llvm.masked.store", value, address, mask)))

    def require(self, condition: Any, message: str) -> None:
        """Refuse a call for which the condition does not hold."""
        kind, text = (StringImm(words) for words in ("ValueError", message))
        make: Any = tirx.AssertStmt  # whose constructor takes the condition first, whatever its signature says
        self.emit(make(condition, kind, [text]))

    def batch(self, variable: Any, largest: int) -> Any:
        """The batch of a call as an index; refuses a call whose indices would not be reached.

        Args:
            largest: elements that the largest tensor or panel has for each image.
        """
        limit = MAX_INDEX // 2 // largest
        self.require(variable <= limit, f"this convolution's kernel takes batches of at most {limit}")
        return self.let(tirx.Cast(INDEX, variable), "batch")

    def _open(self) -> None:
        self._blocks.append([])
        self._panels.append([])

    def _close(self) -> Any:
        for buffer, size in self._panels.pop():
            self.store(buffer, size, zero(str(buffer.dtype)))
        block = self._blocks.pop()
        if not block:
            return tirx.Evaluate(tirx.IntImm(INDEX, 0))
        return block[0] if len(block) == 1 else tirx.SeqStmt(block)

    def _name(self, name: str) -> str:
        number = self._names.get(name, 0)
        self._names[name] = number + 1
        return f"{name}_{number}" if number else name


class Numbers:
    """Numbers looked up at run time; one that never changes needs no table."""

    def __init__(self, loops: Loops, name: str, values: list[int]) -> None:
        values = values or [0]  # of taps that no phase has: looked up by loops that run zero times
        self._constant = values[0] if len(set(values)) == 1 else None
        self._values = values
        self._table = None if self._constant is not None else loops.table(name, values)

    def __len__(self) -> int:
        return len(self._values)

    def at(self, index: Any) -> Any:
        """The number of an index."""
        if self._constant is not None:
            return self._constant
        if isinstance(index, int):
            return self._values[index]
        return load(self._table, index)


# ------------------------------------------------------------------------------------------------- expressions


def load(buffer: Any, index: Any, lanes: int = 1) -> Any:
    """One element, or `lanes` neighbours as a vector."""
    return buffer[_span(index, lanes)]


def load_masked(buffer: Any, index: Any, mask: Any, lanes: int) -> Any:
    """The lanes whose mask is true, zero elsewhere; memory of the others is not read."""
    dtype = str(buffer.dtype)
    address = tirx.op.address_of(buffer[expr(index)])
    zeros = splat(tirx.const(0.0, dtype), lanes)
    return tirx.call_llvm_pure_intrin(f"{dtype}x{lanes}", "llvm.masked.load", address, mask, zeros)


def lanes_below(first: Any, limit: Any, lanes: int) -> Any:
    """The mask of the lanes l with first + l < limit."""
    return ramp(first, lanes) < splat(expr(limit), lanes)


def lanes_within(first: Any, limit: Any, lanes: int) -> Any:
    """The mask of the lanes l with 0 <= first + l < limit."""
    positions = ramp(first, lanes)
    return tirx.And(positions >= splat(expr(0), lanes), positions < splat(expr(limit), lanes))


def load_sum(buffer: Any, index: Any, lanes: int, count: int, step: int) -> Any:
    """The sum of `count` elements or vectors, `step` elements apart, in their order."""
    value = load(buffer, index, lanes)
    for number in range(1, count):
        value = value + load(buffer, index + number * step, lanes)
    return value


def splat(value: Any, lanes: int) -> Any:
    """A vector of one value."""
    return tirx.Broadcast(value, lanes) if lanes > 1 else value


def ramp(first: Any, lanes: int) -> Any:
    """first, first + 1, …"""
    return tirx.Ramp(expr(first), expr(1), lanes)


def zero(dtype: str, lanes: int = 1) -> Any:
    """Zeros."""
    return splat(tirx.const(0.0, dtype), lanes)


def convert(value: Any, dtype: str) -> Any:
    """A scalar or vector in another element type.

    bfloat16 becomes float32 by its bits: TVM 0.27 forgets to lower its casts in a Bind, and 0.26 fails on vectors of
    them.
    """
    lanes = lanes_of(value)
    if dtype_of(value).startswith("bfloat16") and dtype != "bfloat16":
        bits = tirx.Cast(_vector("uint32", lanes), tirx.reinterpret(_vector("uint16", lanes), value))
        high = tirx.shift_left(bits, splat(tirx.const(16, "uint32"), lanes))
        value = tirx.reinterpret(_vector("float32", lanes), high)
    wanted = _vector(dtype, lanes)
    return value if dtype_of(value) == wanted else tirx.Cast(wanted, value)


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


def _bfloat16(value: Any, index: Any) -> Any:
    """A float32 in bfloat16, rounded to nearest even as TVM rounds; `index` is where it goes.

    LLVM before version 22 turns a masked store of one truncated lane, which is what it makes of the end of a short
    loop on AVX-512, into a store of four bytes (llvm/llvm-project#179489). What is stored here is no truncated number,
    but one combined with the lowest bit of i * (i + 1): a zero that LLVM does not see.
    """
    bits = tirx.reinterpret("uint32", value)
    half, one, shift = (tirx.const(number, "uint32") for number in (0x7FFF, 1, 16))
    rounded = bits + half + tirx.bitwise_and(tirx.shift_right(bits, shift), one)
    place = tirx.Cast("uint16", expr(index))
    hidden = tirx.bitwise_and(place * (place + tirx.const(1, "uint16")), tirx.const(1, "uint16"))
    high = tirx.Cast("uint16", tirx.shift_right(rounded, shift))
    return tirx.reinterpret("bfloat16", tirx.bitwise_xor(high, hidden))


def dtype_of(value: Any) -> str:
    """The type of an expression, such as float32x16."""
    return str(getattr(value.ty, "dtype", value.ty))


def lanes_of(value: Any) -> int:
    """The number of lanes of an expression."""
    return int(dtype_of(value).partition("x")[2] or 1)


def smaller(a: Any, b: Any) -> Any:
    """The minimum of two indices."""
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    return tirx.min(expr(a), expr(b))


def larger(a: Any, b: Any) -> Any:
    """The maximum of two indices."""
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    return tirx.max(expr(a), expr(b))


def quotient(a: Any, b: int) -> Any:
    """a // b for a >= 0."""
    return a // b if isinstance(a, int) else (a if b == 1 else tirx.truncdiv(a, b))


def remainder(a: Any, b: int) -> Any:
    """a % b for a >= 0."""
    return a % b if isinstance(a, int) else (0 if b == 1 else tirx.truncmod(a, b))


def ceiling(a: Any, b: int) -> Any:
    """a / b rounded up, for a >= 0."""
    return -(-a // b) if isinstance(a, int) else quotient(a + (b - 1), b)


def within(value: Any, limit: int) -> Any:
    """0 <= value < limit as a condition."""
    if isinstance(value, int):
        return tirx.IntImm("bool", int(0 <= value < limit))
    return tirx.And(value >= 0, value < limit)


def less(value: Any, limit: int) -> Any:
    """value < limit as a condition."""
    return value < limit if not isinstance(value, int) else tirx.IntImm("bool", int(value < limit))


def choose(condition: Any, value: Any, other: Any) -> Any:
    """`value` (evaluated only then) where the condition holds, else `other`."""
    return tirx.if_then_else(condition, expr(value), expr(other))


def _span(index: Any, lanes: int) -> Any:
    return expr(index) if lanes == 1 else tirx.Ramp(expr(index), tirx.IntImm(INDEX, 1), lanes)


def expr(value: Any) -> Any:
    """A Python number as an index; expressions as they are."""
    return tirx.IntImm(INDEX, value) if isinstance(value, int) else value


def make_parameter(name: str, shape: Sequence[Any], dtype: str) -> Any:
    """A tensor parameter of the kernel, aligned to its elements only."""
    return decl_buffer(tuple(shape), dtype, name=name, data_alignment=DTYPE_BYTES[dtype])


def with_variable(shapes: Shapes) -> tuple[Shapes, Any]:
    """The shapes with an int64 variable for the name of the batch, and the variable; None if they have no name."""
    name = next((extent for shape, _ in shapes.values() for extent in shape if isinstance(extent, str)), None)
    if name is None:
        return shapes, None
    variable = tirx.Var(name, "int64")

    def renamed(shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(variable if isinstance(extent, str) else extent for extent in shape)

    return {key: (renamed(shape), dtype) for key, (shape, dtype) in shapes.items()}, variable
