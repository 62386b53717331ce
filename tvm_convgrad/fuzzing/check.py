# SPDX-License-Identifier: Apache-2.0
"""Draws cases, builds their kernels and compares what they compute with float64.

Numbers are small integers, whose sums are exact in float32: a kernel has to give each element, rounded once to its
type, bit for bit. Every product counts: no operand has zeros, and signs are random, so that a product that is left out,
taken twice or taken from another place changes the sum.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from tvm_convgrad.catalogue import FACES
from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.errors import ProblemError, UnsupportedError
from tvm_convgrad.fuzzing.cases import (
    KernelCase,
    choice_of,
    epilogue_of_words,
    machine_of_words,
    tiling_of,
    words_of,
)
from tvm_convgrad.fuzzing.families import FAMILIES, Family, family_of
from tvm_convgrad.fuzzing.problems import draw_problem
from tvm_convgrad.interpreter import execute
from tvm_convgrad.kernels import plan
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.target import CPUS, PARALLEL_FROM, Machine
from tvm_convgrad.kernels.transforms import allow_transforms
from tvm_convgrad.kernels.tuned import tilings_of, use_winners
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.reference import FACES as REFERENCES
from tvm_convgrad.verification import compare, reduction_length

Array = np.ndarray[Any, Any]

DIRECTIONS = ("forward", "backward_weight", "backward_data")

NAN_SHARE = 1 / 6
"""The share of the cases that have a NaN; a transform of Winograd's spreads it over a tile."""

FILLS = (0xFF, 0x3F)
"""Bytes of memory that is not written yet: NaN and -1, or numbers: a comparison may hide NaN."""

FAILED = "it cannot be built or interpreted"
"""How the fault of a case begins whose kernel was not executed."""

PLANNED = 0.1
"""The share of the cases whose kernel and tiling are the plan's choice."""

_EXACT = 2**24
_FUSED = {
    "forward": ("bias", "relu", "accumulate"),
    "backward_data": ("bias", "relu", "accumulate"),
    "backward_weight": ("accumulate", "bias_grad", "bias_accumulate"),
}


@dataclass(frozen=True)
class Numbers:
    """The arrays of one run of a case.

    Attributes:
        operands: what the kernel reads, in the order of its parameters.
        results: what it writes, as they are before: NaN, or a summand.
        wanted: the results.
    """

    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    wanted: tuple[Array, ...]


def draw_case(rng: random.Random, directions: Sequence[str] = DIRECTIONS) -> KernelCase:
    """A random case: a problem, an instruction set, a family that takes it, a tiling and an epilogue."""
    # The family is drawn first and kept, so that those that take few problems are not drowned.
    able = [each for each in FAMILIES if set(each.directions) & set(directions)]
    family = rng.choice([each for each in able for _ in range(each.weight)])
    wanted = [direction for direction in directions if direction in family.directions]
    while True:
        problem = draw_problem(rng, family.problems)
        direction = rng.choice(wanted)
        machine = _machine(rng)
        if not family.refusal(problem, direction, machine) and not _too_large(problem):
            break
    any_batch = (
        rng.random() < 0.12 and family.name != "winograd" and problem.data_layout[0] == problem.grad_layout[0] == "N"
    )
    planned = replace(problem, batch=plan.REPRESENTATIVE_BATCH) if any_batch else problem
    epilogue = _epilogue(rng, direction)
    if rng.random() < PLANNED:
        with use_winners(None), allow_transforms(rng.random() < 0.5):
            choice = plan.choose(planned, direction, machine)
        taken = family_of(choice.kind, direction)
        assert taken is not None, choice
        tilings = tuple(tilings_of(choice.detail))
        region = taken.region_of(planned, direction, choice.detail)
        return KernelCase(problem, direction, machine, choice.kind, tilings, region, epilogue, any_batch)
    region, drawn = family.draw(rng, planned, direction, machine)
    tilings = tuple(drawn)
    # A wild number where the kernel lets it through: a refusal that forgets something is a finding, too.
    place = rng.randrange(len(tilings))
    changed = (*tilings[:place], _changed(rng, tilings[place]), *tilings[place + 1 :])
    if not family.invalid(planned, direction, region, changed, machine):
        tilings = changed
    return KernelCase(problem, direction, machine, family.kind(direction), tilings, region, epilogue, any_batch)


