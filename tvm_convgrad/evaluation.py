# SPDX-License-Identifier: Apache-2.0
"""`evaluate`: compiles one operator of the family for one problem, and runs it on numpy arrays.

Compiled programs are kept by problem, implementation and target, so that a second call only runs.
"""

from __future__ import annotations

import inspect
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import lru_cache
from typing import Any, Literal, cast, overload

import numpy as np
import numpy.typing as npt
import tvm
from tvm import relax
from tvm.target import Target
from tvm_ffi import Function

import tvm_convgrad
from relax_ops import lowering
from relax_ops.backward import backward_module
from relax_ops.ir import problem_of
from relax_ops.passes.fusion import fuse_epilogues
from relax_ops.program import directions_module
from tvm_convgrad import op as operators
from tvm_convgrad.codegen.hardware import is_gpu
from tvm_convgrad.core import backward
from tvm_convgrad.core.catalogue import BY_NAME, DIRECTIONS, FORWARD, Direction, OpEntry
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.errors import DTypeError, ProblemError, SetupError, UnsupportedError
from tvm_convgrad.core.geometry import FLOAT_DTYPES
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import NumberProver, TensorSpec, common_dtype
from tvm_convgrad.kernels.choice import COMPOSITION
from tvm_convgrad.kernels.registry import forms_of
from tvm_convgrad.kernels.transforms import transforms_allowed
from tvm_convgrad.offload.cuda import local_target
from tvm_convgrad.offload.partition import partition
from tvm_convgrad.offload.registry import NAMES as BACKENDS
from tvm_convgrad.targets import TargetLike, required_features, target_of

Array = npt.NDArray[Any]

COMPOSITIONS = {
    direction: tuple(f"{COMPOSITION}:{form}" for form in forms if form != COMPOSITION)
    for direction, forms in lowering.COMPOSITIONS.items()
}
"""The compositions of each direction, as values of `impl`; the first is what "composition" means."""


def implementations(direction: str | None = None) -> tuple[str, ...]:
    """The values of `impl` for one direction, or for any."""
    directions = tuple(DIRECTIONS) if direction is None else (direction,)
    kernels = dict.fromkeys(form for each in directions for form in forms_of(each))
    compositions = (name for each in directions for name in COMPOSITIONS[each])
    return "auto", "kernel", *kernels, "composition", *compositions, *BACKENDS


Gradients = tuple[Array | None, Array | None, Array | None]
"""The gradients of data, weight and bias; None where masked."""


