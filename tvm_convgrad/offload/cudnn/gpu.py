# SPDX-License-Identifier: Apache-2.0
"""This machine's first GPU as the device of tuning: TVM's tensors are its memory, cuDNN's runtime runs its engines."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm

from tvm_convgrad.core.errors import SetupError, first_line
from tvm_convgrad.offload.cuda import require_local
from tvm_convgrad.offload.cudnn.backend import CuDnn
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.devices import arch_of
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.offload.cudnn.tuning_device import Bytes, EngineError, Place, TuningDevice
from tvm_convgrad.offload.registry import require

Refused = (ValueError, RuntimeError)
"""What the runtime, TVM and CUDA raise."""


class Gpu:
    """The first GPU of this machine.

    Raises:
        SetupError: there is none, it is not of the target's architecture, or cuDNN is not installed.
    """

    def __init__(self, target: tvm.target.Target) -> None:
        """Find the GPU and load cuDNN's runtime.

        Args:
            target: that tuned programs are compiled for.
        """
        require(["cudnn"], target)
        require_local(target, "engines are tuned")
        self._library, self._gpu, self._target = CuDnn(), tvm.cuda(0), target
        self.device, self.arch = str(self._gpu.device_name), arch_of(target)
        self.version = self._library.number()

    def candidates(self, call: Call, most: int) -> tuple[Listed, ...] | str:
        """As TuningDevice."""
        refusal = self._library.refusal(call.direction, call.problem, call.epilogue, self._target)
        return refusal or self._library.local_engines(call, most)

    def plan(self, call: Call, engine: Listed) -> _Plan:
        """As TuningDevice."""
        numbers = self._library.numbers_of(call, self.arch, [engine])
        block = (ctypes.c_int64 * len(numbers))(*numbers)
        try:
            prepare = self._library.function("prepare")
            workspace, run = prepare(ctypes.c_void_p(ctypes.addressof(block)))
        except Refused as error:
            raise EngineError(first_line(error)) from error
        return _Plan(int(workspace), run, lambda: self._check(f"{engine} for {call}"))

    def memory(self, size: int) -> TensorMemory:
        """As TuningDevice."""
        return TensorMemory(size, self._gpu)

    def _check(self, engine: str) -> None:
        """Raise SetupError if the GPU does not answer any more: after some errors nothing runs in the same process."""
        try:
            self._gpu.sync()
        except Refused as error:
            raise SetupError(
                f"the GPU has failed for this process, by {engine} ({first_line(error)}); tune again: winners "
                "until then are kept, and this engine is skipped."
            ) from error


class TensorMemory:
    """Bytes of a device, as a tensor of TVM; its devices align them to 64 bytes, NVIDIA's to 256.

    Raises:
        EngineError: there are not as many.
    """

    def __init__(self, size: int, device: tvm.runtime.Device) -> None:
        try:
            self._tensor = tvm.runtime.empty((max(size, 1),), "uint8", device)
        except Refused as error:
            raise EngineError(f"the device has no {size} bytes left ({first_line(error)})") from error

    def write(self, data: Bytes, offset: int) -> None:
        """As Memory."""
        if data.size:
            self.view((data.size,), "uint8", offset).copyfrom(data)

    def read(self, offset: int, size: int) -> Bytes:
        """As Memory."""
        if not size:
            return np.empty(0, np.uint8)
        found: Bytes = self.view((size,), "uint8", offset).numpy()
        return found

    def view(self, shape: Sequence[int], dtype: str, offset: int) -> tvm.runtime.Tensor:
        """A tensor in it, from a byte on."""
        return self._tensor._create_view(tuple(shape), dtype, offset)


class _Plan:
    """An engine that the runtime has prepared."""

    def __init__(self, workspace: int, run: Callable[..., Any], check: Callable[[], None]) -> None:
        self.workspace, self._run, self._check = workspace, run, check

    def run(self, tensors: Sequence[Place], workspace: Place | None, calls: int) -> float:
        """As Plan."""
        places = tensors if workspace is None else [*tensors, workspace]
        views = []
        for memory, offset, tensor in places:
            assert isinstance(memory, TensorMemory)
            views.append(memory.view(tensor.shape, tensor.dtype, offset))
        scratch = None if workspace is None else views.pop()
        try:
            return float(self._run(calls, scratch, *views)) * 1e-9
        except Refused as error:
            self._check()
            raise EngineError(first_line(error)) from error


def device_for(target: tvm.target.Target) -> TuningDevice:
    """The GPU that a target is for; errors as `Gpu`."""
    return Gpu(target)


__all__ = ["Gpu", "TensorMemory", "device_for"]
