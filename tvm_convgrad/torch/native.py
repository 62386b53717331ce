# SPDX-License-Identifier: Apache-2.0
"""`Native`: PyTorch's entries in C++ (bridge/runtime/torch.cc), which need Python only until a choice is made.

They are compiled against PyTorch's headers, as kernels are in another process, and kept in the store under its version.
Without them calls go through Python, which takes some microseconds more.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from tvm_convgrad.bridge.job import TORCH_ENTRIES
from tvm_convgrad.bridge.library import Kernel, function_of, load
from tvm_convgrad.bridge.store import Kernels
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.torch.plan import BACKWARD_NAMES, FORWARD_NAMES, PLACES, Plan, Results
from tvm_convgrad.torch.signature import Part

_MOST_AXES, _MOST_OPERANDS, _MOST_STEPS, _RESULTS = 5, 3, 2, 3
_ENDS = "int[] stride, int[] padding, int[] dilation, bool transposed, int[] output_padding, int groups"
_SCHEMAS = {
    "_convolution": f"(Tensor data, Tensor weight, Tensor? bias, {_ENDS}, int entry) -> Tensor",
    "_convolution_backward": (
        f"(Tensor grad, Tensor data, Tensor weight, int[]? bias_sizes, {_ENDS}, bool[3] wanted, int entry)"
        " -> (Tensor, Tensor, Tensor)"
    ),
}
"""What the entries call as long as no choice is made."""


class Installed(Protocol):
    """A bridge, as the entries see it."""

    def forward(self, *arguments: Any) -> Tensor | None:
        """aten::convolution, and the entry that it comes from."""

    def backward(self, *arguments: Any) -> Results:
        """aten::convolution_backward, and the entry that it comes from."""


class _Called:
    """Whose calls come to Python: those of the bridge that was installed last."""

    bridge: Installed | None = None


_CALLED = _Called()


class _Step(ctypes.Structure):
    """Step of torch.cc."""

    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("described", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("operands", ctypes.c_int64 * _MOST_OPERANDS),
        ("place", ctypes.c_int64),
        ("with_bias", ctypes.c_int64),
        ("axes", ctypes.c_int64),
        ("sizes", ctypes.c_int64 * _MOST_AXES),
        ("strides", ctypes.c_int64 * _MOST_AXES),
    )


class _Choice(ctypes.Structure):
    """Choice of torch.cc."""

    _fields_ = (
        ("steps", ctypes.c_int64),
        ("step", _Step * _MOST_STEPS),
        ("rest", ctypes.c_int64 * _RESULTS),
        ("call", ctypes.c_void_p),
        ("threads", ctypes.c_int64),
    )


class Native:
    """The entries in C++.

    Attributes:
        bridge: whose calls they take, while they are installed.
    """

    def __init__(self, content: bytes) -> None:
        """Load the library.

        Raises:
            LoadError: it does not fit the PyTorch that is loaded.
        """
        self.bridge: Installed | None = None
        self._kernels: list[Kernel] = []  # the library has their addresses for ever
        self._library = load(content, "PyTorch's entries in C++")
        for name, arguments, result in (
            ("table", (), ctypes.c_void_p),
            ("install", (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_char_p),
            ("release", (), None),
            ("kept", (), ctypes.c_size_t),
            ("remove", (), None),
            ("settle", (ctypes.c_int64, ctypes.POINTER(_Choice)), None),
            ("drain", (ctypes.c_int64, ctypes.POINTER(ctypes.c_int64), ctypes.POINTER(ctypes.c_int64)), None),
        ):
            found = function_of(self._library, f"convgrad_torch_{name}")
            found.argtypes, found.restype = arguments, result
        _define()

    def new_table(self) -> int:
        """The address of a table of choices, which lives as long as the process."""
        return int(self._library.convgrad_torch_table())

    def install(self, bridge: Installed, table: int, forward: bool, kept_memory: int) -> None:
        """Put the entries in the place of PyTorch's, and keep as many bytes of freed results for the next ones.

        Raises:
            SetupError: PyTorch refuses them.
        """
        problem = self._library.convgrad_torch_install(table, forward, kept_memory)
        if problem:
            raise SetupError(f"PyTorch {torch.__version__} does not let its operators be replaced: {problem.decode()}")
        self.bridge = _CALLED.bridge = bridge

    def remove(self) -> None:
        """Give PyTorch its own entries back. Calls of other threads that have begun may still come to the bridge."""
        self._library.convgrad_torch_remove()
        self.bridge = None

    def release(self) -> None:
        """Free the memory that is kept for results."""
        self._library.convgrad_torch_release()

    @property
    def kept_bytes(self) -> int:
        """The memory that is kept for results."""
        return int(self._library.convgrad_torch_kept())

    def settle(self, entry: int, plan: Plan) -> None:
        """From now on calls of an entry are computed as its plan has decided."""
        names = BACKWARD_NAMES if plan.signature.grad is not None else FORWARD_NAMES
        steps = [_step(part, kernel, names) for part, kernel in plan.taken]
        call = plan.taken[0][1].host.call_address if plan.taken else None
        rest = (int(each) for each in plan.rest)
        choice = _Choice(
            len(steps), (_Step * _MOST_STEPS)(*steps), (ctypes.c_int64 * _RESULTS)(*rest), call, plan.signature.threads
        )
        self._kernels += [kernel for _, kernel in plan.taken]
        self._library.convgrad_torch_settle(entry, ctypes.byref(choice))
        plan.entries.append(entry)

    def count(self, plan: Plan) -> None:
        """Add the calls that have not come to Python to a plan's."""
        tally = plan.by_kernels if plan.taken else plan.by_pytorch
        calls, nanoseconds = ctypes.c_int64(), ctypes.c_int64()
        for entry in plan.entries:
            self._library.convgrad_torch_drain(entry, ctypes.byref(calls), ctypes.byref(nanoseconds))
            tally.calls += calls.value
            tally.seconds += nanoseconds.value * 1e-9


