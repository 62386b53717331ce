# SPDX-License-Identifier: Apache-2.0
"""One direction of a problem as a compiled TVM program: generated kernels, a vendor library or stock operators."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import tvm
from tvm import relax

import tvm_convgrad
from relax_ops.lowering import recorded_choices
from relax_ops.program import directions_module
from tvm_convgrad.codegen.hardware import is_gpu
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.entries import default_path
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.evaluation import forced, rounds_once
from tvm_convgrad.kernels.transforms import TRANSFORMS, allow_transforms
from tvm_convgrad.measure.timing import Array, Call
from tvm_convgrad.offload.partition import Offloaded, offload
from tvm_convgrad.offload.registry import NAMES, backend
from tvm_convgrad.training.compile.gpu import compile_for_gpu


def random_operands(direction: str, problem: ConvProblem) -> dict[str, Array]:
    """Normally distributed operands of a direction of a static problem, by name, in its types; always the same."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name in DIRECTIONS[direction].operands:
        shape, dtype = problem.tensors[name]
        plain = rng.standard_normal([int(e) for e in shape], dtype=np.float32)
        arrays[name] = plain.astype(numpy_dtype(dtype), copy=False)
    return arrays


def tvm_call(
    direction: str, problem: ConvProblem, arrays: Mapping[str, Array], target: tvm.target.Target, impl: str
) -> Call:
    """The compiled operator on this machine's CPU or first GPU.

    The virtual machine keeps what it returned until its next call returns: two results would take turns in a CPU's
    caches, where other calls get the same memory each time. A second function, which returns nothing, makes it let go.
    On a GPU that would cost more than it gives. Calls of a library take what was tuned for it, as `build`'s do.

    Args:
        arrays: operands of the problem's types.
        impl: "kernel", "transforms" (kernels, Winograd's allowed), a backend, or "composition" for stock operators.

    Raises:
        UnsupportedError: the kernel, or the library, refuses the problem.
        SetupError: the library is not installed.
    """
    tvm_convgrad.register()
    gpu = is_gpu(target)
    builder = relax.BlockBuilder()
    with builder.function("let_go", []):
        builder.emit_func_output(relax.ShapeExpr([]))
    # As in a step, which has no cast: kernels and libraries sum 16-bit operands in float32 and round once.
    is_direct = gpu or rounds_once(direction, impl)
    module = directions_module([("main", DIRECTIONS[direction], problem)], is_direct=is_direct)
    module.update_func(tvm.ir.GlobalVar("let_go"), builder.finalize()["let_go"])
    library = Offloaded(module)
    if impl in NAMES:
        with backend(impl).tuned(default_path()):
            library = offload(module, [impl], target)
    transforms = impl == TRANSFORMS
    with (
        forced(direction, "kernel" if transforms else impl),
        allow_transforms(transforms),
        recorded_choices() as record,
    ):
        build = compile_for_gpu if gpu else tvm.compile
        executable = build(library.module, target)
    device = tvm.cuda(0) if gpu else tvm.cpu()
    machine = relax.VirtualMachine(executable, device)
    function, let_go = machine["main"], machine["let_go"]
    operands = [tvm.runtime.tensor(arrays[name], device) for name in DIRECTIONS[direction].operands]
    name = {"kernel": "ours", TRANSFORMS: "ours", "composition": "stock"}.get(impl, impl)
    forms = [entry.form for entry in library.lowered] or [entry.choice.name for entry in record]

    def run() -> Any:
        result = function(*operands)
        let_go()
        return result

    return Call(
        name,
        partial(function, *operands) if gpu else run,
        lambda result: np.asarray(result.numpy()),
        forms[0] if forms else "stock",
        device.sync if gpu else None,
    )


__all__ = ["random_operands", "tvm_call"]