@overload
def evaluate(
    op: Literal["convolution_backward"],
    *arrays: npt.ArrayLike,
    impl: str = ...,
    target: TargetLike = ...,
    **attributes: Any,
) -> Gradients: ...
@overload
def evaluate(
    op: str, *arrays: npt.ArrayLike, impl: str = ..., target: TargetLike = ..., **attributes: Any
) -> Array: ...
def evaluate(
    op: str, *arrays: npt.ArrayLike, impl: str = "auto", target: TargetLike = "llvm", **attributes: Any
) -> Array | Gradients:
    """Compute a convolution, one of its gradients, or all of them, on numpy arrays.

    For rank d = 1, 2 or 3, with data of the shape [N, C, *extents], weight [O, C / groups, *kernel] and grad (the
    gradient of the convolution's result) [N, O, *result extents], all in the layouts that the attributes name:

    | op                         | arrays             | required attributes | result                          |
    |----------------------------|--------------------|---------------------|---------------------------------|
    | "conv{d}d"                 | data, weight       |                     | of grad's shape                 |
    | "conv{d}d_backward_weight" | grad, data         | kernel_size         | of weight's shape               |
    | "conv{d}d_backward_data"   | grad, weight       | data_shape          | of data's shape                 |
    | "convolution_backward"     | grad, data, weight |                     | gradients of data, weight, bias |

    Args:
        op: the name of the operator.
        arrays: the operands, of type float16, bfloat16 (from ml_dtypes), float32 or float64.
        impl: the implementation:

            - "auto": the one that a compiled program uses: the generated kernel with the least estimated time, or the
              composition if no kernel supports the problem;
            - "kernel": the generated kernel with the least estimated time; "kernel:implicit-gemm" and the like: the
              named one; "winograd": the kernel that uses Winograd's transform (3x3 only);
            - "composition": stock operators of TVM; "composition:tiled" and the like: a named composition (see
              `COMPOSITIONS`);
            - "onednn" or another backend: a vendor library.
        target: a TVM target that this machine can run. "llvm" uses only the baseline instruction set of the
            architecture, "native" those of this CPU; {"kind": "llvm", "mcpu": "..."} names a CPU.
        attributes: attributes of the operator as in `tvm_convgrad.op`: strides, padding, dilation, groups, grad_layout,
            data_layout, kernel_layout, out_dtype, and kernel_size or data_shape; for "convolution_backward" those of
            `tvm_convgrad.convolution_backward`.

    Returns:
        The result as an array, with the layout and type given by the attributes. For "convolution_backward" the
        gradients of data, weight and bias; None where `output_mask` is False.

    Raises:
        ProblemError, DTypeError: operands and attributes do not belong to one convolution.
        UnsupportedError: the operator or implementation is unknown, or does not support the problem.
        SetupError: the vendor library is not installed, or the target is for another machine.

    Example:
        >>> import numpy as np
        >>> from tvm_convgrad import evaluate
        >>> data = np.arange(16, dtype="float32").reshape(1, 1, 4, 4)
        >>> weight = np.ones((1, 1, 3, 3), "float32")
        >>> evaluate("conv2d", data, weight)
        array([[[[45., 54.],
                 [81., 90.]]]], dtype=float32)
        >>> grad = np.ones((1, 1, 2, 2), "float32")
        >>> evaluate("conv2d_backward_weight", grad, data, kernel_size=3).shape
        (1, 1, 3, 3)
        >>> evaluate("conv2d_backward_data", grad, weight, data_shape=(1, 1, 4, 4))[0, 0]
        array([[1., 2., 2., 1.],
               [2., 4., 4., 2.],
               [2., 4., 4., 2.],
               [1., 2., 2., 1.]], dtype=float32)
        >>> gradients = evaluate("convolution_backward", grad, data, weight, output_mask=(True, True, False))
        >>> [None if each is None else each.shape for each in gradients]
        [(1, 1, 4, 4), (1, 1, 3, 3), None]
    """
    operands = [np.asarray(array) for array in arrays]
    if op == backward.NAME:
        return _backward(operands, impl, target, attributes)
    entry = BY_NAME.get(op)
    if entry is None:
        known = ", ".join((*sorted(BY_NAME), backward.NAME))
        raise UnsupportedError(f"evaluate: there is no operator {op!r}; there are {known}")
    if len(arrays) != 2:
        raise ProblemError(
            f"{op}: {len(arrays)} arrays were given; it takes two, {' and '.join(entry.direction.operands)}"
        )
    problem = _problem(entry, operands, attributes)
    return evaluate_problem(entry.direction.name, problem, *operands, impl=impl, target=target)


def evaluate_problem(
    direction: str,
    problem: ConvProblem,
    first: Array,
    second: Array,
    *,
    impl: str = "auto",
    target: TargetLike = "llvm",
) -> Array:
    """Compute a direction of a problem on numpy arrays of the problem's shapes, layouts and types.

    Args:
        direction: "forward" (data, weight), "backward_weight" (grad, data) or "backward_data" (grad, weight).
        problem: a static problem.
        first, second: the operands.
        impl, target: as in `evaluate`.

    Returns:
        The result, of the problem's shape, layout and type.

    Raises:
        ProblemError: an operand's shape or type is not the problem's.
        UnsupportedError: no such implementation for this direction, or it refuses the problem.

    Example:
        >>> import numpy as np
        >>> from tvm_convgrad import ConvProblem
        >>> problem = ConvProblem.from_descriptor("mb1ic1ih4oc1kh3")
        >>> grad, data = np.ones((1, 1, 2, 2), "float32"), np.ones((1, 1, 4, 4), "float32")
        >>> evaluate_problem("backward_weight", problem, grad, data).tolist()
        [[[[4.0, 4.0, 4.0], [4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]]]
    """
    problem.require_static("evaluate")
    for name, array in zip(DIRECTIONS[direction].operands, (first, second), strict=True):
        shape, dtype = problem.tensors[name]
        if array.shape != shape or str(array.dtype) != dtype:
            raise ProblemError(
                f"{direction}: {name} is {array.dtype}{list(array.shape)}, but {problem.descriptor} needs "
                f"{dtype}{list(shape)}; convert it, or use the descriptor of what you have"
            )
    machine = _runnable(target)
    function = _compiled(DIRECTIONS[direction], problem, impl, str(machine), transforms_allowed())
    operands = (_on_device(array, machine) for array in (first, second))
    return cast(Array, function(*operands).numpy())


def rounds_once(direction: str, impl: str) -> bool:
    """Whether an implementation sums 16-bit operands in float32 and stores 16 bits itself, as it does in a step.

    Kernels and libraries do. Stock operators, which "auto" may be, would sum in 16 bits: a cast follows theirs.
    """
    return impl not in ("auto", COMPOSITION, *COMPOSITIONS[direction])


