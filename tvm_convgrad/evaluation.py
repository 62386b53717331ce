# SPDX-License-Identifier: Apache-2.0
"""Compile one operator for one problem and run it on numpy arrays: `evaluate("conv2d_backward_weight", grad, data, …)`.

`evaluate("convolution_backward", grad, data, weight, …)` gives all three gradients, from one program. Compiled programs
are kept by problem, implementation and target, so that a second call only runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from typing import Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt

from legalize.forms import DATA_FORMS, WEIGHT_FORMS
from tvm_convgrad import backward
from tvm_convgrad.catalogue import BY_NAME, FACES, FORWARD, Face, NumberProver, OpEntry, TensorSpec, common_dtype
from tvm_convgrad.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.geometry import FLOAT_DTYPES
from tvm_convgrad.kernels.transforms import transforms_allowed
from tvm_convgrad.offload.common import NAMES as BACKENDS
from tvm_convgrad.problem import ConvProblem

Array = npt.NDArray[Any]

COMPOSITIONS = {
    "forward": (),
    "backward_weight": tuple(f"composition:{form}" for form in WEIGHT_FORMS),
    "backward_data": tuple(f"composition:{form}" for form in DATA_FORMS),
}
"""The compositions of each face, as values of `impl`; the first is what "composition" means."""

IMPLEMENTATIONS = (
    *("auto", "kernel", "winograd", "composition"),
    *(name for names in COMPOSITIONS.values() for name in names),
    *BACKENDS,
)
"""All values of `impl`."""


Gradients = tuple[Array | None, Array | None, Array | None]
"""Of data, weight and bias; None where masked."""


@overload
def evaluate(
    op: Literal["convolution_backward"], *arrays: Array, impl: str = ..., target: Any = ..., **attributes: Any
) -> Gradients: ...
@overload
def evaluate(op: str, *arrays: Array, impl: str = ..., target: Any = ..., **attributes: Any) -> Array: ...
def evaluate(op: str, *arrays: Array, impl: str = "auto", target: Any = "llvm", **attributes: Any) -> Array | Gradients:
    """Compute one operator of the family, or all gradients of a convolution, on numpy arrays.

    Args:
        op: "conv{1,2,3}d" (forward: data, weight), "conv{1,2,3}d_backward_weight" (grad, data),
            "conv{1,2,3}d_backward_data" (grad, weight) or "convolution_backward" (grad, data, weight).
        arrays: the operands, in float16, bfloat16 (ml_dtypes), float32 or float64.
        impl: "auto" (what a compiled program takes: the kernel unless it refuses), "kernel" (the generated one),
            "winograd" (the one by Winograd's transform, for 3x3), "composition" (of stock operations, the first one), a
            composition by name, such as "composition:tiled", or a vendor's library, "onednn", "cudnn" or "cutlass".
        target: a TVM target that this machine runs.
        attributes: those of the operator (tvm_convgrad.op), such as `kernel_size`, `data_shape`, `padding="SAME"`.

    Returns:
        The result, in the layout and type that the attributes say; of "convolution_backward" three, None where masked.

    Raises:
        ProblemError, DTypeError: the operands and attributes are not of one convolution.
        UnsupportedError: no such operator or implementation, or the implementation refuses the problem.
        SetupError: the vendor's library is not installed, or the GPU of the target is not there.
    """
    operands = [np.asarray(array) for array in arrays]
    if op == backward.NAME:
        return _backward(operands, impl, target, attributes)
    entry = BY_NAME.get(op)
    if entry is None:
        known = ", ".join((*sorted(BY_NAME), backward.NAME))
        raise UnsupportedError(f"evaluate: there is no operator {op!r}; there are {known}")
    if len(arrays) != 2:
        raise ProblemError(f"{op}: {len(arrays)} arrays were given; it takes two, {' and '.join(entry.face.operands)}")
    problem = _problem(entry, operands, attributes)
    return evaluate_problem(entry.face.name, problem, *operands, impl=impl, target=target)


def evaluate_problem(
    face: str, problem: ConvProblem, first: Array, second: Array, *, impl: str = "auto", target: Any = "llvm"
) -> Array:
    """Compute a face of a problem on numpy arrays of the problem's shapes, layouts and types.

    Args:
        face: "forward" (data, weight), "backward_weight" (grad, data) or "backward_data" (grad, weight).
        problem: static.
        first, second: the operands.
        impl, target: as in `evaluate`.

    Raises:
        ProblemError: an operand's shape or type is not the problem's.
        UnsupportedError: no such implementation for this face, or it refuses the problem.
    """

    problem.require_static("evaluate")
    for name, array in zip(FACES[face].operands, (first, second), strict=True):
        shape, dtype = problem.tensors[name]
        if array.shape != shape or str(array.dtype) != dtype:
            raise ProblemError(
                f"{face}: {name} is {array.dtype}{list(array.shape)}, but {problem.descriptor} needs "
                f"{dtype}{list(shape)}; convert it, or use the descriptor of what you have"
            )
    machine = _runnable(target)
    function = _compiled(FACES[face], problem, impl, str(machine), transforms_allowed())
    operands = (_on_device(array, machine) for array in (first, second))
    return cast(Array, function(*operands).numpy())


def _runnable(target: Any) -> Any:
    """The target as an object; raises SetupError where programs for it cannot run."""
    import tvm

    found = tvm.target.Target(target)
    if found.kind.name == "cuda":
        from tvm_convgrad.offload.cuda import local_target

        local_target()
    return found


def _on_device(array: Array, target: Any) -> Any:
    """An array where programs for a target read it."""
    import tvm

    return tvm.runtime.tensor(np.ascontiguousarray(array), tvm.device_from_target(target))


@lru_cache(maxsize=512)
def _compiled(face: Face, problem: ConvProblem, impl: str, target: str, _transforms: bool) -> Any:
    import tvm
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.program import faces_module

    machine = tvm.target.Target(target)
    module = faces_module([("main", face, problem)])
    with forced(face.name, impl):
        executable = tvm.compile(offloaded(module, impl, machine), machine)
    return relax.VirtualMachine(executable, tvm.device_from_target(machine))["main"]


def _backward(arrays: Sequence[Array], impl: str, target: Any, arguments: dict[str, Any]) -> Gradients:
    """All gradients of a convolution, those that are masked not computed."""

    if len(arrays) != 3:
        raise ProblemError(f"{backward.NAME}: {len(arrays)} arrays were given; it takes three, grad, data and weight")
    known = inspect.getfullargspec(backward.backward_call).kwonlyargs
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise ProblemError(f"{backward.NAME}: {', '.join(unknown)} unknown; it takes {', '.join(known)}")
    specs = {
        name: TensorSpec(array.shape, array.ndim, str(array.dtype))
        for name, array in zip(backward.OPERANDS, arrays, strict=True)
    }
    call = backward.backward_call(specs, NumberProver(), **arguments)
    if not any(call.mask):
        return None, None, None
    tensors = tuple((array.shape, str(array.dtype)) for array in arrays)
    machine = _runnable(target)
    function = _compiled_backward(call, tensors, impl, str(machine), transforms_allowed())
    results = iter(function(*(_on_device(array, machine) for array in arrays)))
    data, weight, bias = (next(results).numpy() if wanted else None for wanted in call.mask)
    return data, weight, bias


@lru_cache(maxsize=512)
def _compiled_backward(
    call: backward.BackwardCall,
    tensors: tuple[tuple[tuple[int, ...], str], ...],
    impl: str,
    target: str,
    _transforms: bool,
) -> Any:
    import tvm
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.backward import backward_module
    from relax_ops.fusion import fuse_epilogues

    machine = tvm.target.Target(target)
    with ExitStack() as stack:
        for face in FACES:
            stack.enter_context(forced(face, impl))
        module = backward_module(call, dict(zip(backward.OPERANDS, tensors, strict=True)))
        with machine:
            module = fuse_epilogues(offloaded(module, impl, machine))
        executable = tvm.compile(module, machine)
    return relax.VirtualMachine(executable, tvm.device_from_target(machine))["main"]


def offloaded(module: Any, impl: str, target: Any) -> Any:
    """The module with its convolutions as calls of the vendor's library that `impl` names, if it names one."""
    if impl not in BACKENDS:
        return module
    from tvm_convgrad.offload.partition import partition

    return partition(module, [impl], target)


def forced(face: str, impl: str) -> AbstractContextManager[None]:
    """A context in which legalization of `face` uses `impl`; what a vendor's library takes is not legalized.

    Raises:
        UnsupportedError: this face has no such implementation.
    """
    from relax_ops.lowering import forced_forms

    if impl in ("auto", *BACKENDS):
        return nullcontext()
    if impl not in ("kernel", "winograd", "composition", *COMPOSITIONS[face]):
        known = ", ".join(("auto", "kernel", "winograd", "composition", *COMPOSITIONS[face], *BACKENDS))
        raise UnsupportedError(f"{face}: there is no implementation {impl!r}; there are {known}")
    return forced_forms(**{face: impl.removeprefix("composition:")})


def _problem(entry: OpEntry, operands: Sequence[Array], attributes: dict[str, Any]) -> ConvProblem:
    """The problem of a call on arrays, after the operator's own type relation has had its say."""
    from tvm import relax

    import tvm_convgrad

    tvm_convgrad.register()
    from relax_ops.ir import problem_of
    from tvm_convgrad import op

    for name, array in zip(entry.face.operands, operands, strict=True):
        if str(array.dtype) not in FLOAT_DTYPES:
            raise DTypeError(f"{entry.name}: {name} has dtype {array.dtype}; accepted are {', '.join(FLOAT_DTYPES)}")
    own = {"backward_weight": "kernel_size", "backward_data": "data_shape"}.get(entry.face.name)
    if own is not None and own not in attributes:
        raise ProblemError(f"{entry.name}: {own} is missing; the operands do not determine it")
    known = dict.fromkeys((*([own] if own else []), *entry.attributes))
    unknown = [name for name in attributes if name not in known]
    if unknown:
        raise ProblemError(f"{entry.name}: {', '.join(unknown)} unknown; it takes {', '.join(known)}")
    if entry.face is FORWARD:
        data, weight = operands
        types = str(data.dtype), str(weight.dtype)
        suggested = common_dtype([TensorSpec(None, None, dtype) for dtype in types])
        out_dtype = str(attributes.pop("out_dtype", None) or suggested)
        return ConvProblem.from_shapes(data.shape, weight.shape, dtypes=(*types, out_dtype), **attributes)
    function = getattr(op, entry.name)
    variables = [
        relax.Var(name, relax.TensorType(array.shape, str(array.dtype)))
        for name, array in zip(entry.face.operands, operands, strict=True)
    ]
    return problem_of(relax.BlockBuilder().normalize(function(*variables, **attributes)))
