# SPDX-License-Identifier: Apache-2.0
"""A device in memory whose engines compute with numpy, some of them wrong, in seconds that are stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.reference import DIRECTIONS
from tvm_convgrad.offload.cudnn.call import Call
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.offload.cudnn.tuning_device import Bytes, EngineError, Place

FLAWS = (
    "",  # none
    "before",  # writes the byte before its result
    "behind",  # and behind it
    "workspace",  # writes one byte more than its workspace
    "operand",  # writes into an operand
    "nan",  # leaves an element as it was
    "far",  # one element is off by 1
    "random",  # the last bit of an element differs from call to call
    "fails",  # when run
    "no plan",
    "late",  # writes behind its result when it is timed
)

BREAKS = "breaks"  # the device, for its process


@dataclass(frozen=True)
class Kind:
    """An engine: seconds of a call, what is wrong with it, bytes of workspace; `noise` is a share of its seconds."""

    seconds: float
    flaw: str = ""
    workspace: int = 0
    refusal: str = ""
    noise: float = 0.0


class Device:
    """The bench. Engines are numbered as they are given; `now` is its clock, which only its work moves."""

    def __init__(self, *kinds: Kind, name: str = "Abacus", room: int = 1 << 26) -> None:
        self.kinds, self.device, self.arch, self.version = kinds, name, "sm_90", 92400
        self.now, self.left = 0.0, room
        self.runs: list[int] = []

    def clock(self) -> float:
        return self.now

    def candidates(self, call: Call, most: int) -> tuple[Listed, ...] | str:
        if call.problem.groups == 7:
            return "cuDNN is not fond of 7"
        listed = [Listed(i, kind.workspace, (), ((1, i),), kind.refusal) for i, kind in enumerate(self.kinds)]
        return tuple(listed[:most])

    def plan(self, call: Call, engine: Listed) -> Engine:
        if self.kinds[engine.index].flaw == "no plan":
            raise EngineError("the abacus lacks beads")
        return Engine(self, call, engine.index)

    def memory(self, size: int) -> Array:
        self.left -= size
        if self.left < 0:
            raise EngineError(f"no room for {size} bytes")
        return Array(size)


class Array:
    """Memory."""

    def __init__(self, size: int) -> None:
        self.bytes: Bytes = np.zeros(size, np.uint8)

    def write(self, data: Bytes, offset: int) -> None:
        assert offset + data.size <= self.bytes.size
        self.bytes[offset : offset + data.size] = data

    def read(self, offset: int, size: int) -> Bytes:
        assert offset + size <= self.bytes.size
        return self.bytes[offset : offset + size].copy()


class Engine:
    """A plan."""

    def __init__(self, device: Device, call: Call, index: int) -> None:
        self._device, self._call, self._index = device, call, index
        self._kind = device.kinds[index]
        self.workspace = self._kind.workspace
        self._calls = 0

    def run(self, tensors: Sequence[Place], workspace: Place | None, calls: int) -> float:
        kind, call = self._kind, self._call
        if kind.flaw == "fails":
            raise EngineError("a rod is bent")
        if kind.flaw == BREAKS:
            raise SetupError("the abacus has come apart")
        assert (workspace is None) == (kind.workspace == 0)
        *operands, result = tensors
        wide = [_array(place).astype(np.float64) for place in operands]
        found = DIRECTIONS[call.direction](call.problem, *wide[:2])
        if call.epilogue.accumulate:
            found += wide[-1]
        if call.epilogue.bias:
            found += wide[2].reshape([-1 if letter == "C" else 1 for letter in call.problem.grad_layout])
        if call.epilogue.relu:
            found = np.maximum(found, 0)
        self._calls += 1
        if kind.flaw == "far":
            found.ravel()[-1] += 1
        kept = _array(result).ravel()[-1]
        data = found.astype(numpy_dtype(result.tensor.dtype))
        if kind.flaw == "random":
            data.view(np.uint8).ravel()[0] ^= self._calls % 2
        if kind.flaw == "nan":
            data.ravel()[-1] = kept
        result.memory.write(data.reshape(-1).view(np.uint8), result.offset)
        self._trespass(operands[0], result, workspace, calls)
        if workspace is not None:
            workspace.memory.write(np.zeros(kind.workspace, np.uint8), workspace.offset)
        self._device.runs.append(self._index)
        seconds = kind.seconds * (1 + kind.noise * (self._calls % 3 - 1)) * calls
        self._device.now += seconds
        return seconds

    def _trespass(self, operand: Place, result: Place, workspace: Place | None, calls: int) -> None:
        place = {
            "before": (result, -1),
            "behind": (result, result.tensor.bytes),
            "operand": (operand, 0),
            "late": (result, result.tensor.bytes) if calls > 1 else None,
            "workspace": (workspace, self.workspace),
        }.get(self._kind.flaw)
        if place is not None and place[0] is not None:
            _flip(place[0], place[1])


def _array(place: Place) -> Any:
    memory, offset, tensor = place
    return memory.read(offset, tensor.bytes).view(numpy_dtype(tensor.dtype)).reshape(tensor.shape)


def _flip(place: Place, byte: int) -> None:
    place.memory.write(~place.memory.read(place.offset + byte, 1), place.offset + byte)