def _runnable(target: TargetLike) -> Target:
    """The target as an object; raises SetupError where programs for it cannot run."""
    found = target_of(target, "evaluate")
    if is_gpu(found):
        local_target()
        return found
    architecture = str(found.attrs.get("mtriple") or platform.machine()).partition("-")[0]
    if architecture != platform.machine():
        raise SetupError(
            f"evaluate: target {found} is for {architecture}, but this machine is {platform.machine()}; use 'native', "
            "or compile the operator with tvm.compile and run it there."
        )
    here = local_features()  # empty where the system does not tell
    missing = sorted(set(required_features(found)) - here) if here else []
    if missing:
        raise SetupError(
            f"evaluate: target {found} needs {', '.join(missing)}, which this CPU does not have; use 'native'."
        )
    return found


def _on_device(array: Array, target: Target) -> tvm.runtime.Tensor:
    """A copy of an array on the target's device."""
    return tvm.runtime.tensor(np.ascontiguousarray(array), tvm.device_from_target(target))


@lru_cache(maxsize=512)
def _compiled(direction: Direction, problem: ConvProblem, impl: str, target: str, _transforms: bool) -> Function:
    """The compiled function of a direction of a problem."""
    tvm_convgrad.register()
    machine = Target(target)
    module = directions_module([("main", direction, problem)], is_direct=rounds_once(direction.name, impl))
    with forced(direction.name, impl):
        executable = tvm.compile(offloaded(module, impl, machine), machine)
    return relax.VirtualMachine(executable, tvm.device_from_target(machine))["main"]


def _backward(arrays: Sequence[Array], impl: str, target: TargetLike, arguments: dict[str, Any]) -> Gradients:
    """All gradients of a convolution; those that are masked are not computed."""
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
) -> Function:
    """The compiled function of a call of convolution_backward, for operands of these shapes and types."""
    tvm_convgrad.register()
    machine = Target(target)
    with ExitStack() as stack:
        for direction in DIRECTIONS:
            stack.enter_context(forced(direction, impl))
        module = backward_module(call, dict(zip(backward.OPERANDS, tensors, strict=True)))
        with machine:
            module = fuse_epilogues(offloaded(module, impl, machine))
        executable = tvm.compile(module, machine)
    return relax.VirtualMachine(executable, tvm.device_from_target(machine))["main"]


def offloaded(module: tvm.IRModule, impl: str, target: Target) -> tvm.IRModule:
    """The module with its convolutions as calls of the vendor library that `impl` names; itself if it names none."""
    return partition(module, [impl], target) if impl in BACKENDS else module


def forced(direction: str, impl: str) -> AbstractContextManager[None]:
    """A context in which legalization of `direction` uses `impl`; what a vendor library takes is not legalized.

    Raises:
        UnsupportedError: this direction has no such implementation.
    """
    if impl in ("auto", *BACKENDS):
        return nullcontext()
    known = implementations(direction)
    if impl not in known:
        raise UnsupportedError(f"{direction}: there is no implementation {impl!r}; there are {', '.join(known)}")
    return lowering.forced_forms(**{direction: impl.removeprefix("composition:")})


def _problem(entry: OpEntry, operands: Sequence[Array], attributes: dict[str, Any]) -> ConvProblem:
    """The problem of a call on arrays, which the operator's own type relation checks.

    Raises:
        ProblemError, DTypeError: operands and attributes do not belong to one convolution.
    """
    tvm_convgrad.register()
    for name, array in zip(entry.direction.operands, operands, strict=True):
        if str(array.dtype) not in FLOAT_DTYPES:
            raise DTypeError(f"{entry.name}: {name} has dtype {array.dtype}; accepted are {', '.join(FLOAT_DTYPES)}")
    own = {"backward_weight": "kernel_size", "backward_data": "data_shape"}.get(entry.direction.name)
    if own is not None and own not in attributes:
        raise ProblemError(f"{entry.name}: {own} is missing; the operands do not determine it")
    known = dict.fromkeys((*([own] if own else []), *entry.attributes))
    unknown = [name for name in attributes if name not in known]
    if unknown:
        raise ProblemError(f"{entry.name}: {', '.join(unknown)} unknown; it takes {', '.join(known)}")
    if entry.direction is FORWARD:
        data, weight = operands
        types = str(data.dtype), str(weight.dtype)
        suggested = common_dtype([TensorSpec(None, None, dtype) for dtype in types])
        out_dtype = str(attributes.pop("out_dtype", None) or suggested)
        return ConvProblem.from_shapes(data.shape, weight.shape, dtypes=(*types, out_dtype), **attributes)
    variables = [
        relax.Var(name, relax.TensorType(array.shape, str(array.dtype)))
        for name, array in zip(entry.direction.operands, operands, strict=True)
    ]
    call = getattr(operators, entry.name)(*variables, **attributes)
    return problem_of(relax.BlockBuilder().normalize(call))
