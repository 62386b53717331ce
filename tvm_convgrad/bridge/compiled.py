# SPDX-License-Identifier: Apache-2.0
"""`tvm_convgrad.compile`: one operator as a function of numpy arrays, PyTorch tensors or any other with DLPack."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Protocol, TypeGuard, TypeVar, cast

import numpy as np

from tvm_convgrad.bridge.given import store_folder
from tvm_convgrad.bridge.job import Job
from tvm_convgrad.bridge.library import Kernel
from tvm_convgrad.bridge.store import kernels
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, BY_NAME, FORWARD, Direction
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import DTYPE_BYTES, SPATIAL
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.threads import available_cores

_TRANSPOSED = {
    "": (BACKWARD_DATA, ("data", "weight"), False),
    "_backward_weight": (BACKWARD_WEIGHT, ("grad", "data"), True),
    "_backward_data": (FORWARD, ("grad", "weight"), False),
}
"""A transposed convolution's directions as those of the convolution whose dgrad it is: its operands by their own names,
and whether they change places."""


_FOR_TORCH = "call PyTorch's convolution with tvm_convgrad.torch.enable(), or torch.ops.tvm_convgrad's gradients"


class DLPack(Protocol):
    """An array whose memory others may use: numpy's, PyTorch's, JAX's, TVM's."""

    def __dlpack__(self) -> object:
        """The capsule."""

    def __dlpack_device__(self) -> tuple[int, int]:
        """Where its memory is; (1, 0) is the CPU's."""


Tensor = TypeVar("Tensor", bound=DLPack)


class CompiledOperator:
    """One operator of one problem, as machine code: `operator(first, second, out=...)`.

    Attributes:
        name: of the operator.
        problem: what it was compiled for.
        operands: names, shapes and element types of the two arrays that it takes.
        result: shape and element type of what it gives.
    """

    def __init__(self, name: str, problem: ConvProblem, kernel: Kernel, names: tuple[str, str], swapped: bool) -> None:
        first, second, self.result = kernel.job.tensors
        ordered = (second, first) if swapped else (first, second)
        self.name, self.problem = name, problem
        self.operands = tuple((called, *tensor) for called, tensor in zip(names, ordered, strict=True))
        self._kernel, self._swapped = kernel, swapped

    def __call__(
        self, first: DLPack, second: DLPack, *, out: Tensor | None = None, threads: int | None = None
    ) -> Tensor:
        """Compute the operator on the given arrays, without copying them.

        Args:
            first, second: the operands: contiguous arrays with the shapes and types in `operands`.
            out: array for the result, which must not overlap the operands. None: a new PyTorch tensor if
                `first` is one, otherwise a new numpy array.
            threads: number of threads; None means PyTorch's number if PyTorch is loaded, otherwise all cores.

        Returns:
            `out`, or the new array.

        Raises:
            ProblemError: an array has another shape or is not contiguous, `out` overlaps an operand, or `threads` is
                less than 1.
            DTypeError: an array has another element type or byte order, or `threads` is no int.
            UnsupportedError: an array is not in the CPU's memory, or has none, as PyTorch's fake tensors; or PyTorch
                would take a derivative by it, which it would not get.
        """
        if threads is not None and (isinstance(threads, bool) or not isinstance(threads, int)):
            raise DTypeError(f"{self.name}: threads is {threads!r}, a {type(threads).__name__}; give an int, or None")
        if threads is not None and threads < 1:
            raise ProblemError(f"{self.name}: threads is {threads}; give 1 or more, or None for the default")
        held = []
        for (called, shape, dtype), array in zip(self.operands, (first, second), strict=True):
            held.append(_Memory(array, f"{self.name}: {called}", shape, dtype))
        shape, dtype = self.result
        result = out if out is not None else cast(Tensor, _empty(shape, dtype, like=first))
        written = _Memory(result, f"{self.name}: out", shape, dtype, write=True)
        for (called, _, _), operand in zip(self.operands, held, strict=True):
            if written.address < operand.end and operand.address < written.end:
                raise ProblemError(f"{self.name}: out shares memory with {called}; give it memory of its own")
        operands = reversed(held) if self._swapped else held
        self._kernel.run(
            _threads() if threads is None else threads, *(operand.address for operand in operands), written.address
        )
        if out is not None and _is_torch(out):
            # Autograd then knows that a tensor it saved has changed.
            sys.modules["torch"].autograd.graph.increment_version(out)
        return result

    def __repr__(self) -> str:
        return f"<{self.name} of {self.problem.descriptor}>"


