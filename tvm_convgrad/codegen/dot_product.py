# SPDX-License-Identifier: Apache-2.0
"""Dot products of pairs of bfloat16 that are summed in float32: vdpbf16ps of AVX512-BF16, bfdot of Armv8.6.

A *word* is a lane of 32 bits that holds two bfloat16, neighbours along the reduced axis; the first is in the low half.
Words are moved as float32, whose bits loads, stores, masks and shuffles keep. One instruction does

    sum[lane] += a[lane].low * b[lane].low + a[lane].high * b[lane].high

Both take denormal operands as zero and flush denormal sums to zero. vdpbf16ps rounds to nearest even, after each of the
two products; bfdot rounds the sum of the two and then the total to odd (where the last bit is lost, it is set), unless
the CPU has FEAT_EBF16 and the process has switched it on.
"""

from __future__ import annotations

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.loops import (
    Buffer,
    Expr,
    Index,
    Loops,
    bfloat16_bits,
    convert,
    dtype_of,
    lanes_of,
    load,
    splat,
)
from tvm_convgrad.codegen.packing import shuffle

WORD = "float32"
"""The type that words are moved as."""

HALF = "uint16"
"""The type that one element of a word is moved as."""

NAME, NARROW, NARROW_PAIR = "convgrad_dot_bf16", "convgrad_narrow_bf16", "convgrad_narrow_pair_bf16"
"""The helper functions; the interpreter of kernels knows them by these names."""

LANES = 16
"""Lanes of the instructions of AVX512-BF16."""

NEON_LANES = 4
"""Lanes of bfdot."""

CODE = f"""
define linkonce_odr hidden <16 x float> @{NAME}(<16 x float> %sum, <16 x float> %a, <16 x float> %b) alwaysinline {{
  %x = bitcast <16 x float> %a to <32 x bfloat>
  %y = bitcast <16 x float> %b to <32 x bfloat>
  %r = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sum, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %r
}}
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""
"""The instruction as a function: TVM turns vectors of bfloat16 into others, so that it cannot call the intrinsic."""

NEON_CODE = f"""
define linkonce_odr hidden <4 x float> @{NAME}(<4 x float> %sum, <4 x float> %a, <4 x float> %b) alwaysinline {{
  %x = bitcast <4 x float> %a to <8 x bfloat>
  %y = bitcast <4 x float> %b to <8 x bfloat>
  %r = call <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float> %sum, <8 x bfloat> %x, <8 x bfloat> %y)
  ret <4 x float> %r
}}
declare <4 x float> @llvm.aarch64.neon.bfdot.v4f32.v8bf16(<4 x float>, <8 x bfloat>, <8 x bfloat>)
"""
"""bfdot as a function."""

INSTRUCTIONS = {LANES: CODE, NEON_LANES: NEON_CODE}
"""The dot product by its lanes; a machine's vectors have those of its own."""

NARROW_CODE = f"""
define linkonce_odr hidden <16 x i16> @{NARROW}(<16 x float> %value) alwaysinline {{
  %x = call <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float> %value)
  %r = bitcast <16 x bfloat> %x to <16 x i16>
  ret <16 x i16> %r
}}
declare <16 x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.512(<16 x float>)
"""
"""The rounding to bfloat16 as a function."""

NARROW_PAIR_CODE = f"""
define linkonce_odr hidden <32 x i16> @{NARROW_PAIR}(<16 x float> %first, <16 x float> %second) alwaysinline {{
  %x = call <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float> %second, <16 x float> %first)
  %r = bitcast <32 x bfloat> %x to <32 x i16>
  ret <32 x i16> %r
}}
declare <32 x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.512(<16 x float>, <16 x float>)
"""
"""That of two vectors, which become one."""


def dot_product(loops: Loops, total: Expr, a: Expr, b: Expr) -> Expr:
    """The sum plus the dot products of two vectors of words, as many as an instruction has lanes."""
    lanes = lanes_of(total)
    loops.helper(NAME, INSTRUCTIONS[lanes])
    return tir.call_helper(f"{WORD}x{lanes}", NAME, total, a, b)


