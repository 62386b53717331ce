# SPDX-License-Identifier: Apache-2.0
"""Products of tiles of 16-bit numbers that are summed in float32: TDPBF16PS of AMX-BF16, TDPFP16PS of AMX-FP16.

A CPU with AMX has REGISTERS tile registers of up to ROWS rows of 64 bytes. A row holds up to WORDS words
(`dot_product`), or as many sums in float32. One instruction does, for all rows m of A and all columns n of B,

    C[m, n] += sum over words k of  A[m, k].low * B[k, n].low + A[m, k].high * B[k, n].high

That of bfloat16 takes denormals as zero, that of float16 does not; both flush denormal sums to zero and round to
nearest even. The shapes of the registers are a
state of the thread, which `configure` sets and `release` clears: whoever uses tiles in the same thread later, such as
another library, sets its own. So a work item of a kernel sets them once, and clears them at its end.

Linux keeps no tiles for a process that has not asked for them. `ready` asks on the first call in a process, with
arch_prctl(ARCH_REQ_XCOMP_PERM), and keeps the answer. It is no where the CPU has no AMX, and where a hypervisor, Linux
(before 5.16) or a seccomp filter does not allow it. For float16 it asks the CPU as well: code that is made for Granite
Rapids is also loaded on Sapphire Rapids, which has no such product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.loops import Buffer, Expr, Index, Loops, expr

REGISTERS = 8
"""Tile registers that a kernel uses at once: all."""

ROWS, WORDS = 16, 16
"""The most rows of a tile register, and the most words or sums of a row."""

CONFIGURATION_BYTES = 64
"""Bytes of a configuration: palette, the bytes of a row of each register, and the rows of each."""

PREFIX = "convgrad_tile"
"""What the names of all helper functions begin with; the interpreter of kernels knows them by their names."""

INSTRUCTIONS = {"bfloat16": "amx-bf16", "float16": "amx-fp16"}
"""LLVM's name of the instruction set that multiplies tiles of a type."""

_CLOBBERED = "~{rcx},~{r11},~{memory}"
"""What a call of Linux changes besides the register of its result."""


def _asked_once(variable: str, function: str, question: str) -> str:
    """A function of LLVM IR that asks on the first call of a process, and keeps the answer.

    Args:
        variable: that keeps it: 0 before the first call, then 1 for yes and 2 for no.
        question: lines, each after a line break, that make `%answer`, 1 or 2.
    """
    return f"""
@{variable} = linkonce_odr hidden global i32 0
define linkonce_odr hidden i32 @{function}() noinline {{
  %known = load atomic i32, ptr @{variable} monotonic, align 4
  %asked = icmp ne i32 %known, 0
  br i1 %asked, label %done, label %ask
ask:{question}
  store atomic i32 %answer, ptr @{variable} monotonic, align 4
  br label %done
done:
  %found = phi i32 [ %known, %0 ], [ %answer, %ask ]
  %yes = icmp eq i32 %found, 1
  %r = zext i1 %yes to i32
  ret i32 %r
}}
"""


READY_CODE = _asked_once(
    f"{PREFIX}_granted",
    f"{PREFIX}_ready",
    f"""
  %failed = call i64 asm sideeffect "syscall", "={{ax}},{{ax}},{{di}},{{si}},{_CLOBBERED}"(i64 158, i64 4131, i64 18)
  %none = icmp eq i64 %failed, 0
  %answer = select i1 %none, i32 1, i32 2""",
)
"""`ready` as a function: arch_prctl is call 158 of Linux on x86-64, ARCH_REQ_XCOMP_PERM 4131, tile data feature 18."""

