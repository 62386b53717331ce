# SPDX-License-Identifier: Apache-2.0
"""The graph of a step: its kernel calls, and which of them reads what another one wrote, from its code.

Nothing is run. A kernel is given its operands and the tensors for its results; these are the tensors that nothing has
written yet. A kernel that is given no such tensor works in place: on the state, if it is given a tensor of that;
else its name does not tell which operand it writes, and later readers of any of them are taken to read from it, too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from tvm_convgrad.training.runtime.artifact import Artifact, load_module
from tvm_convgrad.training.runtime.schema import TensorSpec
from tvm_convgrad.training.runtime.timeline import BACKWARD, FORWARD, OPTIMIZER, Timeline
from tvm_convgrad.training.runtime.vm_code import constants_of, is_kernel, step_calls, unknown_form, without_hash

_SHAPE = re.compile(r"shapetuple\[([\d, ]*)\]$")
Shape: TypeAlias = "tuple[int, ...] | None"
"""Extents, or None where they follow at run time."""

_PLACED = "vm.builtin.ensure_zero_offset"  # gives the tensor that it is given, by the address of its data
_STATE_ONLY_UPDATED = ("optimizer", "counter")


@dataclass(frozen=True)
class KernelCall:
    """One kernel call of a step.

    Attributes:
        name: of the function in the library, without the hash of its code.
        phase: "forward", "backward" or "optimizer", as in a profile.
        shapes: of its tensors, without those that depend on a free batch.
        sources: the numbers of the calls that wrote what it reads, from 0.
    """

    name: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]


def dataflow_of(artifact: Artifact) -> tuple[KernelCall, ...]:
    """The kernel calls of a step, in their order.

    Args:
        artifact: of `read_artifact` or `inspect_artifact`. Its library is loaded, and not run.

    Raises:
        UnsupportedError: the step has branches, or this TVM writes the code in an unknown form.
        SetupError: a library or the GPU that the step needs is not there.
    """
    module = load_module(artifact)
    updated = [place for place, spec in enumerate(artifact.state) if spec.role in _STATE_ONLY_UPDATED]
    inputs = [_static(spec) for spec in artifact.inputs]
    return calls_of(module["as_text"](), module["stats"](), inputs, list(map(_static, artifact.state)), updated)


def _static(spec: TensorSpec) -> Shape:
    """The shape of a tensor, None if its batch is free."""
    known = tuple(extent for extent in spec.shape if isinstance(extent, int))
    return known if len(known) == len(spec.shape) else None


def calls_of(
    code: str, statistics: str, inputs: Sequence[Shape], state: Sequence[Shape], updated: Sequence[int]
) -> tuple[KernelCall, ...]:
    """The kernel calls of the function `step(inputs…, target, rate, state)`.

    Args:
        code: what `as_text` of a TVM executable gives.
        statistics: what its `stats` gives, which has the constants.
        inputs, state: the shapes of the model's inputs and of the state; None where they follow at run time.
        updated: places in the state of what only the optimizer reads.

    Raises:
        UnsupportedError: they are not in the form of TVM 0.26 and 0.27.
    """
    constants = constants_of(statistics)
    target, rate, whole = (f"%{len(inputs) + place}" for place in range(3))
    shapes = {f"%{place}": shape for place, shape in enumerate(inputs)}  # of what a register holds
    values = {f"%{place}": f"%{place}" for place in range(len(inputs) + 2)}  # register -> the tensor that it holds
    optimizer_reads = {rate, *(f"s{place}" for place in updated)}
    writers: dict[str, set[int]] = {}
    fresh: set[str] = set()
    found: list[tuple[str, list[str], set[int]]] = []
    known: list[tuple[tuple[int, ...], ...]] = []
    for number, (name, given, result) in enumerate(step_calls(code)):
        if name == "vm.builtin.tuple_getitem" and given[0] == whole:
            number_in_state = int(given[1].removeprefix("i"))
            values[result], shapes[result] = f"s{number_in_state}", state[number_in_state]
        elif name == "vm.builtin.alloc_tensor":
            values[result], shapes[result] = f"t{number}", _shape(given[2], constants)
            fresh.add(values[result])
        elif is_kernel(name):
            tensors = list(dict.fromkeys(values[each] for each in given if each in values))
            written = [each for each in tensors if each in fresh]
            sources = set().union(*(writers.get(each, set()) for each in tensors if each not in written))
            for each in written:
                writers[each] = {len(found)}
            if not written:  # in place: the state, if it is given a tensor of it
                own = [each for each in tensors if each.startswith("s")] or tensors
                for each in own:
                    writers.setdefault(each, set()).add(len(found))
            fresh.difference_update(written)
            given_shapes = (shapes.get(each) for each in given if each in values)
            known.append(tuple(shape for shape in given_shapes if shape is not None))
            found.append((name, tensors, sources))
        elif result != "%void":
            held = [each for each in given if each in values]
            if held:  # a view, such as a reshape, or the same tensor at its offset
                values[result] = values[held[0]]
                shapes[result] = shapes.get(held[0]) if name == _PLACED else _shape(given[-1], constants)
            else:
                values.pop(result, None)
    last = max((place for place, (_, tensors, _) in enumerate(found) if target in tensors), default=-1)
    return tuple(
        KernelCall(
            without_hash(name),
            OPTIMIZER if optimizer_reads & set(tensors) else FORWARD if place <= last else BACKWARD,
            known[place],
            tuple(sorted(sources)),
        )
        for place, (name, tensors, sources) in enumerate(found)
    )


def with_shapes(calls: Sequence[KernelCall], timeline: Timeline) -> tuple[KernelCall, ...]:
    """The calls with the shapes and phases that they had in a step that was measured, which depend on no free batch.

    Raises:
        UnsupportedError: the step made other calls than its code has.
    """
    if [call.name for call in calls] != [call.name for call in timeline.calls]:
        raise unknown_form("the step that ran made other calls than it lists")
    pairs = zip(calls, timeline.calls, strict=True)
    return tuple(replace(call, shapes=timed.shapes, phase=timed.phase) for call, timed in pairs)


def _shape(argument: str, constants: Sequence[str]) -> Shape:
    """The extents of the constant `c[N]`; None of a register, whose extents follow at run time."""
    number = re.fullmatch(r"c\[(\d+)\]", argument)
    text = _SHAPE.match(constants[int(number[1])]) if number else None
    return None if text is None else tuple(int(extent) for extent in text[1].split(",") if extent.strip())


__all__ = ["KernelCall", "calls_of", "dataflow_of", "with_shapes"]
