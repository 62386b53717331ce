# SPDX-License-Identifier: Apache-2.0
"""The curated set of CUTLASS's implicit-GEMM kernels, as tables, and which of them computes a problem.

A kernel is a direction with its iterators (FORMS) and the way in which tiles are multiplied (MATHS); types, alignments
and the GPU it is compiled for make an Instance of it, which is one source file. Source: CUTLASS 4.1, "Implicit GEMM
Convolution" in its documentation, and the checks of `can_implement` in its iterators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.geometry import DTYPE_BYTES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.offload.cudnn.devices import DEVICES

if TYPE_CHECKING:
    from tvm_convgrad.core.epilogue import Epilogue

VECTOR_BYTES = 16
"""The widest access to global memory."""

ASYNC_BYTES = 4
"""The narrowest access that cp.async has; what is narrower goes through registers, in kernels of two stages."""

MASK_TAPS = 32
"""Optimized iterators keep a bit for each tap of an axis of the kernel."""


@dataclass(frozen=True)
class Form:
    """A direction with its iterators: the template and its arguments.

    Attributes:
        direction: in the catalogue's words.
        template: after DefaultConv2d.
        iterator: Optimized, or Analytic, which computes each address again and has no limit on kernels.
        strides: Strided, or Unity for dgrad without strides.
    """

    direction: str
    template: str
    iterator: str
    strides: str

    @property
    def is_strided_dgrad(self) -> bool:
        """Whether it is the kernel of its own that CUTLASS has for dgrad with strides."""
        return self.direction == "backward_data" and self.strides == "Strided"

    @property
    def name(self) -> str:
        """Such as dgrad_unity_optimized."""
        own = f"_{self.strides.lower()}" if self.direction == "backward_data" else ""
        return f"{self.template.lower()}{own}_{self.iterator.lower()}"


FORMS = (
    Form("forward", "Fprop", "Optimized", "Strided"),
    Form("forward", "Fprop", "Analytic", "Strided"),
    Form("backward_data", "Dgrad", "Optimized", "Unity"),
    Form("backward_data", "Dgrad", "Analytic", "Unity"),
    Form("backward_data", "Dgrad", "Optimized", "Strided"),
    Form("backward_data", "Dgrad", "Analytic", "Strided"),
    Form("backward_weight", "Wgrad", "Optimized", "Strided"),
)


@dataclass(frozen=True)
class Math:
    """How tiles are multiplied; sums are float32.

    Attributes:
        operand: element type of both operands.
        unit: TensorOp, or Simt for plain multiply-adds.
        operator: after OpMultiplyAdd; FastF32 is the sum of three products of tf32, nearly as exact as float32.
        arch: the least SM, times ten.
        instruction, tile, warp: (m, n, k) of one instruction, of a block's tile, of a warp's.
        stages: tiles in shared memory.
    """

    operand: str
    unit: str
    operator: str
    arch: int
    instruction: tuple[int, int, int]
    tile: tuple[int, int, int]
    warp: tuple[int, int, int]
    stages: int


MATHS = {
    "f16": Math("float16", "TensorOp", "", 80, (16, 8, 16), (128, 128, 32), (64, 64, 32), 4),
    "f16_narrow": Math("float16", "TensorOp", "", 80, (16, 8, 16), (128, 128, 32), (64, 64, 32), 2),
    "f16_turing": Math("float16", "TensorOp", "", 75, (16, 8, 8), (128, 128, 32), (64, 64, 32), 2),
    "bf16": Math("bfloat16", "TensorOp", "", 80, (16, 8, 16), (128, 128, 32), (64, 64, 32), 4),
    "bf16_narrow": Math("bfloat16", "TensorOp", "", 80, (16, 8, 16), (128, 128, 32), (64, 64, 32), 2),
    "tf32": Math("float32", "TensorOp", "", 80, (16, 8, 8), (128, 128, 16), (64, 64, 16), 4),
    "3xtf32": Math("float32", "TensorOp", "FastF32", 80, (16, 8, 8), (128, 128, 16), (64, 64, 16), 3),
    "simt": Math("float32", "Simt", "", 50, (1, 1, 1), (128, 128, 8), (32, 64, 8), 2),
}
"""By name. On Turing there is no cp.async, and f16 alone; "narrow" is for alignments that cp.async lacks."""

LEAST_TILES = 4
"""Tiles of the sum that a slice has at the least."""


@dataclass(frozen=True)
class Instance:
    """A kernel for certain types, alignments and GPUs: one source file, one library.

    Attributes:
        form, math: of FORMS and MATHS.
        output: element type that the kernel writes.
        result: element type of the result; where it is not `output`, slices are summed and rounded by another kernel.
        alignments: elements of one access to the operands and to the output.
        relu: whether the output is its maximum with zero.
        arch: SM that it is compiled for, times ten.
    """

    form: Form
    math: str
    output: str
    result: str
    alignments: tuple[int, int, int]
    relu: bool
    arch: int

    @property
    def name(self) -> str:
        """Such as wgrad_optimized_f16_128x128x32_8x8x4_float32."""
        tile = "x".join(map(str, MATHS[self.math].tile))
        aligned = "x".join(map(str, self.alignments))
        slices = "" if self.output == self.result else f"_of_{self.output}_slices"
        return f"{self.form.name}_{self.math}_{tile}_{aligned}_{self.result}{slices}" + "_relu" * self.relu


@dataclass(frozen=True)
class Choice:
    """An instance, and the number of slices of its sum (split-K): 1 is whole."""

    instance: Instance
    slices: int


def choose(
    direction: str, problem: ConvProblem, epilogue: Epilogue, arch: int, float32: str, batch: int
) -> Choice | str:
    """The instance that computes a direction of a problem that the rules take, or why there is none for this GPU.

    Args:
        arch: SM times ten, at least 75.
        float32: the math of float32 operands: "simt", "tf32" or "3xtf32".
        batch: for which slices are counted, where the problem's is symbolic.
    """
    tensors = {name: dtype for name, (_, dtype) in problem.tensors.items()}
    operand, result = tensors[DIRECTIONS[direction].operands[0]], tensors[DIRECTIONS[direction].result]
    channels = _contiguous(direction, problem)
    aligned = (_alignment(channels[0], operand), _alignment(channels[1], operand))
    if operand == "bfloat16" and arch < MATHS["bf16"].arch:
        return f"bfloat16 on sm_{arch}; tensor cores have it from sm_{MATHS['bf16'].arch} on"
    name, form = _math(operand, aligned, arch, float32), _form(direction, problem)
    vector = VECTOR_BYTES // DTYPE_BYTES[operand]
    two_stages = MATHS[name].unit == "TensorOp" and MATHS[name].stages == 2
    if form.is_strided_dgrad and two_stages and set(aligned) != {vector}:
        # TileIteratorStridedDgrad of CUTLASS 4.1 loads the first part of a vector that lies in several accesses.
        return (
            f"strides with {problem.in_channels} and {problem.out_channels} channels; on sm_{arch} its strided kernel "
            f"for {operand} takes multiples of {vector}"
        )
    slices = _slices(problem, MATHS[name].tile, arch, batch) if direction == "backward_weight" else 1
    output = "float32" if slices > 1 else result
    every = (*aligned, _alignment(channels[2], output))
    alignments = (1, 1, 1) if MATHS[name].unit == "Simt" else every
    return Choice(Instance(form, name, output, result, alignments, epilogue.relu, arch), slices)


def _math(operand: str, aligned: tuple[int, ...], arch: int, float32: str) -> str:
    if operand == "float32":
        return float32 if arch >= MATHS[float32].arch else "simt"
    short = {"float16": "f16", "bfloat16": "bf16"}[operand]
    if arch < MATHS[short].arch:
        return f"{short}_turing"
    return short if min(aligned) * DTYPE_BYTES[operand] >= ASYNC_BYTES else f"{short}_narrow"


def _form(direction: str, problem: ConvProblem) -> Form:
    strided = direction != "backward_data" or max(problem.strides) > 1
    limited = direction != "backward_weight" and max(problem.kernel) > MASK_TAPS
    wanted = ("Strided" if strided else "Unity", "Analytic" if limited else "Optimized")
    return next(form for form in FORMS if form.direction == direction and (form.strides, form.iterator) == wanted)


def _contiguous(direction: str, problem: ConvProblem) -> tuple[int, int, int]:
    """The channels that lie next to one another in both operands and in the result."""
    c, k = problem.in_channels, problem.out_channels
    return {"forward": (c, c, k), "backward_data": (k, c, c), "backward_weight": (k, c, c)}[direction]


def _alignment(channels: int, dtype: str) -> int:
    return math.gcd(channels, VECTOR_BYTES // DTYPE_BYTES[dtype])


def _slices(problem: ConvProblem, tile: tuple[int, int, int], arch: int, batch: int) -> int:
    """The slices of the sum of a weight gradient (split-K), so that every multiprocessor has a block.

    A gradient is a matrix of O by kernel * I, whose elements sum N * Y products: few tiles, long sums.
    """
    m, n, k = tile
    taps = math.prod(problem.kernel) * problem.in_channels
    tiles = math.ceil(problem.out_channels / m) * math.ceil(taps / n)
    known = problem.batch if isinstance(problem.batch, int) else batch
    length = math.ceil(known * math.prod(int(extent) for extent in problem.grad_extents) / k)
    return max(1, min(_multiprocessors(arch) // tiles, length // LEAST_TILES))


def _multiprocessors(arch: int) -> int:
    """Of the GPU known of this SM, or of the greatest before it."""
    known = [gpu for gpu in DEVICES.values() if gpu.version <= arch]
    return max(known, key=lambda gpu: gpu.version).processors


__all__ = ["FORMS", "MATHS", "Choice", "Form", "Instance", "Math", "choose"]
