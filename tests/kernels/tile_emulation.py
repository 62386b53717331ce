"""Instructions of AMX and AVX512-BF16 in plain LLVM IR: a kernel of AMX runs on CPUs that have only AVX-512, with the
same loop nest, addresses and shapes.

`emulated` replaces the helper functions of a kernel, each of which is one instruction, by functions of the same names.
Registers and their shapes are variables of the thread. What the hardware refuses (a register without a shape, operands
whose shapes do not fit) ends the process.
"""

import re

from tvm import tirx

from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.dot_product import NARROW, NARROW_PAIR
from tvm_convgrad.codegen.tile_product import PREFIX

COMMON = """
@tiles = linkonce_odr hidden thread_local global [8 x [256 x i32]] zeroinitializer
@shapes = linkonce_odr hidden thread_local global [64 x i8] zeroinitializer

define linkonce_odr hidden i32 @rows(i32 %n) {
  %at = add i32 %n, 48
  %p = getelementptr i8, ptr @shapes, i32 %at
  %v = load i8, ptr %p
  %r = zext i8 %v to i32
  ret i32 %r
}

define linkonce_odr hidden i32 @words(i32 %n) {
  %twice = shl i32 %n, 1
  %at = add i32 %twice, 16
  %p = getelementptr i8, ptr @shapes, i32 %at
  %v = load i16, ptr %p, align 1
  %w = lshr i16 %v, 2
  %r = zext i16 %w to i32
  ret i32 %r
}

define linkonce_odr hidden ptr @element(i32 %n, i32 %row, i32 %word) {
  %r = shl i32 %row, 4
  %i = add i32 %r, %word
  %p = getelementptr [8 x [256 x i32]], ptr @tiles, i32 0, i32 %n, i32 %i
  ret ptr %p
}

define linkonce_odr hidden void @check(i1 %good) {
  br i1 %good, label %done, label %bad
bad:
  call void @llvm.trap()
  unreachable
done:
  ret void
}
declare void @llvm.trap()

define linkonce_odr hidden void @move(i32 %n, ptr %at, i64 %stride, i1 %stores) {
entry:
  %rows = call i32 @rows(i32 %n)
  %words = call i32 @words(i32 %n)
  %some = icmp ne i32 %rows, 0
  call void @check(i1 %some)
  br i1 %stores, label %outer, label %clear
clear:
  %tile = call ptr @element(i32 %n, i32 0, i32 0)
  call void @llvm.memset.p0.i64(ptr %tile, i8 0, i64 1024, i1 false)
  br label %outer
outer:
  %r = phi i32 [ 0, %entry ], [ 0, %clear ], [ %r1, %next ]
  br label %inner
inner:
  %w = phi i32 [ 0, %outer ], [ %w1, %step ]
  %r64 = zext i32 %r to i64
  %off = mul i64 %r64, %stride
  %row = getelementptr i8, ptr %at, i64 %off
  %memory = getelementptr i32, ptr %row, i32 %w
  %register = call ptr @element(i32 %n, i32 %r, i32 %w)
  %to = select i1 %stores, ptr %memory, ptr %register
  %from = select i1 %stores, ptr %register, ptr %memory
  %v = load i32, ptr %from, align 4
  store i32 %v, ptr %to, align 4
  br label %step
step:
  %w1 = add i32 %w, 1
  %more = icmp ult i32 %w1, %words
  br i1 %more, label %inner, label %next
next:
  %r1 = add i32 %r, 1
  %again = icmp ult i32 %r1, %rows
  br i1 %again, label %outer, label %done
done:
  ret void
}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)

define linkonce_odr hidden float @half(i32 %word, i1 %high) {
  %low = shl i32 %word, 16
  %top = and i32 %word, -65536
  %bits = select i1 %high, i32 %top, i32 %low
  %v = bitcast i32 %bits to float
  ret float %v
}

define linkonce_odr hidden float @half16(i32 %word, i1 %high) {
  %top = lshr i32 %word, 16
  %bits = select i1 %high, i32 %top, i32 %word
  %low = trunc i32 %bits to i16
  %v = bitcast i16 %low to half
  %r = fpext half %v to float
  ret float %r
}

define linkonce_odr hidden float @element_of(i32 %word, i1 %high, i1 %float16) {
  br i1 %float16, label %half, label %bfloat
half:
  %h = call float @half16(i32 %word, i1 %high)
  ret float %h
bfloat:
  %b = call float @half(i32 %word, i1 %high)
  ret float %b
}

define linkonce_odr hidden void @multiply(i32 %c, i32 %a, i32 %b, i1 %float16) {
entry:
  %m = call i32 @rows(i32 %c)
  %n = call i32 @words(i32 %c)
  %k = call i32 @words(i32 %a)
  %am = call i32 @rows(i32 %a)
  %bk = call i32 @rows(i32 %b)
  %bn = call i32 @words(i32 %b)
  %some = icmp ne i32 %m, 0
  call void @check(i1 %some)
  %same_m = icmp eq i32 %m, %am
  call void @check(i1 %same_m)
  %same_n = icmp eq i32 %n, %bn
  call void @check(i1 %same_n)
  %same_k = icmp eq i32 %k, %bk
  call void @check(i1 %same_k)
  br label %rows
rows:
  %i = phi i32 [ 0, %entry ], [ %i1, %next_row ]
  br label %words
words:
  %w = phi i32 [ 0, %rows ], [ %w1, %next_word ]
  %ap = call ptr @element(i32 %a, i32 %i, i32 %w)
  %av = load i32, ptr %ap
  %al = call float @element_of(i32 %av, i1 false, i1 %float16)
  %ah = call float @element_of(i32 %av, i1 true, i1 %float16)
  br label %columns
columns:
  %j = phi i32 [ 0, %words ], [ %j1, %columns ]
  %bp = call ptr @element(i32 %b, i32 %w, i32 %j)
  %bv = load i32, ptr %bp
  %bl = call float @element_of(i32 %bv, i1 false, i1 %float16)
  %bh = call float @element_of(i32 %bv, i1 true, i1 %float16)
  %cp = call ptr @element(i32 %c, i32 %i, i32 %j)
  %old = load float, ptr %cp
  %first = call float @llvm.fma.f32(float %al, float %bl, float %old)
  %both = call float @llvm.fma.f32(float %ah, float %bh, float %first)
  store float %both, ptr %cp
  %j1 = add i32 %j, 1
  %more = icmp ult i32 %j1, %n
  br i1 %more, label %columns, label %next_word
next_word:
  %w1 = add i32 %w, 1
  %more_words = icmp ult i32 %w1, %k
  br i1 %more_words, label %words, label %next_row
next_row:
  %i1 = add i32 %i, 1
  %more_rows = icmp ult i32 %i1, %m
  br i1 %more_rows, label %rows, label %done
done:
  ret void
}
declare float @llvm.fma.f32(float, float, float)
"""

