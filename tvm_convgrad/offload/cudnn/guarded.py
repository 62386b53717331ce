# SPDX-License-Identifier: Apache-2.0
"""Memory of a call in which an engine that writes where it should not, or not where it should, is found out.

Result and workspace begin as NaN (0xFF in every byte is one in each floating-point type) and lie between guards of
bytes that no engine would write by chance; operands are compared with what they were.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.exact import Array
from tvm_convgrad.offload.cudnn.call import Call, Tensor
from tvm_convgrad.offload.cudnn.tuning_device import Bytes, Memory, Place, Plan, TuningDevice

GUARD = 1 << 16
"""Bytes of a guard; a multiple of any alignment."""

_CHUNK = 1 << 24
_PATTERN: Bytes = np.random.default_rng(20).integers(0, 256, GUARD, dtype=np.uint8)


class Guarded:
    """The memory of one call, for engines that want up to some bytes of workspace.

    Raises:
        EngineError: the device has not as much.
    """

    def __init__(self, device: TuningDevice, call: Call, operands: Sequence[Array], workspace: int) -> None:
        self._operands = [np.ascontiguousarray(operand).reshape(-1).view(np.uint8) for operand in operands]
        self._places = []
        for data, tensor in zip(self._operands, call.operands, strict=True):
            self._places.append(Place(device.memory(data.size), 0, tensor))
        self._result = Place(device.memory(call.result.bytes + 2 * GUARD), GUARD, call.result)
        self._scratch = device.memory(workspace + 2 * GUARD)
        for place in self._places:
            self._restore(place)

    def run(self, plan: Plan, calls: int) -> float:
        """Seconds of `calls` calls of a plan."""
        scratch = self._workspace(plan) if plan.workspace else None
        return plan.run([*self._places, self._result], scratch, calls)

    def blank(self, plan: Plan) -> None:
        """Make result and workspace NaN, and the guards whole."""
        for place in (self._result, self._workspace(plan)):
            _fill(place.memory, place.offset, place.tensor.bytes)
        self.guard(plan)

    def guard(self, plan: Plan) -> None:
        """Make the guards whole; those behind the workspace lie where this plan's ends."""
        for place in (self._result, self._workspace(plan)):
            self._write_guards(place)

    def result(self) -> Array:
        """The result, as an array."""
        memory, offset, tensor = self._result
        return memory.read(offset, tensor.bytes).view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)

    def trespass(self, plan: Plan) -> str:
        """Where a plan has written outside of result and workspace since `blank` or `guard`, or nothing."""
        for name, place in (("result", self._result), ("workspace", self._workspace(plan))):
            for side, begin in (("before", place.offset - GUARD), ("behind", place.offset + place.tensor.bytes)):
                spoilt = int((place.memory.read(begin, GUARD) != _PATTERN).sum())
                if spoilt:
                    return f"writes outside: {spoilt} bytes {side} its {name}"
        return ""

    def changed_operand(self) -> str:
        """Which operand was overwritten, or ""; it is restored."""
        for number, (place, data) in enumerate(zip(self._places, self._operands, strict=True)):
            if not np.array_equal(place.memory.read(0, data.size), data):
                self._restore(place)
                return f"writes outside: into operand {number}"
        return ""

    def _restore(self, place: Place) -> None:
        place.memory.write(self._operands[self._places.index(place)], 0)

    def _workspace(self, plan: Plan) -> Place:
        return Place(self._scratch, GUARD, Tensor((plan.workspace,), "uint8"))

    def _write_guards(self, place: Place) -> None:
        place.memory.write(_PATTERN, place.offset - GUARD)
        place.memory.write(_PATTERN, place.offset + place.tensor.bytes)


def _fill(memory: Memory, offset: int, size: int) -> None:
    for begin in range(0, size, _CHUNK):
        memory.write(np.full(min(_CHUNK, size - begin), 0xFF, np.uint8), offset + begin)


__all__ = ["GUARD", "Guarded"]