READY_HALF_CODE = _asked_once(
    f"{PREFIX}_granted_half",
    f"{PREFIX}_ready_half",
    f"""
  %words = call {{ i32, i32, i32, i32 }} asm "cpuid", "={{ax}},={{bx}},={{cx}},={{dx}},{{ax}},{{cx}}"(i32 7, i32 1)
  %word = extractvalue {{ i32, i32, i32, i32 }} %words, 0
  %bit = and i32 %word, 2097152
  %has = icmp ne i32 %bit, 0
  %granted = call i32 @{PREFIX}_ready()
  %tiles = icmp ne i32 %granted, 0
  %both = and i1 %has, %tiles
  %answer = select i1 %both, i32 1, i32 2""",
)
"""`ready` for float16: bit 21 of EAX of CPUID's leaf 7, subleaf 1, is AMX-FP16."""

DECLARATIONS = """
declare void @llvm.x86.ldtilecfg(ptr)
declare void @llvm.x86.tilerelease()
declare void @llvm.x86.tilezero(i8 immarg)
declare void @llvm.x86.tileloadd64(i8 immarg, ptr, i64)
declare void @llvm.x86.tilestored64(i8 immarg, ptr, i64)
declare void @llvm.x86.tdpbf16ps(i8 immarg, i8 immarg, i8 immarg)
"""
"""The intrinsics of AMX-BF16."""

HALF_DECLARATION = "declare void @llvm.x86.tdpfp16ps(i8 immarg, i8 immarg, i8 immarg)\n"
"""That of AMX-FP16."""

_INTRINSICS = {
    "configure": "ldtilecfg",
    "release": "tilerelease",
    "zero": "tilezero",
    "load": "tileloadd64",
    "store": "tilestored64",
    "dot": "tdpbf16ps",
    "half": "tdpfp16ps",
}
"""The intrinsic of each helper."""

_PARAMETERS = {"configure": "ptr %at", "load": "ptr %at, i64 %stride", "store": "ptr %at, i64 %stride"}
"""The parameters of those helpers that have any."""


_PRODUCTS = {"bfloat16": "dot", "float16": "half"}
"""The helper that multiplies tiles of a type."""


@dataclass(frozen=True)
class TileGrid:
    """The registers of `pieces` x `columns` tiles of sums, each of the product of a piece of A and a column of B.

    The operands of the shorter side are kept for a step of the reduction, those of the other take turns in one
    register. At times, presumably while the other thread of the core runs, products are slower the more registers hold
    values: 2 x 2 tiles of sums are then 1.4 times as fast with 7 as with 8 (docs/results/amx-emerald-rapids.md).
    """

    pieces: int
    columns: int

    @property
    def count(self) -> int:
        """The registers that it takes."""
        return self.pieces * self.columns + min(self.pieces, self.columns) + 1

    @classmethod
    def most_pieces(cls, columns: int) -> int:
        """The most pieces of a grid of so many columns; 0 if there is no such grid."""
        return max((n for n in range(1, REGISTERS) if cls(n, columns).count <= REGISTERS), default=0)

    @property
    def sums(self) -> list[list[int]]:
        """The registers of sums, by piece and column."""
        return [[piece * self.columns + j for j in range(self.columns)] for piece in range(self.pieces)]

    def shapes(self, rows: int, words: int) -> list[tuple[int, int]]:
        """The shapes of all registers for `configure`: pieces have `rows` rows, and a step of the reduction `words`."""
        sums, a, b = (rows, WORDS), (rows, words), (words, WORDS)
        kept, turns = (b, a) if self._keeps_columns else (a, b)
        return [*[sums] * (self.pieces * self.columns), *[kept] * min(self.pieces, self.columns), turns]

    def add_products(
        self, loops: Loops, load_a: Callable[[int, int], None], load_b: Callable[[int, int], None], dtype: str
    ) -> None:
        """Emit a step: load_a(register, piece) and load_b(register, column) load operands of numbers of `dtype`."""
        first, last = self.pieces * self.columns, self.count - 1
        kept = range(first, last)
        for number, register in enumerate(kept):
            (load_b if self._keeps_columns else load_a)(register, number)
        for number in range(max(self.pieces, self.columns)):
            (load_a if self._keeps_columns else load_b)(last, number)
            for other, register in enumerate(kept):
                if self._keeps_columns:
                    add_product(loops, self.sums[number][other], last, register, dtype)
                else:
                    add_product(loops, self.sums[other][number], register, last, dtype)

    @property
    def _keeps_columns(self) -> bool:
        return self.columns <= self.pieces


