# SPDX-License-Identifier: Apache-2.0
"""Implementations against float64: small integers, whose sums every implementation must give exactly."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_convgrad.catalogue import FACES as CATALOGUE
from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.errors import ConvGradError, ProblemError
from tvm_convgrad.kernels.plan import choose_winograd
from tvm_convgrad.kernels.target import machine_of
from tvm_convgrad.offload.common import NAMES, backend
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.reference import FACES

Array = np.ndarray[Any, Any]

OPS = {"forward": "forward", "wgrad": "backward_weight", "dgrad": "backward_data"}
"""The faces by the names that `verify --op` takes."""

SUITE = (
    "mb2ic4ih9oc6kh3ph1",  # plain
    "mb1ic3ih8oc5kh3",  # no padding
    "mb2ic4ih9oc6kh3sh2ph1",  # strided, nothing hidden
    "mb2ic4ih10oc6kh3sh2ph1",  # strided, one row of X hidden from Y
    "mb1ic2ih12oc3kh2sh4",  # stride longer than the kernel
    "mb2ic3ih11oc4kh3dh1ph2",  # dilated
    "mb2ic3ih13oc4kh3sh2dh2ph1",  # strided and dilated
    "mb2ic4ih7oc4kh1",  # pointwise
    "mb2ic4ih8oc8kh1sh2",  # strided pointwise
    "g4mb2ic4ih9oc4kh3ph1",  # depthwise
    "g4mb2ic4ih9oc12kh3sh2ph1",  # depthwise, multiplier 3, strided
    "g2mb2ic8ih9oc6kh5ph2",  # grouped
    "g2mb8ic6ih9oc4kh3sh2dh1ph1",  # grouped, strided, dilated
    "mb2ic3ih7iw9oc4kh3kw2sh2sw1dh0dw1ph1pw0",  # axes that differ
    "mb2ic3ih7oc4kh3ph0rh1",  # asymmetric padding
    "mb1ic3ih5oc4kh5ph4",  # padding up to the kernel's reach
    "mb1ic1ih1oc1kh1",  # one of everything
    "mb2ic3ih9oc4kh3ph1_lay=NHWC:OHWI:NHWC",
    "g2mb2ic4ih9oc6kh3sh2ph1_lay=NHWC:HWIO:NHWC",
    "mb2ic3ih9oc4kh3ph1_lay=CNHW:IHWO:NCHW",
    "mb2ic3iw17oc4kw5sw2pw2",  # 1-D
    "g3mb2ic3iw16oc6kw3dw2pw1_lay=NWC:WIO:NWC",
    "mb1ic2id5oc3kd3pd1",  # 3-D
    "g2mb1ic4id6oc4kd2sd2",
    "mb2ic4ih9oc6kh3ph1_dt=f16:f16:f16",
    "mb2ic4ih9oc6kh3sh2ph1_dt=bf16:bf16:bf16",
    "mb2ic4ih9oc6kh3ph1_dt=f64:f64:f64",
)
"""What `verify --all` runs: one problem for each thing that convolution gradients are known to get wrong."""


EXACT_TERMS = 2**24
"""Below so many ones, a sum is exact in float32."""


@dataclass(frozen=True)
class Verdict:
    """One implementation of one face of one problem: status "right", "wrong" or "refused", and how or why.

    Attributes:
        tiling: what `verify --tiling` takes to repeat a wrong case of a generated kernel.
    """

    op: str
    descriptor: str
    impl: str
    status: str
    detail: str
    tiling: str = ""


def verify_problems(
    problems: Iterable[ConvProblem],
    ops: Sequence[str],
    impls: Sequence[str] = (),
    *,
    seed: int = 0,
    target: Any = "llvm",
) -> Iterator[Verdict]:
    """Compare each implementation of each of `ops` (keys of OPS) with float64, for equality.

    Args:
        impls: values of evaluate's `impl`; those of another face are passed over. Empty: all there are.
        target: a TVM target that this machine runs.
    """
    for problem in problems:
        for op in ops:
            yield from _verify_face(problem, op, impls, seed, target)


def numbers_of(problem: ConvProblem, face: str, seed: int = 0) -> tuple[list[Array], Array]:
    """Operands of small integers for a face of a problem, and its result by float64, rounded once to its type.

    The numbers depend on the seed, the face and the problem alone, so that a failure can be repeated by its descriptor.

    Raises:
        ProblemError: symbolic extents, or sums too long to be exact in float32.
    """
    problem.require_static("verification")
    terms = reduction_length(problem, face)
    if terms >= EXACT_TERMS:
        raise ProblemError(
            f"{problem.descriptor}: sums of {terms} terms are not exact in float32; verify a smaller one"
        )
    operands, _ = integers(problem, face, seed)
    result = problem.tensors[CATALOGUE[face].result][1]
    return operands, FACES[face](problem, *operands).astype(numpy_dtype(result))


def integers(problem: ConvProblem, face: str, seed: int = 0) -> tuple[list[Array], int]:
    """Operands of small integers for a face of a problem, and their greatest magnitude.

    It is such that every partial sum is exact in float32, if the sums have less than EXACT_TERMS terms.

    Raises:
        ProblemError: symbolic extents.
    """
    problem.require_static("verification")
    shapes = problem.tensors
    # Products of integers up to `limit` add up to less than 2^24, so float32 holds every partial sum.
    limit = max(1, min(3, math.isqrt((EXACT_TERMS - 1) // max(reduction_length(problem, face), 1))))
    generator = np.random.default_rng([seed, zlib.crc32(f"{face} {problem.descriptor}".encode())])
    operands = []
    for name in CATALOGUE[face].operands:
        shape, dtype = shapes[name]
        operands.append(generator.integers(-limit, limit + 1, [int(e) for e in shape]).astype(numpy_dtype(dtype)))
    return operands, limit


def reduction_length(problem: ConvProblem, face: str) -> int:
    """The most products that one element of a face's result sums."""
    if face == "backward_weight":
        return int(problem.batch) * math.prod(int(y) for y in problem.grad_extents)
    channels = problem.in_channels if face == "forward" else problem.out_channels
    return channels // problem.groups * math.prod(problem.kernel)


