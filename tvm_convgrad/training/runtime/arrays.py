# SPDX-License-Identifier: Apache-2.0
"""Arrays exchanged between libraries by DLPack, without a copy where possible."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.training.runtime.schema import Array

if TYPE_CHECKING:
    import tvm

ALIGNMENT = 64
"""Bytes: kernels load vectors from multiples of them. PyTorch's and TVM's tensors begin at one, numpy's may not."""

_REFUSALS = (BufferError, RuntimeError, TypeError, ValueError, AttributeError)
"""What libraries raise when they cannot export or import an array by DLPack."""


def as_array(given: Any, what: str) -> Array:
    """An array of any library on the CPU as one of numpy, in the same memory; lists and scalars become arrays.

    Args:
        given: of numpy, PyTorch, JAX or TVM, or what numpy makes an array of.
        what: how messages call it.

    Raises:
        ArtifactError: it is on another device, or numpy has no such element type.
    """
    if isinstance(given, np.ndarray | np.generic):
        return np.asarray(given)
    if hasattr(given, "__dlpack__"):
        try:
            return np.from_dlpack(given)
        except _REFUSALS:  # such as a tensor that requires a gradient, or of bfloat16; numpy may still read it
            pass
    try:
        return np.asarray(given)
    except _REFUSALS as error:
        reason = str(error).strip().splitlines()
        raise ArtifactError(
            f"{what}, a {type(given).__module__}.{type(given).__name__}, cannot be read as an array on the CPU "
            f"({reason[0] if reason else type(error).__name__}); give one of numpy, or move and detach it first, and "
            "convert it to a type that numpy has, as in x.detach().float().cpu()."
        ) from error


def tensor_of(array: Array, given: Any, device: tvm.runtime.Device) -> tvm.runtime.Tensor:
    """A contiguous array as a tensor of TVM: in its memory on the CPU, unless that has to be copied.

    It is copied if it begins at no multiple of 64 bytes, if its element type has no place in DLPack (ml_dtypes'), or
    if neither it nor `given` can be exported (numpy's read-only arrays).

    Args:
        array: what `as_array` and a conversion have made of `given`.
        given: the array of the caller, exported if `array` is its memory and cannot be.
        device: where the tensor has to be.
    """
    import tvm
    import tvm_ffi

    if device.dlpack_device_type() == 1 and array.size and array.ctypes.data % ALIGNMENT == 0:
        for source in (array, given):
            if not hasattr(source, "__dlpack__"):
                continue
            try:
                tensor = tvm_ffi.from_dlpack(source, require_alignment=ALIGNMENT, require_contiguous=True)
            except _REFUSALS:
                continue
            if (tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype)) == (
                array.ctypes.data,
                array.shape,
                str(array.dtype),
            ):
                return tensor
    return tvm.runtime.tensor(array, device=device)


def array_of(tensor: tvm.runtime.Tensor) -> Array:
    """A tensor as an array of numpy, in its memory if it is on the CPU and numpy has the element type."""
    try:
        return np.from_dlpack(tensor)
    except _REFUSALS:
        return np.array(tensor.numpy())


__all__ = ["ALIGNMENT", "array_of", "as_array", "tensor_of"]