def ready(loops: Loops, dtype: str) -> Expr:
    """The condition that the process may use tiles of a type, which is evaluated once, where this is called."""
    name = f"{PREFIX}_ready"
    loops.helper(name, READY_CODE)
    if dtype == "float16":
        name = f"{PREFIX}_ready_half"
        loops.helper(name, READY_HALF_CODE)
    return loops.let(tir.call_helper("int32", name), "tiles_granted") > 0


def configure(loops: Loops, shapes: Sequence[tuple[int, int]]) -> None:
    """Set the shapes of the tile registers of this thread.

    Args:
        loops: of the kernel.
        shapes: the rows, and the words of a row, of each register from number 0 on; the others cannot be used.
    """
    rows = [*(row for row, _ in shapes), *(0 for _ in range(16 - len(shapes)))]
    bytes_ = [*(4 * words for _, words in shapes), *(0 for _ in range(16 - len(shapes)))]
    text = b"".join((bytes([1]), bytes(15), *(n.to_bytes(2, "little") for n in bytes_), bytes(rows)))
    table = loops.buffer("tile_shapes", CONFIGURATION_BYTES // 4, "int32")
    for i in range(0, CONFIGURATION_BYTES, 4):
        loops.store(table, i // 4, tir.IntImm("int32", int.from_bytes(text[i : i + 4], "little")))
    _call(loops, "configure", (), tir.address_of(table[0]))


def release(loops: Loops) -> None:
    """Clear the tile registers of this thread and their shapes."""
    _call(loops, "release", ())


def clear(loops: Loops, register: int) -> None:
    """Set a tile register to zero."""
    _call(loops, "zero", (register,))


def load_tile(loops: Loops, register: int, buffer: Buffer, at: Index, stride: int) -> None:
    """Load a tile register; its row i begins `i * stride` elements of 4 bytes after `at`."""
    _call(loops, "load", (register,), tir.address_of(buffer[expr(at)]), tir.IntImm("int64", 4 * stride))


def store_tile(loops: Loops, register: int, buffer: Buffer, at: Index, stride: int) -> None:
    """Store a tile register, as `load_tile` loads it."""
    _call(loops, "store", (register,), tir.address_of(buffer[expr(at)]), tir.IntImm("int64", 4 * stride))


def add_product(loops: Loops, sums: int, a: int, b: int, dtype: str) -> None:
    """Add the product of registers `a` and `b`, of words of two numbers of a type, to register `sums`."""
    _call(loops, _PRODUCTS[dtype], (sums, a, b))


def _call(loops: Loops, what: str, registers: tuple[int, ...], *arguments: Expr) -> None:
    """Call a helper; the numbers of registers, which are a part of the instruction, are a part of its name."""
    name = "_".join((PREFIX, what, *map(str, registers)))
    loops.helper(PREFIX, DECLARATIONS)
    if what == _PRODUCTS["float16"]:
        loops.helper(f"{PREFIX}_half", HALF_DECLARATION)
    passed = ", ".join((*(f"i8 {number}" for number in registers), *_PARAMETERS.get(what, "").split(", ")))
    loops.helper(
        name,
        f"define linkonce_odr hidden void @{name}({_PARAMETERS.get(what, '')}) alwaysinline {{\n"
        f"  call void @llvm.x86.{_INTRINSICS[what]}({passed.removesuffix(', ')})\n  ret void\n}}\n",
    )
    loops.emit(tir.Evaluate(tir.call_helper("void", name, *arguments)))


__all__ = [
    "INSTRUCTIONS",
    "PREFIX",
    "REGISTERS",
    "ROWS",
    "WORDS",
    "TileGrid",
    "add_product",
    "clear",
    "configure",
    "load_tile",
    "ready",
    "release",
    "store_tile",
]
