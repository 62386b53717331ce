# SPDX-License-Identifier: Apache-2.0
"""The memory that a step takes, call by call: the storages that are in use, from the code of TVM's virtual machine.

Nothing is run. The code is a list of calls with numbered registers; a storage is in use from `alloc_storage` on for as
long as a register holds it, a tensor in it, or a value that was made from such a tensor. Of a storage with several
tensors at a time (the arena of large ones) that much is in use which ends with the last of those that are held.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.artifact import Artifact, load_module
from tvm_convgrad.training.runtime.vm_code import (
    constants_of,
    is_kernel,
    step_calls,
    unknown_form,
    without_hash,
    without_numbers,
)

_SHAPE = re.compile(r"shapetuple\[([\d, ]*)\]$")

ANY_BATCH = "memory: the batch size is chosen at run time, so that sizes are unknown; build with --batch N."
"""Why there is no plan of the memory."""


@dataclass(frozen=True)
class Moment:
    """One kernel call: its name, without the hash of its code, and the bytes of the storages in use during it."""

    name: str
    bytes: int


@dataclass(frozen=True)
class StepMemory:
    """The memory of a step.

    Attributes:
        state: bytes of the state, which is there all the time: parameters, statistics, what the optimizer keeps.
        batch: bytes of the inputs and the target.
        moments: the kernel calls in their order.
    """

    state: int
    batch: int
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The call with the most bytes in use, the first of several."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def total(self) -> int:
        """Bytes of everything at the peak: state, batch, and what a step computes."""
        return self.state + self.batch + self.peak.bytes

    def to_json(self) -> dict[str, int | str]:
        """For a manifest: bytes of state, batch, what is computed at the peak and all of it; the call of the peak."""
        peak = self.peak
        return {
            "state": self.state,
            "batch": self.batch,
            "computed": peak.bytes,
            "total": self.total,
            "peak": without_numbers(peak.name),  # those of compiled kernels are others
        }


def memory_of(artifact: Artifact) -> StepMemory:
    """The memory of a step of fixed batch.

    Args:
        artifact: of `read_artifact`. Its library is loaded, and not run.

    Returns:
        The memory; what kernels and libraries take for themselves while they run is not in it.

    Raises:
        UnsupportedError: sizes follow from the batch at run time, or this TVM writes the code in an unknown form.
        SetupError: a library or the GPU that the step needs is not there.
    """
    if not isinstance(artifact.inputs[0].shape[0], int):
        raise UnsupportedError(ANY_BATCH)
    module = load_module(artifact)
    moments = moments_of(module["as_text"](), module["stats"]())
    return StepMemory(
        sum(bytes_of(spec.shape, spec.dtype) for spec in artifact.state),
        sum(bytes_of(spec.shape, spec.dtype) for spec in (*artifact.inputs, artifact.target)),
        tuple(moments),
    )


def bytes_of(shape: tuple[int | str, ...], dtype: str) -> int:
    """The bytes of a tensor of fixed extents."""
    return math.prod(int(extent) for extent in shape) * numpy_dtype(dtype).itemsize


def moments_of(code: str, statistics: str) -> Iterator[Moment]:
    """The kernel calls of the function `step`.

    Args:
        code: what `as_text` of a TVM executable gives.
        statistics: what its `stats` gives, which has the constants.

    Raises:
        UnsupportedError: they are not in the form of TVM 0.26 and 0.27.
    """
    constants = constants_of(statistics)
    sizes: dict[int, int] = {}  # bytes of each storage, by the order of allocation
    held: dict[str, frozenset[tuple[int, int]]] = {}  # for a register storages, and where in them its tensors end
    moments: list[tuple[str, frozenset[tuple[int, int]]]] = []
    arenas: set[int] = set()  # storages of several tensors
    for name, given, result in step_calls(code):
        if name == "vm.builtin.alloc_storage":
            sizes[len(sizes)] = math.prod(_extents(given[1], constants))
            held[result] = frozenset(((len(sizes) - 1, 0),))
            continue
        if is_kernel(name):
            moments.append((without_hash(name), frozenset().union(*held.values())))
        if result == "%void":
            continue
        held[result] = frozenset().union(*(held.get(register, frozenset()) for register in given))
        if name == "vm.builtin.alloc_tensor" and held[result]:
            ((storage, _),) = held[result]
            extents, dtype = _extents(given[2], constants), constants[int(given[3][2:-1])]
            end = int(given[1].removeprefix("i")) + bytes_of(extents, dtype)
            arenas |= {storage} if given[1] != "i0" else set()
            held[result] = frozenset(((storage, end),))
    for name, tensors in moments:
        ends: dict[int, int] = {}
        for storage, end in tensors:
            ends[storage] = max(ends.get(storage, 0), end if storage in arenas else sizes[storage])
        yield Moment(name, sum(ends.values()))


def _extents(argument: str, constants: list[str]) -> tuple[int, ...]:
    """The numbers of the constant `c[N]`: those of a shape, or the bytes of a storage."""
    number = re.fullmatch(r"c\[(\d+)\]", argument)
    shape = _SHAPE.match(constants[int(number[1])]) if number and int(number[1]) < len(constants) else None
    if shape is None:
        raise unknown_form(f"{argument} is not a size of a storage")
    return tuple(int(extent) for extent in shape[1].split(",") if extent.strip())


__all__ = ["Moment", "StepMemory", "bytes_of", "memory_of", "moments_of"]
