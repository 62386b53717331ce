# SPDX-License-Identifier: Apache-2.0
"""Random cases of the fuzzer, and their check: a kernel is built, interpreted and compared with float64.

Operands are small integers, whose sums are exact in float32: a kernel has to give each element, rounded once to its
type, bit for bit. Operands have no zeros and random signs, so that a product that is omitted, added twice or read from
another place changes the sum.
"""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tvm import tirx

from tvm_convgrad.codegen.hardware import CPUS, PARALLEL_FROM, Machine
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.exact import compare, reduction_length
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.reference import DIRECTIONS as REFERENCES
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.chooser import build, choose, epilogue_refusal, refusal
from tvm_convgrad.kernels.contract import Kernel, Plan, planned
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import kernel_named
from tvm_convgrad.kernels.transforms import allow_transforms
from tvm_convgrad.kernels.tuned import use_winners
from tvm_convgrad.verify.fuzzing.cases import (
    KernelCase,
    epilogue_of_words,
    machine_of_words,
    tiling_of,
    words_of,
)
from tvm_convgrad.verify.fuzzing.draws import changed, draw_of, drawn_kernels
from tvm_convgrad.verify.fuzzing.problems import draw_problem
from tvm_convgrad.verify.interpreter import execute

Array = np.ndarray[Any, Any]

NAN_SHARE = 1 / 6
"""The share of the cases of exact kernels with a NaN in an operand. Winograd's transform spreads it over a tile."""

FILLS = (0xFF, 0x3F)
"""The bytes of local memory before it is written: 0xFF is NaN and -1, 0x3F finite: comparisons may hide NaN."""

FAILED = "it cannot be built or interpreted"
"""The first words of a fault of a kernel that was not executed."""

PLANNED = 0.1
"""The share of the cases whose kernel and tilings are those of the chooser."""

_EXACT = 2**24
"""The integer up to which all are exact in float32."""


@dataclass(frozen=True)
class Numbers:
    """The arrays of one run of a case.

    Attributes:
        operands: arrays that the kernel reads, in the order of its parameters.
        results: arrays that it writes, with their values before: NaN, or a summand.
        wanted: the values that the results must have after.
    """

    operands: tuple[Array, ...]
    results: tuple[Array, ...]
    wanted: tuple[Array, ...]


def draw_case(rng: random.Random, directions: Sequence[str] = tuple(DIRECTIONS)) -> KernelCase:
    """A random case: a problem, an instruction set, a kernel that takes it, a plan and an epilogue."""
    # The kernel is drawn first and kept, so that kernels that take few problems have their share of the cases.
    able = [each for each in drawn_kernels() if set(each.directions) & set(directions)]
    kernel = rng.choice([each for each in able for _ in range(draw_of(each).weight)])
    wanted = [direction for direction in directions if direction in kernel.directions]
    while True:
        problem = draw_problem(rng, draw_of(kernel).problems)
        direction = rng.choice(wanted)
        machine = _machine(rng)
        if not refusal(problem) and not kernel.refusal(problem, direction, machine) and not _too_large(problem):
            break
    any_batch = rng.random() < 0.12 and kernel.any_batch and problem.data_layout[0] == problem.grad_layout[0] == "N"
    compiled = replace(problem, batch="n") if any_batch else problem
    epilogue = _epilogue(rng, kernel, direction)
    if rng.random() < PLANNED:
        with use_winners(None), allow_transforms(rng.random() < 0.5):
            choice = choose(compiled, direction, machine)
        assert choice.kernel is not None
        assert choice.plan is not None
        return KernelCase(problem, direction, machine, choice.kernel, choice.plan, epilogue, any_batch)
    plan = draw_of(kernel).plan(kernel, rng, planned(compiled), direction, machine)
    # Another value in one field, if the kernel accepts it: a check that is missing in `invalid` is found, too.
    place = rng.randrange(len(plan.tilings))
    tilings = (*plan.tilings[:place], changed(rng, plan.tilings[place]), *plan.tilings[place + 1 :])
    wild = replace(plan, tilings=tilings)
    if not kernel.invalid(planned(compiled), direction, wild, machine):
        plan = wild
    return KernelCase(problem, direction, machine, kernel, plan, epilogue, any_batch)