class _Memory:
    """The memory of an array of a shape and type, which are checked; it lives while this does."""

    def __init__(self, array: object, what: str, shape: tuple[int, ...], dtype: str, write: bool = False) -> None:
        found: Sequence[int]
        if isinstance(array, np.ndarray):
            found, kind, contiguous = array.shape, array.dtype.name, array.flags.c_contiguous
            if write and not array.flags.writeable:
                raise ProblemError(f"{what} is read-only; give an array that can be written")
            if not array.dtype.isnative:
                raise DTypeError(f"{what} has numbers of the other byte order; give array.astype({kind!r})")
            self.address = int(array.ctypes.data)
        elif _is_torch(array) and array.device.type == "cpu":
            if array.is_neg():
                raise ProblemError(f"{what} is a negated view; give tensor.resolve_neg()")
            found, kind, contiguous = tuple(array.shape), str(array.dtype).rpartition(".")[2], array.is_contiguous()
            self.address = _address_of(array, what)
        elif write and _is_jax(array):
            raise ProblemError(f"{what} is read-only, as JAX's arrays never change; give an array that can be written")
        elif hasattr(array, "__dlpack__"):
            import tvm_ffi  # it imports PyTorch, if that is installed

            view = tvm_ffi.from_dlpack(array)
            if view.device.dlpack_device_type() != 1:
                raise UnsupportedError(
                    f"{what} is on {view.device}; kernels compute in the CPU's memory: move it there"
                )
            found, kind, contiguous = tuple(view.shape), str(view.dtype), view.is_contiguous()
            self._view, self.address = view, int(view.data_ptr())
        else:
            raise DTypeError(f"{what} is a {type(array).__name__}; give a numpy array, or one with __dlpack__")
        if tuple(found) != shape:
            raise ProblemError(f"{what} has shape {list(found)}; this operator was compiled for {list(shape)}")
        if kind != dtype:
            raise DTypeError(f"{what} has dtype {kind}; this operator was compiled for {dtype}")
        if not contiguous:
            raise ProblemError(f"{what} is not contiguous in the order of its axes; copy it, or permute its axes")
        self.end = self.address + int(np.prod(shape, dtype=np.int64)) * DTYPE_BYTES[dtype]


def compile_operator(
    operator: str, problem: str | ConvProblem, *, folder: str | os.PathLike[str] | None = None
) -> CompiledOperator:
    """Compile one operator for this CPU: a function of numpy arrays, PyTorch tensors or other DLPack arrays.

    TVM is not loaded into this process: another process compiles the operator once and stores the machine code in the
    user's cache folder (or CONVGRAD_CACHE), from which it is loaded in about a millisecond. Kernels run on the OpenMP
    threads of the process: PyTorch's, if PyTorch is loaded first.

    Args:
        operator: conv{1,2,3}d(data, weight), conv{1,2,3}d_backward_weight(grad, data) or
            conv{1,2,3}d_backward_data(grad, weight); or conv{1,2,3}d_transpose(data, weight) and, with the operands of
            the others, conv{1,2,3}d_transpose_backward_weight and conv{1,2,3}d_transpose_backward_data.
        problem: the convolution, or its descriptor. For a transposed operator, the convolution whose dgrad it is: its
            data then has the shape of the problem's grad.
        folder: where compiled objects are stored; None means the default folder.

    Returns:
        A function (first, second, *, out=None, threads=None).

    Raises:
        DescriptorError, ProblemError: the problem is not valid, or its rank is not that of the operator.
        DTypeError: `folder` is not a path.
        UnsupportedError: the operator is unknown, or no kernel supports this problem.
        SetupError: TVM, a C++ compiler or OpenMP is missing.

    Example:
        >>> import numpy as np
        >>> import tvm_convgrad
        >>> wgrad = tvm_convgrad.compile("conv2d_backward_weight", "mb1ic1ih4oc1kh3")
        >>> wgrad(np.ones((1, 1, 2, 2), "float32"), np.ones((1, 1, 4, 4), "float32"))[0, 0, 0]
        array([4., 4., 4.], dtype=float32)
    """
    known = ConvProblem.from_descriptor(problem) if isinstance(problem, str) else problem
    known.require_static(operator)
    rank, direction, names, swapped = _operator(operator)
    if rank != known.rank:
        raise ProblemError(f"{operator}: {known.descriptor} has {known.rank} spatial axes, not {rank}")
    store = kernels(store_folder("compile: folder", folder))
    store.compile_here()
    kernel = store.request(Job(direction.name, known.descriptor)).result()
    return CompiledOperator(operator, known, kernel, names, swapped)


def _operator(name: str) -> tuple[int, Direction, tuple[str, str], bool]:
    """Rank, direction, names of operands, and whether they change places."""
    entry = BY_NAME.get(name)
    if entry is not None:
        return entry.rank, entry.direction, entry.direction.operands, False
    transposed = {f"conv{rank}d_transpose{end}": (rank, *rest) for rank in SPATIAL for end, rest in _TRANSPOSED.items()}
    if name not in transposed:
        raise UnsupportedError(f"there is no operator {name!r}; there are {', '.join((*BY_NAME, *transposed))}")
    return transposed[name]


def _is_torch(array: Any) -> TypeGuard[Any]:
    """Whether an array is a tensor of PyTorch, which is not loaded for that."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def _is_jax(array: object) -> bool:
    """Whether an array is one of JAX, which is not loaded for that."""
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(array, jax.Array)


def _address_of(tensor: Any, what: str) -> int:
    """Where the memory of PyTorch's tensor is, which no derivative is to be taken of."""
    torch = sys.modules["torch"]
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise UnsupportedError(f"{what} is a tensor of torch.func; {_FOR_TORCH}")
    if isinstance(tensor, torch._subclasses.FakeTensor) or (tensor.numel() and not tensor.data_ptr()):
        raise UnsupportedError(
            f"{what} has no memory: it is a tensor of torch.export, torch.compile or a FakeTensorMode; {_FOR_TORCH}"
        )
    if tensor.requires_grad and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{what} requires a gradient, which this call would not record: give tensor.detach(), or {_FOR_TORCH}"
        )
    if torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None:
        raise UnsupportedError(f"{what} has a tangent, which this call would drop: {_FOR_TORCH}")
    return int(tensor.data_ptr())


def _threads() -> int:
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else available_cores()


def _empty(shape: tuple[int, ...], dtype: str, like: object) -> object:
    if _is_torch(like):
        torch = sys.modules["torch"]
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return np.empty(shape, numpy_dtype(dtype))


__all__ = ["CompiledOperator", "DLPack", "compile_operator"]
