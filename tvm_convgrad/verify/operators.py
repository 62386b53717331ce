# SPDX-License-Identifier: Apache-2.0
"""The fuzzer of implementations: random convolutions whose results must equal those of float64.

Used by `convgrad verify --fuzz N --impl IMPL` and by the hypothesis tests. Data are small integers, so that every sum
is exact in the accumulator (float32 holds all integers up to 2^24) and only the last rounding, to the result's type, is
left: an implementation must equal the float64 result rounded once, bit for bit.

Compilation dominates (0.35 s a case as users compile), so cases are compiled by the dozen in one module without
argument checks and without LLVM's optimiser (0.06 s, see tvm_convgrad.verify.bulk); one batch in OPTIMISED_EVERY is
compiled as users compile. Each direction of a problem is checked in one implementation, the kernel or a composition,
drawn by the seed, unless implementations are named.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tvm.target import Target

from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.exact import compare, numbers_of
from tvm_convgrad.core.geometry import FLOAT_DTYPES, SPATIAL, data_layout_of, effective_kernel, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import COMPOSITIONS, implementations
from tvm_convgrad.offload.registry import NAMES
from tvm_convgrad.verify.bulk import Case, run_cases
from tvm_convgrad.verify.suite import Verdict

ALL_DIRECTIONS = ("forward", "backward_weight", "backward_data")
"""The directions by their names in the catalogue."""

BATCH = 60
"""Cases of a batch; those of one direction and implementation are compiled as one module."""

OPTIMISED_EVERY = 16
"""One batch in this many is compiled as users compile, at five times the cost."""

_MAX_MACS = 400_000


def random_problem(rng: random.Random, rank: int | None = None, dtypes: Sequence[str] | None = None) -> ConvProblem:
    """A small valid convolution: any rank, layout, dtype, grouping, stride, dilation and asymmetric padding.

    Tiny extents, kernels as large as the padded data, padding beyond the kernel's reach and strides beyond the kernel
    are frequent, as that is where gradients of convolutions go wrong.

    Args:
        rng: supplies every choice, so that hypothesis can shrink them.
        rank: 1 to 3, drawn if None.
        dtypes: element types to draw from; None is all.
    """
    while True:
        problem = _draw(rng, rank or rng.choice((1, 2, 2, 2, 3)), tuple(dtypes or FLOAT_DTYPES))
        if problem.macs <= _MAX_MACS:
            return problem


def random_problems(count: int, seed: int) -> list[ConvProblem]:
    """The first `count` problems of a seed; equal on every machine."""
    rng = random.Random(seed)
    return [random_problem(rng) for _ in range(count)]


def check_problem(
    problem: ConvProblem, *, seed: int = 0, impls: Sequence[str] = (), directions: Sequence[str] = ALL_DIRECTIONS
) -> list[Verdict]:
    """The verdicts on one problem that are not "right": none if all is well. Arguments as `check_problems`."""
    return [v for v in check_problems([problem], seed=seed, impls=impls, directions=directions) if v.status != "right"]


def check_problems(
    problems: Iterable[ConvProblem],
    *,
    seed: int = 0,
    impls: Sequence[str] = (),
    directions: Sequence[str] = ALL_DIRECTIONS,
    target: str | Target = "native",
) -> Iterator[Verdict]:
    """A verdict for each direction of each problem (and each implementation, if they are named), in order.

    Args:
        problems: static ones.
        seed: of the data and of the choice of implementations.
        impls: values of evaluate's `impl`; a composition of another direction is left out. Empty: the kernel or
            one composition for each direction, drawn by the seed.
        directions: names of the catalogue.
        target: a TVM target, or "native" for this CPU with all its instructions.
    """
    cases = (case for problem in problems for case in _cases(problem, seed, impls, directions))
    number = 0
    while batch := list(islice(cases, BATCH)):
        yield from _check_batch(batch, seed, number % OPTIMISED_EVERY == OPTIMISED_EVERY - 1, target)
        number += 1


def _cases(problem: ConvProblem, seed: int, impls: Sequence[str], directions: Sequence[str]) -> Iterator[Case]:
    for direction in directions:
        named = [impl for impl in impls if impl in implementations(direction) and impl not in NAMES]
        if not impls:
            draw = zlib.crc32(f"{seed} {direction} {problem.descriptor}".encode())
            drawn = ("kernel", *(COMPOSITIONS[direction] or ("composition",)))
            named = [drawn[draw % len(drawn)]]
        yield from (Case(direction, problem, impl) for impl in named)


def _check_batch(batch: Sequence[Case], seed: int, optimised: bool, target: str | Target) -> Iterator[Verdict]:
    numbers = [numbers_of(case.problem, case.direction, seed) for case in batch]
    try:
        found = run_cases(batch, [operands for operands, _ in numbers], optimised=optimised, target=target)
    except Exception as error:  # whatever the compiler raises is a finding; one case after the other shows whose
        if len(batch) == 1 and isinstance(error, UnsupportedError):
            yield _verdict(batch[0], "refused", str(error))
            return
        if len(batch) == 1:
            yield _verdict(batch[0], "wrong", f"raised {type(error).__name__}: {error}")
            return
        for case in batch:
            yield from _check_batch([case], seed, optimised, target)
        return
    for case, (_, wanted), have in zip(batch, numbers, found, strict=True):
        yield _verdict(case, *compare(have, wanted))


def _verdict(case: Case, status: str, detail: str) -> Verdict:
    return Verdict(WORDS[case.direction], case.problem.descriptor, case.impl, status, detail)


# ------------------------------------------------------------------------------------------------- drawing


def _draw(rng: random.Random, rank: int, dtypes: Sequence[str]) -> ConvProblem:
    """A valid convolution of a rank, of any size."""
    axes = [_draw_axis(rng, rank) for _ in range(rank)]
    extents, kernel, strides, padding, dilation = zip(*axes, strict=True)
    in_channels, out_channels, groups = _draw_channels(rng)
    data_layout, kernel_layout, grad_layout = _draw_layouts(rng, rank)
    data_dtype, kernel_dtype, grad_dtype = _draw_dtypes(rng, dtypes)
    return ConvProblem(
        batch=rng.randint(1, 3),
        in_channels=in_channels,
        out_channels=out_channels,
        data_extents=extents,
        kernel=kernel,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        grad_layout=grad_layout,
        data_dtype=data_dtype,
        kernel_dtype=kernel_dtype,
        grad_dtype=grad_dtype,
    )


def _draw_axis(rng: random.Random, rank: int) -> tuple[int, int, int, tuple[int, int], int]:
    """Data extent, kernel, stride, padding, dilation of one axis, such that Y has an element."""
    kernel = rng.choice((1, 2, 3, 3, 4, 5) if rank < 3 else (1, 2, 3))
    stride = rng.choice((1, 1, 2, 2, 3, 4))
    dilation = rng.choice((1, 1, 2, 3))
    reach = effective_kernel(kernel, dilation)
    low, high = (rng.choice((0, 0, 1, 2, reach - 1, reach + 1)) for _ in range(2))
    slack = rng.choice((0, 0, 1, 2, 3, 4, 5, 6, 7))  # 0: the kernel is as large as the padded data
    return max(1, reach - low - high + slack), kernel, stride, (low, high), dilation


def _draw_channels(rng: random.Random) -> tuple[int, int, int]:
    """In channels, out channels, groups: dense, depthwise (with multipliers), or 1 < groups < channels."""
    kind = rng.choice(("dense", "dense", "depthwise", "grouped"))
    if kind == "dense":
        return rng.randint(1, 5), rng.randint(1, 5), 1
    groups = rng.randint(2, 4)
    if kind == "depthwise":
        return groups, groups * rng.randint(1, 3), groups
    return groups * rng.randint(2, 3), groups * rng.randint(1, 3), groups


def _draw_layouts(rng: random.Random, rank: int) -> tuple[str, str, str]:
    axes, data, kernel = SPATIAL[rank], data_layout_of(rank), kernel_layout_of(rank)
    kind = rng.choice(("canonical", "canonical", "channels last", "any"))
    if kind == "canonical":
        return data, kernel, data
    if kind == "channels last":
        last = f"N{axes}C"
        return last, rng.choice((f"{axes}IO", f"O{axes}I")), last
    return _shuffled(rng, data), _shuffled(rng, kernel), _shuffled(rng, data)


def _shuffled(rng: random.Random, letters: str) -> str:
    return "".join(rng.sample(letters, len(letters)))


def _draw_dtypes(rng: random.Random, dtypes: Sequence[str]) -> tuple[str, str, str]:
    """Types of data, weight and grad: mostly one type, sometimes each its own."""
    if rng.random() < 0.25:
        first, second, third = (rng.choice(dtypes) for _ in range(3))
        return first, second, third
    one = rng.choice(("float32", *dtypes) if "float32" in dtypes else dtypes)
    return one, one, one