def words(low: Expr, high: Expr) -> Expr:
    """The words of two elements, or of two vectors of them, of type HALF."""
    lanes = lanes_of(low)
    if lanes > 1:
        return contiguous_words(shuffle(low, high, [lanes * (i % 2) + i // 2 for i in range(2 * lanes)]))
    return joined_words(low, high)


def joined_words(low: Expr, high: Expr) -> Expr:
    """The same by a shift: vectors that are the first of one word and the second of another are extended once."""
    lanes = lanes_of(low)
    bits = tir.bitwise_or(_wide(low), tir.shift_left(_wide(high), _number(16, lanes)))
    return tir.reinterpret(_vector(WORD, lanes), bits)


def high_halves(low: Expr, high: Expr) -> Expr:
    """The words of two vectors of float32 that are numbers of bfloat16."""
    lanes = lanes_of(low)
    first, second = (tir.reinterpret(_vector("uint32", lanes), each) for each in (low, high))
    bits = tir.bitwise_and(second, _number(0xFFFF0000, lanes))
    return tir.reinterpret(_vector(WORD, lanes), tir.bitwise_or(tir.shift_right(first, _number(16, lanes)), bits))


def word_at(buffer: Buffer, index: Index) -> Expr:
    """The word of two contiguous elements of a buffer of HALF, at any index."""
    return tir.reinterpret(WORD, load(buffer, index, 2))


def contiguous_words(halves: Expr) -> Expr:
    """The words of a vector of type HALF, each of two contiguous elements."""
    return tir.reinterpret(_vector(WORD, lanes_of(halves) // 2), halves)


def low_half(value: Expr) -> Expr:
    """Words with zero in the place of their second elements."""
    lanes = lanes_of(value)
    bits = tir.bitwise_and(tir.reinterpret(_vector("uint32", lanes), value), _number(0xFFFF, lanes))
    return tir.reinterpret(_vector(WORD, lanes), bits)


def as_number(value: Expr, dtype: str) -> Expr:
    """An element or a vector in the type `dtype`; bfloat16 may have the type HALF."""
    return convert(widened(value) if dtype_of(value).startswith(HALF) else value, dtype)


def narrowed(loops: Loops, value: Expr, *, instruction: bool = True, single: bool = True) -> Expr:
    """A vector of float32 as bfloat16 of type HALF, rounded to nearest even.

    With the instruction of AVX512-BF16, for LANES lanes, denormals become zero; else it is integer arithmetic. NaN
    stay NaN.

    A masked store of one truncated lane, such as of one column, is compiled to a store of four bytes by some releases
    of LLVM (`loops._bfloat16`), also of vectors. To avoid it numbers that may be stored so (`single`) are combined with
    the lowest bits of n * (n + 1), which are zero.
    """
    if instruction:
        loops.helper(NARROW, NARROW_CODE)
        return tir.call_helper(f"{HALF}x{LANES}", NARROW, value)
    lanes = lanes_of(value)
    rounded = tir.shift_right(bfloat16_bits(loops.let(value, "value")), _number(16, lanes))
    high = loops.let(tir.Cast(_vector(HALF, lanes), rounded), "high")
    if not single:
        return high
    one = splat(tir.const(1, HALF), lanes)
    return tir.bitwise_xor(high, tir.bitwise_and(high * (high + one), one))


def narrowed_pair(loops: Loops, first: Expr, second: Expr) -> Expr:
    """Two vectors of LANES float32 as one of bfloat16 of type HALF, by the instruction of AVX512-BF16."""
    loops.helper(NARROW_PAIR, NARROW_PAIR_CODE)
    return tir.call_helper(f"{HALF}x{2 * LANES}", NARROW_PAIR, first, second)


def words_of_pair(loops: Loops, low: Expr, high: Expr) -> Expr:
    """The words of two vectors of LANES float32, rounded to bfloat16 by the instruction of AVX512-BF16."""
    pair = narrowed_pair(loops, low, high)
    order = [tir.IntImm("int32", LANES * (i % 2) + i // 2) for i in range(2 * LANES)]
    return contiguous_words(tir.Shuffle([pair], order))


def halves_of(words_: Expr) -> Expr:
    """A vector of words as one of type HALF, with twice as many lanes."""
    return tir.reinterpret(_vector(HALF, 2 * lanes_of(words_)), words_)


def halves_apart(value: Expr) -> tuple[Expr, Expr]:
    """The even and the odd lanes of bfloat16 of type HALF as float32, without a shuffle."""
    lanes = lanes_of(value) // 2
    bits = tir.reinterpret(_vector("uint32", lanes), value)
    even = tir.shift_left(bits, _number(16, lanes))
    odd = tir.bitwise_and(bits, _number(0xFFFF0000, lanes))
    return tir.reinterpret(_vector("float32", lanes), even), tir.reinterpret(_vector("float32", lanes), odd)


def widened(value: Expr) -> Expr:
    """bfloat16 of type HALF as float32; elementwise for vectors."""
    lanes = lanes_of(value)
    return tir.reinterpret(_vector("float32", lanes), tir.shift_left(_wide(value), _number(16, lanes)))


def _wide(value: Expr) -> Expr:
    return tir.Cast(_vector("uint32", lanes_of(value)), value)


def _number(value: int, lanes: int) -> Expr:
    return splat(tir.const(value, "uint32"), lanes)


def _vector(dtype: str, lanes: int) -> str:
    return dtype if lanes == 1 else f"{dtype}x{lanes}"


__all__ = [
    "HALF",
    "LANES",
    "NAME",
    "NARROW",
    "NARROW_PAIR",
    "WORD",
    "as_number",
    "contiguous_words",
    "dot_product",
    "halves_apart",
    "halves_of",
    "high_halves",
    "joined_words",
    "low_half",
    "narrowed",
    "narrowed_pair",
    "widened",
    "word_at",
    "words",
    "words_of_pair",
]