def _machine(rng: random.Random) -> Machine:
    """An instruction set, with random caches, registers, parts, threshold of parallel loops and cost of dots."""
    cpu = CPUS[rng.choice(tuple(CPUS))]
    return replace(
        cpu,
        l2_bytes=rng.choice((cpu.l2_bytes, 1 << 9, 1 << 12, 1 << 15)),
        registers=rng.choice((cpu.registers, cpu.registers, cpu.registers // 2)),
        parts=rng.choice((2, 3, 4, 5, 8, 16)),
        parallel_from=rng.choice((0, 0, PARALLEL_FROM)),
        dot_cost=rng.choice((1, cpu.dot_cost)) if cpu.dot_cost > 1 else 1,
    )


def _epilogue(rng: random.Random, kernel: Kernel, direction: str) -> Epilogue:
    """None in half of the cases, else a random valid subset of what the kernel fuses."""
    if rng.random() < 0.5:
        return NO_EPILOGUE
    taken = {name for name in kernel.epilogues(direction) if rng.random() < 0.5}
    if "bias_accumulate" in taken and not {"accumulate", "bias_grad"} <= taken:
        taken.remove("bias_accumulate")
    return Epilogue(**dict.fromkeys(taken, True))


def _too_large(problem: ConvProblem) -> bool:
    """Whether sums would not be exact in float32."""
    return any(reduction_length(problem, direction) * 9 >= _EXACT for direction in DIRECTIONS)


def read_case(problem: ConvProblem, direction: str, text: str) -> KernelCase:
    """The case that `KernelCase.tiling_text` wrote.

    Raises:
        ProblemError: the string is malformed.
        UnsupportedError: the kernel refuses the problem, or cannot be built with the tilings.
    """
    words, plain = words_of(text)
    try:
        kernel = kernel_named(words["kernel"].replace("_", " "), direction)
    except UnsupportedError as error:
        raise ProblemError(f"--tiling: {error}") from error
    region = words.get("region", "0")
    if not region.isdigit():
        raise ProblemError(f"--tiling: region={region} is not a number; leave it out for the whole result")
    machine = machine_of_words(words)
    any_batch = words.get("batch") == "any"
    plan = Plan(tuple(tiling_of(kernel.tiling_type(direction), each) for each in plain), int(region))
    case = KernelCase(problem, direction, machine, kernel, plan, epilogue_of_words(words), any_batch)
    reason = (
        refusal(case.compiled_problem)
        or kernel.refusal(case.planned_problem, direction, machine)
        or kernel.invalid(case.planned_problem, direction, plan, machine)
        or epilogue_refusal(choice_of(case), direction, case.epilogue)
    )
    if reason:
        raise UnsupportedError(f"{kernel.label(direction)} of {problem.descriptor}: {reason}")
    return case


def choice_of(case: KernelCase) -> Choice:
    """The choice that the chooser would have made for the case."""
    label = case.kernel.label(case.direction)
    return Choice(label, "a case of the fuzzer", kernel=case.kernel, plan=case.plan)


def kernel_of(case: KernelCase) -> tirx.PrimFunc:
    """The PrimFunc of a case."""
    return build(case.compiled_problem, case.direction, case.machine, choice_of(case), "kernel", case.epilogue)


# ------------------------------------------------------------------------------------------------- numbers


def numbers_of(case: KernelCase, seed: int) -> Numbers:
    """Operands without zeros, the results before, and the results that float64 gives.

    Some cases have a NaN in X, or in the dY of a dgrad: exactly the results that it is a summand of have to be NaN.
    """
    problem, direction = case.problem, DIRECTIONS[case.direction]
    generator = np.random.default_rng([seed, zlib.crc32(f"{case.direction} {problem.descriptor}".encode())])
    limit = max(1, min(3, math.isqrt((_EXACT - 1) // max(reduction_length(problem, case.direction), 1)) - 1))

    def draw(shape: Sequence[int], dtype: str) -> Array:
        magnitudes = generator.integers(1, limit + 1, shape)
        return (magnitudes * generator.choice((-1, 1), shape)).astype(numpy_dtype(dtype))

    def tensor(name: str) -> tuple[tuple[int, ...], str]:
        shape, dtype = problem.tensors[name]
        return tuple(int(extent) for extent in shape), dtype

    operands = [draw(*tensor(name)) for name in direction.operands]
    if case.kernel.exact and generator.random() < NAN_SHARE:
        # Not in W, nor in the dY of a wgrad: the reference multiplies them by the zeros of padding, kernels do not.
        operand = operands[1] if case.direction == "backward_weight" else operands[0]
        operand.flat[generator.integers(operand.size)] = np.nan
    shape, dtype = tensor(direction.result)
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
    if fused.relu or fused.relu6:
        total = np.clip(total, 0, 6 if fused.relu6 else None)
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
    """What is wrong with a kernel's function, or nothing."""
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
    """The first difference after a run, or nothing: operands must be unchanged, results as wanted; NaN equals NaN."""
    for found, wanted in zip(arrays, (*numbers.operands, *numbers.wanted), strict=True):
        have, want = np.array(found), np.array(wanted)
        both = np.isnan(have.astype("float32")) & np.isnan(want.astype("float32"))
        have[both], want[both] = 0, 0
        status, detail = compare(have, want)
        if status != "right":
            return detail
    return ""


__all__ = ["FAILED", "check_case", "differences", "draw_case", "kernel_of", "numbers_of", "read_case"]