def _step(part: Part, kernel: Kernel, names: tuple[str, ...]) -> _Step:
    entry, described, count = kernel.entry
    places = [names.index(name) for name in part.operands]
    places += [-1] * (_MOST_OPERANDS - len(places))
    shape, strides = part.result.shape, part.result.strides
    return _Step(
        entry, described, count, (ctypes.c_int64 * _MOST_OPERANDS)(*places), PLACES[part.name], part.with_bias,
        len(shape), (ctypes.c_int64 * _MOST_AXES)(*shape), (ctypes.c_int64 * _MOST_AXES)(*strides),
    )  # fmt: skip


def native(kernels: Kernels) -> Native | None:
    """The entries that a store has, or None: they are not compiled yet, or cannot be, which `request_native` tells."""
    return kernels.kept_library(TORCH_ENTRIES, _loaded)


def request_native(kernels: Kernels) -> Future[Native]:
    """The entries, which are compiled in the background where the store does not have them."""
    return kernels.request_library(TORCH_ENTRIES, _loaded)


@cache
def _loaded(content: bytes) -> Native:
    return Native(content)


@cache
def _define() -> None:
    """Register what entries call as long as no choice is made, once for all libraries."""
    for name, schema in _SCHEMAS.items():
        torch.library.define(f"tvm_convgrad::{name}", schema)
    torch.library.impl("tvm_convgrad::_convolution", "CPU", _forward)
    torch.library.impl("tvm_convgrad::_convolution_backward", "CPU", _backward)


def _forward(*arguments: Any) -> Tensor | None:
    assert _CALLED.bridge is not None
    return _CALLED.bridge.forward(*arguments)


def _backward(*arguments: Any) -> Results:
    assert _CALLED.bridge is not None
    return _CALLED.bridge.backward(*arguments)


__all__ = ["Installed", "Native", "native", "request_native"]
