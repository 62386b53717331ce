# SPDX-License-Identifier: Apache-2.0
"""The memory that a step takes, call by call: the storages that are in use, from the code of TVM's virtual machine.

Nothing is run. The code is a list of calls with numbered registers; a storage is in use from `alloc_storage` on for as
long as a register holds it, a tensor in it, or a value that was made from such a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.runtime.artifact import Artifact, load_module
from tvm_convgrad.training.runtime.vm_code import constants_of, is_kernel, step_calls, unknown_form, without_hash

_SHAPE = re.compile(r"shapetuple\[([\d, ]*)\]$")


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
            "peak": re.sub(r"\d+$", "", peak.name),  # compiled kernels have other numbers
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
        raise UnsupportedError("memory: the batch is free, so that sizes follow at run time; build with --batch N")
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
    held: dict[str, frozenset[int]] = {}  # the storages that a register keeps alive
    for name, given, result in step_calls(code):
        if name == "vm.builtin.alloc_storage":
            sizes[len(sizes)] = _extent(given[1], constants)
            held[result] = frozenset((len(sizes) - 1,))
            continue
        if is_kernel(name):
            used = frozenset().union(*held.values())
            yield Moment(without_hash(name), sum(sizes[storage] for storage in used))
        if result != "%void":
            held[result] = frozenset().union(*(held.get(register, frozenset()) for register in given))


def _extent(argument: str, constants: list[str]) -> int:
    """The bytes of a storage, from the constant `c[N]`."""
    number = re.fullmatch(r"c\[(\d+)\]", argument)
    shape = _SHAPE.match(constants[int(number[1])]) if number and int(number[1]) < len(constants) else None
    if shape is None:
        raise unknown_form(f"{argument} is no size of a storage")
    return math.prod(int(extent) for extent in shape[1].split(","))


__all__ = ["Moment", "StepMemory", "bytes_of", "memory_of", "moments_of"]