def _changed(rng: random.Random, tiling: Any) -> Any:
    """A tiling with another value in one of its fields, valid or not."""
    name = rng.choice([item.name for item in fields(tiling)])
    value = getattr(tiling, name)
    other: object = rng.choice((0, 1, 2, 3, 4, 5, 7, 16, 31))
    if isinstance(value, bool):
        other = not value
    elif isinstance(value, str):
        other = rng.choice(("channels", "pixels", "source", "weights"))
    return replace(tiling, **{name: other})


def _machine(rng: random.Random) -> Machine:
    cpu = CPUS[rng.choice(("AVX-512", "AVX-512", "AVX2", "SSE", "NEON"))]
    return replace(
        cpu,
        l2_bytes=rng.choice((cpu.l2_bytes, 1 << 9, 1 << 12, 1 << 15)),
        registers=rng.choice((cpu.registers, cpu.registers, cpu.registers // 2)),
        parts=rng.choice((2, 3, 4, 5, 8, 16)),
        parallel_from=rng.choice((0, 0, PARALLEL_FROM)),
    )


def _epilogue(rng: random.Random, direction: str) -> Epilogue:
    if rng.random() < 0.5:
        return NO_EPILOGUE
    taken = {name for name in _FUSED[direction] if rng.random() < 0.5}
    if "bias_accumulate" in taken and not {"accumulate", "bias_grad"} <= taken:
        taken.remove("bias_accumulate")
    return Epilogue(**dict.fromkeys(taken, True))


def _too_large(problem: ConvProblem) -> bool:
    return any(reduction_length(problem, direction) * 9 >= _EXACT for direction in DIRECTIONS)


def read_case(problem: ConvProblem, direction: str, text: str) -> KernelCase:
    """The case that `KernelCase.tiling_text` wrote.

    Raises:
        ProblemError: the string is malformed.
        UnsupportedError: the kernel refuses the problem, or cannot be built with the tilings.
    """
    words, plain = words_of(text)
    kind = words["kernel"].replace("_", " ")
    # Names of directions have an underscore of their own.
    kind = kind.replace("backward data", "backward_data")
    family = family_of(kind, direction)
    if family is None:
        known = ", ".join(dict.fromkeys(each.kind(direction).replace(" ", "_") for each in FAMILIES))
        raise ProblemError(f"--tiling: kernel={words['kernel']} computes no {direction}; use {known}")
    machine = machine_of_words(words)
    any_batch = words.get("batch") == "any"
    tilings = tuple(tiling_of(family.tiling_types(direction), each) for each in plain)
    region = int(words.get("region", "0"))
    case = KernelCase(problem, direction, machine, kind, tilings, region, epilogue_of_words(words), any_batch)
    reason = (
        family.refusal(problem, direction, machine)
        or family.invalid(case.planned_problem, direction, region, tilings, machine)
        or plan.epilogue_refusal(choice_of(case, None), case.epilogue)
    )
    if reason:
        raise UnsupportedError(f"{kind} of {problem.descriptor}: {reason}")
    return case


def family_of_case(case: KernelCase) -> Family:
    """The family that the case is of."""
    found = family_of(case.kind, case.direction)
    assert found is not None, case.kind
    return found


def kernel_of(case: KernelCase) -> object:
    """The PrimFunc of a case."""
    detail = family_of_case(case).detail(case.planned_problem, case.direction, case.region, case.tilings)
    choice = choice_of(case, detail)
    return plan.build(case.compiled_problem, case.direction, case.machine, choice, "kernel", case.epilogue)


# ------------------------------------------------------------------------------------------------- numbers


def numbers_of(case: KernelCase, seed: int) -> Numbers:
    """Operands without zeros, what the results hold before, and what float64 gives.

    One case in six has a NaN in X, or in the dY of a dgrad: the results that it belongs to have to be NaN, no others.
    """
    problem, face = case.problem, FACES[case.direction]
    generator = np.random.default_rng([seed, zlib.crc32(f"{case.direction} {problem.descriptor}".encode())])
    limit = max(1, min(3, math.isqrt((_EXACT - 1) // max(reduction_length(problem, case.direction), 1)) - 1))

    def draw(shape: Sequence[int], dtype: str) -> Array:
        magnitudes = generator.integers(1, limit + 1, shape)
        return (magnitudes * generator.choice((-1, 1), shape)).astype(numpy_dtype(dtype))

    def tensor(name: str) -> tuple[tuple[int, ...], str]:
        shape, dtype = problem.tensors[name]
        return tuple(int(extent) for extent in shape), dtype

    operands = [draw(*tensor(name)) for name in face.operands]
    if case.kind.partition(" ")[0] != "winograd" and generator.random() < NAN_SHARE:
        # Not in W, nor in the dY of a wgrad: the reference multiplies them by the zeros of padding, kernels do not.
        tainted = operands[1] if case.direction == "backward_weight" else operands[0]
        tainted.flat[generator.integers(tainted.size)] = np.nan
    shape, dtype = tensor(face.result)
    fused = case.epilogue
    total = REFERENCES[case.direction](problem, *operands).astype("float64")
    before = draw(shape, dtype) if fused.accumulate else _blank(shape, dtype)
    if fused.accumulate:
        total = total + before.astype("float64")
    if case.direction == "backward_weight":
        results, wanted = [before], [total.astype(numpy_dtype(dtype))]
        if fused.bias_grad:
            grad = operands[0].astype("float64")
            axes = tuple(i for i, letter in enumerate(problem.grad_layout) if letter != "C")
            bias_before = draw((problem.out_channels,), dtype)
            bias = grad.sum(axis=axes) + (bias_before.astype("float64") if fused.bias_accumulate else 0)
            results.append(bias_before if fused.bias_accumulate else _blank((problem.out_channels,), dtype))
            wanted.append(bias.astype(numpy_dtype(dtype)))
        return Numbers(tuple(operands), tuple(results), tuple(wanted))
    if fused.bias:
        layout = problem.grad_layout if case.direction == "forward" else problem.data_layout
        channels = problem.out_channels if case.direction == "forward" else problem.in_channels
        bias = draw((channels,), dtype)
        operands.append(bias)
        total = total + bias.astype("float64").reshape([-1 if letter == "C" else 1 for letter in layout])
    if fused.relu:
        total = np.maximum(total, 0)
    return Numbers(tuple(operands), (before,), (total.astype(numpy_dtype(dtype)),))


def _blank(shape: Sequence[int], dtype: str) -> Array:
    """A tensor of NaN."""
    return np.full(shape, np.nan, numpy_dtype(dtype))


# ------------------------------------------------------------------------------------------------- the check


def check_case(case: KernelCase, seed: int = 0) -> str:
    """What is wrong with a case, or nothing; the kernel is interpreted, not compiled.

    A kernel for any batch is executed for the case's batch, and once more for a batch of one more.
    """
    try:
        return _fault(case, kernel_of(case), seed)
    except Exception as error:  # a kernel that cannot be built or interpreted is a finding
        return f"{FAILED}: {type(error).__name__}: {error}"


def _fault(case: KernelCase, function: object, seed: int) -> str:
    """What is wrong with a kernel's function."""
    batches = (int(case.problem.batch), int(case.problem.batch) + 1) if case.any_batch else (int(case.problem.batch),)
    fill = FILLS[zlib.crc32(str(case).encode()) % len(FILLS)]
    for batch in batches:
        run = replace(case, problem=replace(case.problem, batch=batch))
        numbers = numbers_of(run, seed)
        arrays = [np.array(array, order="C") for array in (*numbers.operands, *numbers.results)]
        fault = execute(function, arrays, batch, fill) or differences(arrays, numbers)
        if fault:
            return fault
    return ""


def differences(arrays: Sequence[Array], numbers: Numbers) -> str:
    """What differs after a run from what should be there: operands are as they were. NaN equals NaN here."""
    for found, wanted in zip(arrays, (*numbers.operands, *numbers.wanted), strict=True):
        have, want = np.array(found), np.array(wanted)
        both = np.isnan(have.astype("float32")) & np.isnan(want.astype("float32"))
        have[both], want[both] = 0, 0
        status, detail = compare(have, want)
        if status != "right":
            return detail
    return ""


__all__ = ["DIRECTIONS", "FAILED", "check_case", "differences", "draw_case", "kernel_of", "numbers_of", "read_case"]
