# SPDX-License-Identifier: Apache-2.0
"""One call of cuDNN: a direction of a problem with its epilogue, the tensors that it reads and writes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.epilogue import NO_EPILOGUE, Epilogue
from tvm_convgrad.core.exact import Array, integers, reduction_length
from tvm_convgrad.core.problem import ConvProblem


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
    """A direction of a problem with what is fused into it: what an engine computes, and what is tuned."""

    direction: str
    problem: ConvProblem
    epilogue: Epilogue = NO_EPILOGUE

    def __str__(self) -> str:
        return " + ".join([f"{self.direction} of {self.problem.descriptor}", *self.fused])

    @property
    def fused(self) -> tuple[str, ...]:
        """The names of what is fused."""
        return tuple(name for name, value in vars(self.epilogue).items() if value)

    @property
    def result(self) -> Tensor:
        """The tensor that is written."""
        return self._tensor(DIRECTIONS[self.direction].result)

    @property
    def operands(self) -> tuple[Tensor, ...]:
        """The tensors that are read, in the order of the runtime: the convolution's two, bias, summand."""
        extra = [Tensor((self.problem.out_channels,), self.result.dtype)] if self.epilogue.bias else []
        summand = [self.result] if self.epilogue.accumulate else []
        return (*map(self._tensor, DIRECTIONS[self.direction].operands), *extra, *summand)

    @property
    def terms(self) -> int:
        """The most numbers that one element of the result sums."""
        return reduction_length(self.problem, self.direction) + self.epilogue.bias + self.epilogue.accumulate

    def numbers(self) -> tuple[list[Array], int]:
        """Operands of small integers and their greatest magnitude, as `core.exact.integers` chooses them."""
        operands, limit = integers(self.problem, self.direction)
        rng = np.random.default_rng(1)
        for shape, dtype in self.operands[2:]:
            operands.append(rng.integers(-limit, limit + 1, shape).astype(numpy_dtype(dtype)))
        return operands, limit

    def _tensor(self, name: str) -> Tensor:
        shape, dtype = self.problem.tensors[name]
        return Tensor(tuple(int(extent) for extent in shape), dtype)


__all__ = ["Call", "Tensor"]
