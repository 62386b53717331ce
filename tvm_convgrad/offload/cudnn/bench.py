# SPDX-License-Identifier: Apache-2.0
"""What tuning needs of a device: memory, plans of engines, a clock. The real one is in gpu.py; tests have another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from tvm_convgrad.catalogue import FACES
from tvm_convgrad.dtypes import numpy_dtype
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.offload.cudnn.engines import Listed
from tvm_convgrad.problem import ConvProblem
from tvm_convgrad.verification import integers, reduction_length

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class EngineError(RuntimeError):
    """An engine of which there is no plan, or that fails when it is run; the text says why."""


class Tensor(NamedTuple):
    """Shape and element type, by TVM's name."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """That it occupies."""
        return math.prod(self.shape) * numpy_dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Call:
    """A face of a problem with what is fused into it: what an engine computes, and what is tuned."""

    face: str
    problem: ConvProblem
    epilogue: Epilogue = NO_EPILOGUE

    def __str__(self) -> str:
        return " + ".join([f"{self.face} of {self.problem.descriptor}", *self.fused])

    @property
    def fused(self) -> tuple[str, ...]:
        """The names of what is fused."""
        return tuple(name for name, value in vars(self.epilogue).items() if value)

    @property
    def result(self) -> Tensor:
        """The tensor that is written."""
        return self._tensor(FACES[self.face].result)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors that are read, in the order of the runtime: the convolution's two, bias, summand."""
        extra = [Tensor((self.problem.out_channels,), self.result.dtype)] if self.epilogue.bias else []
        summand = [self.result] if self.epilogue.accumulate else []
        return (*map(self._tensor, FACES[self.face].operands), *extra, *summand)

    @property
    def terms(self) -> int:
        """The most numbers that one element of the result sums."""
        return reduction_length(self.problem, self.face) + self.epilogue.bias + self.epilogue.accumulate

    def numbers(self) -> tuple[list[Any], int]:
        """Operands of small integers and their greatest magnitude, as `verification.integers` chooses them."""
        operands, limit = integers(self.problem, self.face)
        rng = np.random.default_rng(1)
        for shape, dtype in self.operands[2:]:
            operands.append(rng.integers(-limit, limit + 1, shape).astype(numpy_dtype(dtype)))
        return operands, limit

    def _tensor(self, name: str) -> Tensor:
        shape, dtype = self.problem.tensors[name]
        return Tensor(tuple(int(extent) for extent in shape), dtype)


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
            workspace: of as many bytes as it wants; None if it wants none.

        Raises:
            EngineError: it fails.
        """


class Bench(Protocol):
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


__all__ = ["Bench", "Bytes", "Call", "EngineError", "Memory", "Place", "Plan", "Tensor"]
