# SPDX-License-Identifier: Apache-2.0
"""Run many small convolutions with one compilation, on memory that is full of NaN: the engine of the fuzzer.

Compiling is what a check costs: 0.35 s a case as users compile, most of it machine code for argument checks of a
handful of kernels. One module for many cases, without those checks, fused, and without LLVM's optimiser, takes 0.06 s.
Batches compiled as users compile are for the caller to mix in (`optimised=True`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from tvm_convgrad.catalogue import FACES
from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.evaluation import forced
from tvm_convgrad.problem import ConvProblem

Array = np.ndarray[Any, Any]

QUICK_CONFIG = {"tirx.disable_assert": True}
"""Of a PassContext: kernels do not check arguments. The virtual machine passes what the types say."""

_PAGE_INTS = 1024  # the runtime's pool hands out memory in pages of 4 KiB


@dataclass(frozen=True)
class Case:
    """One face of one problem by one implementation, a value of `tvm_convgrad.evaluate`'s `impl`."""

    face: str
    problem: ConvProblem
    impl: str = "auto"

    def __str__(self) -> str:
        return f"{self.face} {self.problem.descriptor} [{self.impl}]"


def run_cases(
    cases: Sequence[Case], operands: Sequence[Sequence[Array]], *, optimised: bool = False, target: Any = "llvm"
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
    for face, impl in sorted({(case.face, case.impl) for case in cases}):
        chosen = [i for i, case in enumerate(cases) if (case.face, case.impl) == (face, impl)]
        machine = _compile(face, impl, [cases[i].problem for i in chosen], optimised, target)
        for slot, i in enumerate(chosen):
            results[i] = _run(machine[f"case_{slot}"], operands[i], cases[i])
    return [results[i] for i in range(len(cases))]


def _compile(face: str, impl: str, problems: Sequence[ConvProblem], optimised: bool, target: Any) -> Any:
    import tvm
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.program import faces_module

    module = faces_module((f"case_{slot}", FACES[face], problem) for slot, problem in enumerate(problems))
    with forced(face, impl):
        if optimised:
            return relax.VirtualMachine(
                tvm.compile(module, native_target() if target == "native" else target), tvm.cpu()
            )
        return quick_machine(module, target)


def native_target() -> Any:
    """The TVM target of this CPU, with all its instructions."""
    import tvm

    return tvm.target.Target({"kind": "llvm", "mcpu": tvm.target.codegen.llvm_get_system_cpu()})


def quick_machine(module: Any, target: Any = "llvm") -> Any:
    """A VirtualMachine on this CPU of what `quick_executable` compiles; arguments as there."""
    import tvm
    from tvm import relax

    return relax.VirtualMachine(quick_executable(module, target), tvm.cpu())


def quick_executable(module: Any, target: Any = "llvm") -> Any:
    """An executable for this CPU of an IRModule, compiled for a single run: fused, checks and optimiser off.

    Args:
        module: what to compile.
        target: of kind llvm, or "native".
    """
    import tvm
    from tvm import relax

    described = json.loads(str(native_target() if target == "native" else tvm.target.Target(target)))
    target = tvm.target.Target({**described, "opt-level": 0})
    with tvm.transform.PassContext(config=QUICK_CONFIG), target:
        for make in ("LegalizeOps", "AnnotateTIROpPattern", "FuseOps", "FuseTIR") if _fuses(module) else ():
            module = getattr(relax.transform, make)()(module)
        return tvm.compile(module, target)


def _fuses(module: Any) -> bool:
    """Whether TVM can fuse a module's operators: 0.26 fails to where extents are formulas, such as h - 2."""
    from tvm import relax

    from relax_ops.compat import FUSES_FORMULAS

    functions = [function for function in module.functions.values() if isinstance(function, relax.Function)]
    return FUSES_FORMULAS or not any(relax.analysis.defined_symbolic_vars(function) for function in functions)


def _run(function: Any, operands: Sequence[Array], case: Case) -> Array:
    import tvm

    arguments = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in operands]
    shape, dtype = case.problem.tensors[FACES[case.face].result]
    poison_pool(math.prod(int(e) for e in shape) * numpy_dtype(dtype).itemsize)
    return np.asarray(function(*arguments).numpy())


def poison_pool(nbytes: int) -> None:
    """Fill the memory that the next results of up to `nbytes` bytes will get with NaN (in every float type).

    The virtual machine's pool gives freed pages out again as they are, so elements that a kernel forgets to write come
    out as NaN instead of as the right values of an earlier run.
    """
    import tvm

    pages = -(-max(nbytes, 1) // (4 * _PAGE_INTS))
    held = [_poisoner()(tvm.runtime.ShapeTuple([count * _PAGE_INTS])) for count in sorted({1, pages}) for _ in range(4)]
    del held  # back to the pool, full of NaN


@cache
def _poisoner() -> Any:
    """A function of the virtual machine that returns n int32 of all one bits: NaN as any float type."""
    import tvm
    from tvm import relax

    extent = tvm.tirx.Var("n", "int64")
    shape = relax.Var("shape", relax.ShapeType([extent]))
    builder = relax.BlockBuilder()
    with builder.function("ones", [shape]):
        with builder.dataflow():
            full = relax.op.full(relax.ShapeExpr([extent]), relax.const(-1, "int32"), "int32")
            result = builder.emit_output(full)
        builder.emit_func_output(result)
    return relax.VirtualMachine(tvm.compile(builder.get(), "llvm"), tvm.cpu())["ones"]
