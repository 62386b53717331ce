# SPDX-License-Identifier: Apache-2.0
"""The names of `tir.py` over `tvm.tir` of TVM up to 0.19 (it has Relay), whose allocations, aliases and lets nest.

There `Allocate`, `DeclBuffer`, `LetStmt` and `AssertStmt` have a body, where newer versions write a flat sequence. So
the constructors of the flat forms give an `OpenStatement` here, and `sequence` makes what follows it in a block its
body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tvm import DataType, tir
from tvm.ir import PrimExpr as Expr
from tvm.tir import (
    EQ,
    And,
    Broadcast,
    Buffer,
    BufferStore,
    Cast,
    Evaluate,
    For,
    ForKind,
    IfThenElse,
    IntImm,
    Max,
    Min,
    Not,
    Or,
    PrimFunc,
    Ramp,
    Select,
    Shuffle,
    Stmt,
    StringImm,
    Var,
    address_of,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    const,
    if_then_else,
    isnan,
    max,
    min,
    reinterpret,
    shift_left,
    shift_right,
    truncdiv,
    truncmod,
)

from tvm_convgrad.core.errors import UnsupportedError

VOID = "void"

SCHEDULED, NO_ALIAS = "tir.is_scheduled", "tir.noalias"
"""Attributes of a PrimFunc: it needs no schedule, and its parameters are distinct tensors."""

DOT_PRODUCTS_FROM_LLVM = 1 << 30
"""Never: the LLVM of these versions of TVM is older than what dot products of bfloat16 need."""

HALF_VECTORS = False
"""The LLVM of these versions of TVM takes vectors of 16-bit floats apart."""


def call_helper(dtype: str, name: str, *arguments: Expr) -> Expr:
    """Helper functions are not used with these versions of TVM."""
    raise UnsupportedError(f"{name}: kernels for TVM with Relay have no helper functions; use TVM 0.26 or later")


def with_helpers(body: Stmt, code: str) -> Stmt:
    """Helper functions are not used with these versions of TVM."""
    raise UnsupportedError("kernels for TVM with Relay have no helper functions; use TVM 0.26 or later")


def decl_buffer(shape: Sequence[int | Expr], dtype: str, **options: Any) -> Buffer:
    """A buffer; TVM puts small ones of scope "global" on the stack, and asks its runtime for the memory of others."""
    return tir.decl_buffer(shape, dtype, **{"scope": "global", **options})


class OpenStatement(NamedTuple):
    """A statement that still lacks its body: the statements that follow it in its block.

    Attributes:
        close: makes the statement from its body.
    """

    close: Callable[[Stmt], Stmt]


def Bind(variable: Var, value: Expr) -> OpenStatement:  # the flat form's name
    """Name a value."""
    return OpenStatement(lambda body: tir.LetStmt(variable, value, body))


def AllocBuffer(buffer: Buffer) -> OpenStatement:
    """Allocate a flat buffer."""

    # Without a DeclBuffer: TVM's CompactBufferAllocation fails on buffers that are declared and not used.
    always = IntImm("bool", 1)
    return OpenStatement(lambda body: tir.Allocate(buffer.data, buffer.dtype, buffer.shape, always, body))


def DeclBuffer(buffer: Buffer, data: Var) -> OpenStatement:
    """Declare an alias of memory; `data` is what `decl_buffer` was given."""
    assert buffer.data.same_as(data)
    return OpenStatement(lambda body: tir.DeclBuffer(buffer, body))


def AssertStmt(condition: Expr, kind: StringImm, message: Sequence[StringImm]) -> OpenStatement:
    """Raise where a condition does not hold; this TVM's assertions have no kind of error."""
    text = "".join(part.value for part in message)
    return OpenStatement(lambda body: tir.AssertStmt(condition, text, body))


