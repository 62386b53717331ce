# SPDX-License-Identifier: Apache-2.0
"""Runs many small convolutions with one compilation, on memory that is full of NaN; the fuzzer compiles by it.

Compiling is what a check costs: 0.35 s a case as users compile, most of it machine code for argument checks of a
handful of kernels. One module for many cases, without those checks, fused, and without LLVM's optimiser, takes 0.06 s.
The caller compiles some batches as users compile (`optimised=True`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import tvm
from tvm import relax
from tvm.target import Target
from tvm_ffi import Function

import tvm_convgrad
from relax_ops.program import directions_module
from relax_ops.single_run import quick_machine
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import forced, rounds_once

Array = np.ndarray[Any, Any]

_PAGE_INTS = 1024  # the runtime's pool hands out memory in pages of 4 KiB


@dataclass(frozen=True)
class Case:
    """One direction of one problem by one implementation, a value of `tvm_convgrad.evaluate`'s `impl`."""

    direction: str
    problem: ConvProblem
    impl: str = "auto"

    def __str__(self) -> str:
        return f"{self.direction} {self.problem.descriptor} [{self.impl}]"


def run_cases(
    cases: Sequence[Case],
    operands: Sequence[Sequence[Array]],
    *,
    optimised: bool = False,
    target: str | Target = "llvm",
) -> list[Array]:
    """The result of each case, from modules of as many functions as there are cases (one for each forced form).

    Args:
        cases: static problems.
        operands: for each case its two arrays, in the catalogue's order and in the problem's dtypes.
        optimised: compile as `tvm.compile(..., target)` does.
        target: a TVM target of kind llvm that this machine runs, or "native".

    Raises:
        UnsupportedError: an implementation is unknown or refuses its problem.
    """
    results: dict[int, Array] = {}
    for direction, impl in sorted({(case.direction, case.impl) for case in cases}):
        chosen = [i for i, case in enumerate(cases) if (case.direction, case.impl) == (direction, impl)]
        machine = _compile(direction, impl, [cases[i].problem for i in chosen], optimised, target)
        for slot, i in enumerate(chosen):
            results[i] = _run(machine[f"case_{slot}"], operands[i], cases[i])
    return [results[i] for i in range(len(cases))]


def _compile(
    direction: str, impl: str, problems: Sequence[ConvProblem], optimised: bool, target: str | Target
) -> relax.VirtualMachine:
    """A VirtualMachine with the functions case_0, case_1, … of the problems."""
    tvm_convgrad.register()
    module = directions_module(
        ((f"case_{slot}", DIRECTIONS[direction], problem) for slot, problem in enumerate(problems)),
        is_direct=rounds_once(direction, impl),
    )
    with forced(direction, impl):
        if optimised:
            return relax.VirtualMachine(
                tvm.compile(module, native_target() if target == "native" else target), tvm.cpu()
            )
        return quick_machine(module, target)


def _run(function: Function, operands: Sequence[Array], case: Case) -> Array:
    arguments = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in operands]
    shape, dtype = case.problem.tensors[DIRECTIONS[case.direction].result]
    poison_pool(math.prod(int(e) for e in shape) * numpy_dtype(dtype).itemsize)
    return np.asarray(function(*arguments).numpy())


def poison_pool(nbytes: int) -> None:
    """Fill the memory that the next results of up to `nbytes` bytes will get with NaN (in every float type).

    The virtual machine's pool gives freed pages out again as they are, so elements that a kernel forgets to write come
    out as NaN instead of as the right values of an earlier run.
    """
    pages = -(-max(nbytes, 1) // (4 * _PAGE_INTS))
    held = [_poisoner()(tvm.runtime.ShapeTuple([count * _PAGE_INTS])) for count in sorted({1, pages}) for _ in range(4)]
    del held  # back to the pool, full of NaN


@cache
def _poisoner() -> Function:
    """A function of the virtual machine that returns n int32 of all one bits: NaN as any float type."""
    extent = tvm.tirx.Var("n", "int64")
    shape = relax.Var("shape", relax.ShapeType([extent]))
    builder = relax.BlockBuilder()
    with builder.function("ones", [shape]):
        with builder.dataflow():
            full = relax.op.full(relax.ShapeExpr([extent]), relax.const(-1, "int32"), "int32")
            result = builder.emit_output(full)
        builder.emit_func_output(result)
    return relax.VirtualMachine(tvm.compile(builder.get(), "llvm"), tvm.cpu())["ones"]
