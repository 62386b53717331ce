# SPDX-License-Identifier: Apache-2.0
"""TVM's binary tensors and parameter files, read without TVM: every size is checked against what is there."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from typing import Any

import ml_dtypes
import numpy as np

from tvm_convgrad.core.errors import ModelError

Array = np.ndarray[Any, Any]

TENSOR_MAGIC = 0xDD5E40F096B4A13F
PARAMS_MAGIC = 0xF7E58D4F05049CB7
MAX_RANK = 32
_CODES = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}
_HEADER = struct.Struct("<QQiii")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy type of a TVM one.

    Raises:
        ModelError: numpy has none.
    """
    if name == "bfloat16":
        return np.dtype(ml_dtypes.bfloat16)
    try:
        if name == "bool" or name in _PLAIN:
            return np.dtype(name)
    except TypeError:
        pass
    raise ModelError(f"The element type {name!r} is not imported; {', '.join(sorted(_PLAIN))}, bool and bfloat16 are.")


_PLAIN = {f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)} | {"float16", "float32", "float64"}


class _Reader:
    """A cursor over bytes that refuses to run past their end."""

    def __init__(self, data: bytes | memoryview, what: str) -> None:
        self.data, self.what, self.at = memoryview(data), what, 0

    def take(self, count: int) -> memoryview:
        if count < 0 or count > len(self.data) - self.at:
            raise ModelError(
                f"{self.what} is truncated or damaged: {count} bytes are announced where {len(self.data) - self.at} "
                "are left; write it again."
            )
        self.at += count
        return self.data[self.at - count : self.at]

    def unpack(self, form: struct.Struct) -> tuple[Any, ...]:
        return form.unpack(self.take(form.size))

    def count(self) -> int:
        return int(struct.unpack("<Q", self.take(8))[0])


def _tensor(reader: _Reader) -> Array:
    magic, _, _, _, rank = reader.unpack(_HEADER)
    if magic != TENSOR_MAGIC:
        raise ModelError(f"{reader.what} holds no TVM tensor where one is announced (magic number {magic:#x}).")
    if not 0 <= rank <= MAX_RANK:
        raise ModelError(f"{reader.what} has a tensor of {rank} axes; at most {MAX_RANK} are possible.")
    code, bits, lanes = reader.unpack(struct.Struct("<BBH"))
    shape = reader.unpack(struct.Struct(f"<{rank}q"))
    (size,) = reader.unpack(struct.Struct("<q"))
    name = "bool" if (code, bits) == (1, 1) else f"{_CODES.get(code, f'type {code} of ')}{bits}"
    if lanes != 1:
        raise ModelError(f"{reader.what} has a tensor of {name} with {lanes} lanes; only plain tensors are imported.")
    dtype = numpy_dtype(name)
    if any(extent < 0 for extent in shape) or math.prod(shape) * dtype.itemsize != size:
        raise ModelError(f"{reader.what} has a tensor {name}{list(shape)} with {size} bytes, which contradict.")
    return np.frombuffer(reader.take(size), dtype).reshape(shape)


def decode_tensor(text: str, what: str) -> Array:
    """The tensor of a base64 text, as JSON holds it.

    Raises:
        ModelError: it is not base64 text, or no tensor.
    """
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ModelError(f"{what} is not base64 text ({error}); the file is damaged.") from error
    reader = _Reader(data, what)
    array = _tensor(reader)
    if reader.at != len(data):
        raise ModelError(f"{what} has {len(data) - reader.at} bytes behind its tensor; the file is damaged.")
    return array


def read_params(data: bytes, what: str) -> dict[str, Array]:
    """The arrays of a file that relay.save_param_dict wrote, by name.

    Raises:
        ModelError: it is not one, or is damaged.
    """
    reader = _Reader(data, what)
    if len(data) < 16 or reader.count() != PARAMS_MAGIC:
        raise ModelError(f"{what} is not a parameter file of Relay; write it with relay.save_param_dict.")
    reader.take(8)
    names: list[str] = []
    for _ in range(_sane(reader, reader.count(), 8)):
        try:
            names.append(bytes(reader.take(reader.count())).decode("utf-8"))
        except UnicodeDecodeError as error:
            raise ModelError(f"{what} has a parameter name that is not UTF-8 text; the file is damaged.") from error
    count = _sane(reader, reader.count(), _HEADER.size)
    if count != len(names):
        raise ModelError(f"{what} has {len(names)} names and {count} tensors; the file is damaged.")
    arrays = {name: _tensor(reader) for name in names}
    if len(arrays) != len(names):
        raise ModelError(f"{what} gives a parameter twice; the file is damaged.")
    return arrays


def _sane(reader: _Reader, count: int, each: int) -> int:
    """A number of items that the rest of the file can hold."""
    if count * each > len(reader.data) - reader.at:
        raise ModelError(f"{reader.what} announces {count} items, more than it has room for; the file is damaged.")
    return count
