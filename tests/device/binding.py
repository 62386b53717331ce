# SPDX-License-Identifier: Apache-2.0
"""The C library in this process, by ctypes: as a caller in Java or Swift would use its header."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ERROR = 1
INPUT, TARGET, PREDICTION, STATE = range(4)


class Array(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class Batch(ctypes.Structure):
    _fields_ = (("inputs", ctypes.POINTER(Array)), ("count", ctypes.c_size_t), ("target", Array))


class Tensor(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("dtype", ctypes.c_char_p),
        ("role", ctypes.c_char_p),
        ("rank", ctypes.c_size_t),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
    )


class Progress(ctypes.Structure):
    _fields_ = (("steps", ctypes.c_int64), ("epoch", ctypes.c_int64), ("position", ctypes.c_int64))


class RefusedError(Exception):
    """A function returned CONVGRAD_ERROR; the text is that of convgrad_last_error."""


def array(value: np.ndarray | None) -> Array:
    return Array(None, 0) if value is None else Array(value.ctypes.data, value.nbytes)


class CSession:
    """convgrad.h around one session. Arrays are kept as they are given: contiguous and of the right type."""

    def __init__(self, library: ctypes.CDLL, path: Path | str) -> None:
        self.library = library
        for name in ("last_error", "id", "manifest", "cpu_features", "version"):
            getattr(library, f"convgrad_{name}").restype = ctypes.c_char_p
        library.convgrad_learning_rate.restype = ctypes.c_float
        for name in ("count", "flat_size"):
            getattr(library, f"convgrad_{name}").restype = ctypes.c_size_t
        self.handle = ctypes.c_void_p()
        self.check(library.convgrad_open(str(path).encode(), ctypes.byref(self.handle)))

    def check(self, code: int) -> None:
        if code != 0:
            assert code == ERROR
            raise RefusedError(self.library.convgrad_last_error().decode())

    def call(self, name: str, *arguments: Any) -> None:
        self.check(getattr(self.library, f"convgrad_{name}")(self.handle, *arguments))

    def get(self, name: str, *arguments: Any) -> Any:
        return getattr(self.library, f"convgrad_{name}")(self.handle, *arguments)

    def batch(self, x: np.ndarray, y: np.ndarray | None) -> Batch:
        self.given = (x, y, (Array * 1)(array(x)))
        return Batch(self.given[2], 1, array(y))

    def step(self, x: np.ndarray, y: np.ndarray, out: np.ndarray | None = None, name: str = "train_step") -> np.float32:
        loss = ctypes.c_float()
        self.call(name, ctypes.byref(self.batch(x, y)), ctypes.byref(loss), array(out))
        return np.float32(loss.value)

    def gradients(self, x: np.ndarray, y: np.ndarray, number: int = -1) -> tuple[np.float32, np.ndarray]:
        loss, flat = ctypes.c_float(), np.empty(self.get("flat_size"), "float32")
        self.call(
            "gradients",
            ctypes.byref(self.batch(x, y)),
            ctypes.c_int64(number),
            ctypes.byref(loss),
            ctypes.c_void_p(flat.ctypes.data),
            ctypes.c_size_t(flat.size),
            array(None),
        )
        return np.float32(loss.value), flat

    def flat(self, name: str, values: np.ndarray) -> None:
        self.call(name, ctypes.c_void_p(values.ctypes.data), ctypes.c_size_t(values.size))

    def predict(self, x: np.ndarray, out: np.ndarray) -> np.ndarray:
        self.call("predict", ctypes.byref(self.batch(x, None)), array(out))
        return out

    def tensor(self, kind: int, index: int) -> tuple[str, str, str, list[int]]:
        found = Tensor()
        self.call("describe", kind, ctypes.c_size_t(index), ctypes.byref(found))
        return found.name.decode(), found.dtype.decode(), found.role.decode(), found.shape[: found.rank]

    def state(self) -> dict[str, np.ndarray]:
        found = {}
        for index in range(self.get("count", STATE)):
            name, dtype, _, shape = self.tensor(STATE, index)
            found[name] = np.empty(shape, dtype)
            self.call("get_state", name.encode(), array(found[name]))
        return found

    def progress(self) -> tuple[int, int, int]:
        found = Progress()
        self.call("get_progress", ctypes.byref(found))
        return found.steps, found.epoch, found.position

    def close(self) -> None:
        self.library.convgrad_close(self.handle)
        self.handle = ctypes.c_void_p()


Open = Callable[[Path], CSession]
