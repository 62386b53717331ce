# SPDX-License-Identifier: Apache-2.0
"""What tuning needs of a device: memory, plans of engines, a clock. The real one is in gpu.py; tests have another."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from tvm_convgrad.offload.cudnn.call import Call, Tensor
from tvm_convgrad.offload.cudnn.engines import Listed

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class EngineError(RuntimeError):
    """An engine of which there is no plan, or that fails when it is run; the text says why."""


class Memory(Protocol):
    """Bytes on the device."""

    def write(self, data: Bytes, offset: int) -> None:
        """Copy bytes to it."""

    def read(self, offset: int, size: int) -> Bytes:
        """Copy bytes from it, once all work of the device is done."""


class Place(NamedTuple):
    """A tensor in memory; `offset` in bytes."""

    memory: Memory
    offset: int
    tensor: Tensor


class Plan(Protocol):
    """An engine that is ready to run.

    Attributes:
        workspace: bytes.
    """

    workspace: int

    def run(self, tensors: Sequence[Place], workspace: Place | None, calls: int) -> float:
        """Call it `calls` times in a row, and wait. Seconds of all calls, by the device's clock.

        Args:
            tensors: operands and result, aligned to 16 bytes.
            workspace: of as many bytes as it needs; None if it needs none.

        Raises:
            EngineError: it fails.
        """


class TuningDevice(Protocol):
    """A device on which engines are tried.

    Attributes:
        device: its name; arch: its architecture, such as "sm_90".
        version: the number by which cuDNN states its version.
    """

    device: str
    arch: str
    version: int

    def candidates(self, call: Call, most: int) -> tuple[Listed, ...] | str:
        """Engines for a call, the heuristics' first first, up to `most` that may be used; or why there are none."""

    def plan(self, call: Call, engine: Listed) -> Plan:
        """A plan of an engine. Raises EngineError if there is none."""

    def memory(self, size: int) -> Memory:
        """So many bytes, aligned to 256. Raises EngineError if there are not as many."""


__all__ = ["Bytes", "EngineError", "Memory", "Place", "Plan", "TuningDevice"]
