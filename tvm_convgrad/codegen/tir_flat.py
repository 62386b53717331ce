# SPDX-License-Identifier: Apache-2.0
"""The names of `tir.py` over `tvm.tirx` of TVM from 0.26 on, whose statements are a flat sequence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import ir, tirx
from tvm.ir import Expr
from tvm.tirx import (
    EQ,
    AllocBuffer,
    And,
    AssertStmt,
    AttrStmt,
    Bind,
    Broadcast,
    Buffer,
    BufferStore,
    Cast,
    DeclBuffer,
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
    SeqStmt,
    Shuffle,
    Stmt,
    Var,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    call_extern,
    call_llvm_intrin,
    call_llvm_pure_intrin,
    const,
    if_then_else,
    isnan,
    max,  # the names are TVM's
    min,
    reinterpret,
    shift_left,
    shift_right,
    truncdiv,
    truncmod,
)
from tvm.tirx.buffer import buffer_data, decl_buffer
from tvm.tirx.op import address_of

StringImm = getattr(ir, "StringImm", None) or tirx.StringImm  # TVM 0.26 has it in tirx

SCHEDULED, NO_ALIAS = "tirx.is_scheduled", "tirx.noalias"
"""Attributes of a PrimFunc: it needs no schedule, and its parameters are distinct tensors."""

DOT_PRODUCTS_FROM_LLVM = 17
"""The first version of LLVM whose dot products take vectors of bfloat16."""

HALF_VECTORS = True
"""Whether masked loads and stores of vectors of 16-bit elements, and their conversions, are instructions."""


def call_helper(dtype: str, name: str, *arguments: Expr) -> Expr:
    """A call of a helper function, which `with_helpers` defines."""
    return call_extern(dtype, name, *arguments)


def with_helpers(body: Stmt, code: str) -> Stmt:
    """The body of a function that calls helpers, whose definitions are text in LLVM's language."""
    return AttrStmt(IntImm("int32", 0), "pragma_import_llvm", StringImm(code), body)


def sequence(statements: Sequence[Stmt]) -> Stmt:
    """The statements of a block, one after another."""
    if not statements:
        return Evaluate(IntImm("int32", 0))
    return statements[0] if len(statements) == 1 else SeqStmt(statements)


def load_masked(buffer: Buffer, index: Expr, mask: Expr, zeros: Expr) -> Expr:
    """The vector from `index` on in the lanes whose mask is true, `zeros` in the others, whose memory is not read."""
    return call_llvm_pure_intrin(dtype_of(zeros), "llvm.masked.load", address_of(buffer[index]), mask, zeros)


def store_masked(buffer: Buffer, index: Expr, value: Expr, mask: Expr) -> Stmt:
    """Store the lanes whose mask is true; memory of the others is not written."""
    return Evaluate(call_llvm_intrin("void", "llvm.masked.store", value, address_of(buffer[index]), mask))


def prefetch(buffer: Buffer, index: Expr, *flags: Expr) -> Stmt:
    """Prefetch an element; the flags are those of LLVM's intrinsic."""
    return Evaluate(call_llvm_intrin("void", "llvm.prefetch", address_of(buffer[index]), *flags))


def product(broadcast: Expr, value: Expr) -> Expr:
    """A broadcast scalar times a vector, for a sum that stays in a register."""
    return broadcast * value


def type_of(value: Expr) -> Any:
    """The type of an expression, as `Var` takes it."""
    return value.ty


def dtype_of(value: Expr) -> str:
    """The type of an expression, such as float32x16."""
    return str(getattr(value.ty, "dtype", value.ty))


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
