# SPDX-License-Identifier: Apache-2.0
"""Implementations against float64: small integers, whose sums every implementation must give exactly."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import tvm
from tvm.target import Target

from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.catalogue import WORDS
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.core.exact import compare, numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import evaluate_problem, implementations
from tvm_convgrad.kernels.chooser import choose
from tvm_convgrad.kernels.registry import forms_of
from tvm_convgrad.offload.registry import NAMES, backend

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


@dataclass(frozen=True)
class Verdict:
    """The result of checking one implementation of one direction of one problem.

    Attributes:
        direction: "forward", "wgrad" or "dgrad", as `verify --direction` takes it.
        descriptor: of the problem.
        impl: the implementation, a value of evaluate's `impl`, or a kernel and its instruction set.
        status: "right", "wrong" or "refused".
        detail: how many elements are equal or differ, or the sentence of the refusal.
        tiling: the argument of `verify --tiling` that repeats a wrong case of a generated kernel.
    """

    direction: str
    descriptor: str
    impl: str
    status: str
    detail: str
    tiling: str = ""


def verify_problems(
    problems: Iterable[ConvProblem],
    directions: Sequence[str],
    impls: Sequence[str] = (),
    *,
    seed: int = 0,
    target: str | Target = "llvm",
) -> Iterator[Verdict]:
    """Compare each implementation of each direction of each problem with float64, for equality.

    Args:
        problems: static ones.
        directions: names of the catalogue.
        impls: values of evaluate's `impl`; those of another direction are left out. Empty: all that this machine has.
        seed: of the operands.
        target: a TVM target that this machine runs.
    """
    for problem in problems:
        for direction in directions:
            yield from _verify_direction(problem, direction, impls, seed, target)


def _verify_direction(
    problem: ConvProblem, direction: str, impls: Sequence[str], seed: int, target: str | Target
) -> Iterator[Verdict]:
    """A verdict for each implementation of one direction of one problem."""
    available = implementations(direction)
    if impls:
        chosen = [impl for impl in impls if impl in available]
    else:  # "composition" is another name for the first of them
        where = tvm.target.Target(target)
        missing = [name for name in NAMES if backend(name).unavailable(where)]
        # Each kernel by its own name once, where it takes the problem: most are for a few kinds of problems.
        missing += [
            form
            for form, kernel in forms_of(direction).items()
            if form != kernel.form or not choose(problem, direction, machine_of(where), kernel).is_kernel
        ]
        chosen = [impl for impl in available if impl not in ("composition", *missing)]
    operands, wanted = numbers_of(problem, direction, seed)
    for impl in chosen:
        status = "refused"
        try:
            found = evaluate_problem(direction, problem, *operands, impl=impl, target=target)
        except ConvGradError as error:
            detail = str(error)
        else:
            status, detail = compare(np.asarray(found), wanted)
        yield Verdict(WORDS[direction], problem.descriptor, impl, status, detail)
