# SPDX-License-Identifier: Apache-2.0
"""Run a generated kernel by itself, with a result full of NaN: interpreted, or compiled, on buffers in red zones."""

import zlib
from dataclasses import replace

import numpy as np
import tvm

from relax_ops.compat import SHRINKS_BUFFERS
from relax_ops.single_run import QUICK_CONFIG
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.contract import Kernel, Plan, Tiling
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.kernels.registry import kernel_named
from tvm_convgrad.verify.interpreter import execute

NATIVE = {"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()}
TARGET = tvm.target.Target(NATIVE)
MACHINE = machine_of(TARGET)
COMPILED_EVERY = 3
"""Of so many kernels whose results are computed one is compiled."""

ZONE = 64  # elements before and after each buffer: NaN around operands, a sign around the result


def kernel_of(problem: ConvProblem, direction: str, target=None, choose=chooser.choose):
    """(choice, compiled function) of a direction on a target, this machine's by default."""
    target = tvm.target.Target(target or NATIVE)
    machine = machine_of(target)
    choice = choose(problem, direction, machine)
    assert choice.is_kernel, choice
    function = chooser.build(problem, direction, machine, choice, "main")
    return choice, compiled(function, target)


def forced(name: str):
    """A chooser that considers one kernel only."""

    def choose(problem: ConvProblem, direction: str, machine):
        return chooser.choose(problem, direction, machine, kernel_named(name, direction))

    return choose


def with_tiling(choice: Choice, tiling: Tiling) -> Choice:
    """The choice with another tiling of its first loop nest."""
    return replace(choice, plan=replace(choice.plan, tilings=(tiling, *choice.plan.tilings[1:])))


def always(kernel: Kernel, tiling: Tiling):
    """A chooser that takes a kernel with one tiling, whatever the problem."""
    return lambda *_: Choice("", "", kernel=kernel, plan=Plan((tiling,)))


def built(problem: ConvProblem, direction: str, choice: Choice, epilogue: Epilogue = NO_EPILOGUE):
    """The compiled kernel of a choice on this machine."""
    return compiled(chooser.build(problem, direction, MACHINE, choice, "main", epilogue), TARGET)


def compiled(function, target):
    """One kernel as a step compiles it, which checks no arguments of kernels, nor what they use of their buffers."""
    with tvm.transform.PassContext(config=QUICK_CONFIG, disabled_pass=SHRINKS_BUFFERS):
        return tvm.compile(tvm.IRModule({"main": function}), target)


def _blank(problem: ConvProblem, direction: str) -> np.ndarray:
    """An array for a result, full of NaN."""
    shape, dtype = problem.tensors[DIRECTIONS[direction].result]
    return np.full(shape, np.nan, numpy_dtype(dtype))


def run_in_red_zones(problem: ConvProblem, direction: str, library, operands, before=None) -> np.ndarray:
    """The result, which holds `before` or NaN when the kernel is called; asserts that nothing around it was written."""
    tensors = [_zoned(array, np.nan)[1] for array in operands]
    blank = _blank(problem, direction) if before is None else before
    zone, result = _zoned(blank, 77.0)
    library["main"](*tensors, result)
    assert (zone[:ZONE] == 77.0).all()
    assert (zone[ZONE + blank.size :] == 77.0).all()
    return zone[ZONE : ZONE + blank.size].reshape(blank.shape).copy()


def _zoned(array: np.ndarray, around: float):
    """A larger array with this one in its middle, and a tensor that shares the middle's memory.

    TVM demands of foreign memory that it is aligned to 64 bytes. What lies behind the array is not: its size is odd.
    """
    room = np.empty(array.size + 2 * ZONE + 64, array.dtype)
    skip = -(room.ctypes.data % -64) // array.itemsize % 64
    zone = room[skip : skip + array.size + 2 * ZONE]
    zone[...] = around
    inside = zone[ZONE : ZONE + array.size].reshape(array.shape)
    inside[...] = array
    return zone, tvm.runtime.from_dlpack(inside)


def computed(
    problem: ConvProblem, direction: str, choice: Choice, operands, before=None, *, epilogue=NO_EPILOGUE, symbolic=None
) -> np.ndarray:
    """The result of a kernel on this machine, interpreted in local memory full of NaN.

    Interpreting takes a quarter of the time of compiling, and finds accesses out of bounds and races. One kernel in
    COMPILED_EVERY is compiled, too: it must give the same, and write nothing around its result.

    Args:
        operands: in the kernel's order, the bias behind them.
        before: what the result holds when the kernel is called; NaN by default.
        symbolic: the problem with a symbolic batch, if the kernel is one for it.
    """
    function = chooser.build(symbolic or problem, direction, MACHINE, choice, "main", epilogue)
    found = _blank(problem, direction) if before is None else before.copy()
    batch = problem.batch if symbolic else 0
    assert execute(function, [*map(np.ascontiguousarray, operands), found], batch) == "", choice.plan
    what = f"{problem.descriptor} {direction} {choice.plan} {epilogue}"
    if zlib.crc32(what.encode()) % COMPILED_EVERY == 0:
        again = _run(problem, direction, compiled(function, TARGET), operands, before)
        np.testing.assert_array_equal(again, found, what)
    return found


def _run(problem: ConvProblem, direction: str, library, operands, before=None) -> np.ndarray:
    """The result of machine code: in red zones, but for bfloat16, of which TVM takes no foreign memory."""
    if "bfloat16" not in {dtype for _, dtype in problem.tensors.values()}:
        return run_in_red_zones(problem, direction, library, operands, before)
    result = tvm.runtime.tensor(_blank(problem, direction) if before is None else before)
    library["main"](*map(tvm.runtime.tensor, operands), result)
    return result.numpy()


def check_choice(problem: ConvProblem, direction: str, choice: Choice) -> None:
    """The kernel of a choice equals the float64 reference, rounded once, on small integers."""
    operands, wanted = numbers_of(problem, direction, 0)
    np.testing.assert_array_equal(computed(problem, direction, choice, operands), wanted, str(choice.plan))


def check_exact(problem: ConvProblem, direction: str, choose=chooser.choose) -> None:
    """The same of the kernel that is chosen."""
    choice = choose(problem, direction, MACHINE)
    assert choice.is_kernel, choice
    check_choice(problem, direction, choice)


def check_machine_code(problem: ConvProblem, direction: str, target) -> None:
    """The machine code for a target equals the float64 reference, rounded once, on small integers."""
    operands, wanted = numbers_of(problem, direction, 0)
    _, library = kernel_of(problem, direction, target)
    np.testing.assert_array_equal(_run(problem, direction, library, operands), wanted)
