# SPDX-License-Identifier: Apache-2.0
"""The TIR that kernels are written in: the names of `tvm.tirx` that the builder and the kernels use.

Kernels import TIR from here and never from TVM itself, so that the TVM in use is known to this file alone.
"""

from __future__ import annotations

from tvm import ir, tirx
from tvm.ir import Expr
from tvm.tirx import (
    EQ,
    AllocBuffer,
    And,
    AssertStmt,
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
    bitwise_xor,
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

__all__ = [
    "EQ",
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
    "SeqStmt",
    "Shuffle",
    "Stmt",
    "StringImm",
    "Var",
    "address_of",
    "bitwise_and",
    "bitwise_xor",
    "buffer_data",
    "call_llvm_intrin",
    "call_llvm_pure_intrin",
    "const",
    "decl_buffer",
    "if_then_else",
    "isnan",
    "max",
    "min",
    "reinterpret",
    "shift_left",
    "shift_right",
    "truncdiv",
    "truncmod",
]