ROUNDING = f"""
define linkonce_odr hidden <16 x i16> @{NARROW}(<16 x float> %value) {{
  %bits = bitcast <16 x float> %value to <16 x i32>
  %high = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %high, splat (i32 1)
  %half = add <16 x i32> %odd, splat (i32 32767)
  %rounded = add <16 x i32> %bits, %half
  %top = lshr <16 x i32> %rounded, splat (i32 16)
  %r = trunc <16 x i32> %top to <16 x i16>
  ret <16 x i16> %r
}}

define linkonce_odr hidden <32 x i16> @{NARROW_PAIR}(<16 x float> %first, <16 x float> %second) {{
  %a = call <16 x i16> @{NARROW}(<16 x float> %first)
  %b = call <16 x i16> @{NARROW}(<16 x float> %second)
  %r = shufflevector <16 x i16> %a, <16 x i16> %b, <32 x i32> <{", ".join(f"i32 {i}" for i in range(32))}>
  ret <32 x i16> %r
}}
"""
"""The rounding of one vector and of two to bfloat16, to nearest even."""

BODIES = {
    "configure": """
  call void @llvm.memcpy.p0.p0.i64(ptr @shapes, ptr %at, i64 64, i1 false)
  call void @llvm.memset.p0.i64(ptr @tiles, i8 0, i64 8192, i1 false)""",
    "release": """
  call void @llvm.memset.p0.i64(ptr @shapes, i8 0, i64 64, i1 false)""",
    "zero": """
  %tile = call ptr @element(i32 {0}, i32 0, i32 0)
  call void @llvm.memset.p0.i64(ptr %tile, i8 0, i64 1024, i1 false)""",
    "load": """
  call void @move(i32 {0}, ptr %at, i64 %stride, i1 false)""",
    "store": """
  call void @move(i32 {0}, ptr %at, i64 %stride, i1 true)""",
    "dot": """
  call void @multiply(i32 {0}, i32 {1}, i32 {2}, i1 false)""",
    "half": """
  call void @multiply(i32 {0}, i32 {1}, i32 {2}, i1 true)""",
}
DEFINED = re.compile(rf"define [^@]*@({PREFIX}_(\w+?)((?:_\d+)*))(\([^)]*\))[^{{]*{{.*?\n}}", re.DOTALL)


def emulated(function: tirx.PrimFunc, *, granted: bool = True) -> tirx.PrimFunc:
    """The kernel with other helper functions; `granted` is whether the process may use tiles."""
    attribute = function.body
    assert attribute.attr_key == "pragma_import_llvm"

    def replaced(match: re.Match[str]) -> str:
        name, what, numbers, parameters = match.groups()
        if what in ("ready", "ready_half"):
            return f"define linkonce_odr hidden i32 @{name}() {{\n  ret i32 {int(granted)}\n}}"
        body = BODIES[what].format(*numbers.split("_")[1:])
        return f"define linkonce_odr hidden void @{name}{parameters} {{{body}\n  ret void\n}}"

    code = DEFINED.sub(replaced, attribute.value.value)
    code = re.sub(rf"define [^@]*@({NARROW}|{NARROW_PAIR})\(.*?\n}}\n", "", code, flags=re.DOTALL)
    code = re.sub(r"declare [^@\n]*@llvm\.x86\.(tile|ldtile|tdp|avx512bf16)[^\n]*\n", "", code)
    assert "llvm.x86." not in code
    return function.with_body(tir.with_helpers(attribute.body, COMMON + ROUNDING + code))