def sequence(statements: Sequence[Stmt | OpenStatement]) -> Stmt:
    """The statements of a block, one after another."""
    parts: list[Stmt] = []  # of the block's end, backwards
    for statement in reversed(statements):
        if isinstance(statement, OpenStatement):
            parts = [statement.close(_joined(parts[::-1]))]
        else:
            parts.append(statement)
    return _joined(parts[::-1])


def _joined(statements: list[Stmt]) -> Stmt:
    if not statements:
        return Evaluate(IntImm("int32", 0))
    return statements[0] if len(statements) == 1 else tir.SeqStmt(statements)


def load_masked(buffer: Buffer, index: Expr, mask: Expr, zeros: Expr) -> Expr:
    """The vector from `index` on in the lanes whose mask is true, `zeros` in the others, whose memory is not read."""
    address, alignment = _vector_address(buffer, index, mask)
    return _call(tir.call_llvm_pure_intrin, zeros.dtype, "llvm.masked.load", address, alignment, mask, zeros)


def store_masked(buffer: Buffer, index: Expr, value: Expr, mask: Expr) -> Stmt:
    """Store the lanes whose mask is true; memory of the others is not written."""
    address, alignment = _vector_address(buffer, index, mask)
    return Evaluate(_call(tir.call_llvm_intrin, VOID, "llvm.masked.store", value, address, alignment, mask))


def prefetch(buffer: Buffer, index: Expr, *flags: Expr) -> Stmt:
    """Prefetch an element; the flags are those of LLVM's intrinsic."""
    return Evaluate(_call(tir.call_llvm_intrin, "int32", "llvm.prefetch", address_of(buffer[index]), *flags))


def _vector_address(buffer: Buffer, index: Expr, mask: Expr) -> tuple[Expr, Expr]:
    """The address of as many elements as a mask has lanes, as LLVM's pointer to a vector, and its alignment."""
    lanes = int(mask.dtype.partition("x")[2])
    place = Ramp(index, IntImm("int32", 1), lanes)
    return address_of(buffer[place]), IntImm("int32", DataType(buffer.dtype).bits // 8)


def _call(call: Callable[..., Expr], dtype: str, name: str, *arguments: Expr) -> Expr:
    """A call of an LLVM intrinsic, which this TVM finds by the types of all arguments."""
    return call(dtype, name, const(len(arguments), "uint32"), *arguments)


def buffer_data(buffer: Buffer) -> Var:
    """The variable of a buffer's memory."""
    return buffer.data


def product(broadcast: Expr, value: Expr) -> Expr:
    """A broadcast scalar times a vector, for a sum that stays in a register.

    In the other order LLVM 10 lets the sum take the register of the broadcast, and spills: up to twice the time.
    """
    return value * broadcast


def type_of(value: Expr) -> Any:
    """The type of an expression, as `Var` takes it."""
    return value.dtype


def dtype_of(value: Expr) -> str:
    """The type of an expression, such as float32x16."""
    return str(value.dtype)


__all__ = [
    "DOT_PRODUCTS_FROM_LLVM",
    "EQ",
    "HALF_VECTORS",
    "NO_ALIAS",
    "SCHEDULED",
    "AllocBuffer",
    "And",
    "AssertStmt",
    "Bind",
    "Broadcast",
    "Buffer",
    "BufferStore",
    "Cast",
    "DeclBuffer",
    "Evaluate",
    "Expr",
    "For",
    "ForKind",
    "IfThenElse",
    "IntImm",
    "Max",
    "Min",
    "Not",
    "Or",
    "PrimFunc",
    "Ramp",
    "Select",
    "Shuffle",
    "Stmt",
    "StringImm",
    "Var",
    "address_of",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "buffer_data",
    "call_helper",
    "const",
    "decl_buffer",
    "dtype_of",
    "if_then_else",
    "isnan",
    "load_masked",
    "max",
    "min",
    "prefetch",
    "product",
    "reinterpret",
    "sequence",
    "shift_left",
    "shift_right",
    "store_masked",
    "truncdiv",
    "truncmod",
    "type_of",
    "with_helpers",
]
