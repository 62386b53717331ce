# SPDX-License-Identifier: Apache-2.0
"""A face of a problem as a compiled program of TVM computes it: by our kernels, a library, or stock operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from tvm_convgrad.bench.place import Place
from tvm_convgrad.catalogue import FACES
from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.evaluation import forced
from tvm_convgrad.kernels.transforms import TRANSFORMS, allow_transforms
from tvm_convgrad.offload.common import NAMES
from tvm_convgrad.problem import ConvProblem

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Call:
    """One way to compute a face.

    Attributes:
        name: of the party and its variant, such as "torch channels_last".
        run: computes and returns when the result is there, or, on a GPU, when that has been asked to compute it.
        read: what `run` returned as a float array in the problem's layout.
        kernel: what the plan chose, for TVM's.
        wait: on a GPU, returns when all that was asked for is there; None where `run` waits itself.
    """

    name: str
    run: Callable[[], Any]
    read: Callable[[Any], Array]
    kernel: str = ""
    wait: Callable[[], Any] | None = None


def random_operands(face: str, problem: ConvProblem) -> dict[str, Array]:
    """Normally distributed operands of a face of a static problem, by name, in the problem's types; always the same."""
    rng = np.random.default_rng(0)
    arrays = {}
    for name in FACES[face].operands:
        shape, dtype = problem.tensors[name]
        plain = rng.standard_normal([int(e) for e in shape], dtype=np.float32)
        arrays[name] = plain.astype(numpy_dtype(dtype), copy=False)
    return arrays


def tvm_call(face: str, problem: ConvProblem, arrays: Mapping[str, Array], place: Place, impl: str) -> Call:
    """The compiled operator.

    The virtual machine keeps what it returned until its next call returns: two results would take turns in a CPU's
    caches, where the other parties get the same memory each time. A second function, which returns nothing, makes it
    let go. On a GPU that would cost more than it gives. Calls take tuned engines of cuDNN, as `convgrad build` does.

    Args:
        arrays: operands of the problem's types.
        impl: what `Place.impl` may be, or "composition" for what stock operators give.

    Raises:
        UnsupportedError: the kernel, or the library, refuses the problem.
        SetupError: the library is not installed.
    """
    import tvm
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.lowering import recorded_choices
    from relax_ops.program import faces_module
    from tvm_convgrad.offload.partition import Offloaded, offload
    from tvm_convgrad.training.gpu import compile_for_gpu

    builder = relax.BlockBuilder()
    with builder.function("let_go", []):
        builder.emit_func_output(relax.ShapeExpr([]))
    module = faces_module([("main", FACES[face], problem)])
    module.update_func(tvm.ir.GlobalVar("let_go"), builder.finalize()["let_go"])
    with place.engines():
        library = offload(module, [impl], place.target) if impl in NAMES else Offloaded(module)
    transforms = impl == TRANSFORMS
    with forced(face, "kernel" if transforms else impl), allow_transforms(transforms), recorded_choices() as record:
        build = compile_for_gpu if place.gpu else tvm.compile
        executable = build(library.module, place.target)
    device = place.device
    machine = relax.VirtualMachine(executable, device)
    function, let_go = machine["main"], machine["let_go"]
    operands = [tvm.runtime.tensor(arrays[name], device) for name in FACES[face].operands]
    name = {"kernel": "ours", TRANSFORMS: "ours", "composition": "stock"}.get(impl, impl)
    forms = [entry.form for entry in library.lowered] or [entry.choice.kind for entry in record]

    def run() -> Any:
        result = function(*operands)
        let_go()
        return result

    return Call(
        name,
        partial(function, *operands) if place.gpu else run,
        lambda result: np.asarray(result.numpy()),
        forms[0] if forms else "stock",
        device.sync if place.gpu else None,
    )


__all__ = ["Array", "Call", "random_operands", "tvm_call"]