def compare(found: Array, wanted: Array) -> tuple[str, str]:
    """Status and detail of a Verdict: every element, the shape and the type must be equal; NaN equals nothing."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return "wrong", f"{found.dtype}{list(found.shape)} instead of {wanted.dtype}{list(wanted.shape)}"
    differing = found != wanted
    if not differing.any():
        return "right", f"{wanted.size} elements equal"
    where = tuple(int(index) for index in np.argwhere(differing)[0])
    return "wrong", (
        f"{int(differing.sum())} of {wanted.size} elements differ, the first at {list(where)}: {found[where]} instead "
        f"of {wanted[where]}"
    )


def _verify_face(problem: ConvProblem, op: str, impls: Sequence[str], seed: int, target: Any) -> Iterator[Verdict]:
    from tvm_convgrad.evaluation import COMPOSITIONS, evaluate_problem

    available = ("auto", "kernel", "winograd", "composition", *COMPOSITIONS[OPS[op]], *NAMES)
    if impls:
        chosen = [impl for impl in impls if impl in available]
    else:  # "composition" is another name for the first of them
        import tvm

        where = tvm.target.Target(target)
        missing = [name for name in NAMES if backend(name).unavailable(where)]
        if not choose_winograd(problem, OPS[op], machine_of(where)).is_kernel:  # it is for a few kinds of problems
            missing.append("winograd")
        chosen = [impl for impl in available if impl not in ("composition", *missing)]
    operands, wanted = numbers_of(problem, OPS[op], seed)
    for impl in chosen:
        try:
            found = evaluate_problem(OPS[op], problem, *operands, impl=impl, target=target)
        except ConvGradError as error:
            yield Verdict(op, problem.descriptor, impl, "refused", str(error))
            continue
        yield Verdict(op, problem.descriptor, impl, *compare(np.asarray(found), wanted))
