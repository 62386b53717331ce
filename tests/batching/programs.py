# SPDX-License-Identifier: Apache-2.0
"""vmap rules as compiled programs, many in one module, and the Python loops that they must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm import relax

from relax_ops.single_run import quick_machine
from tvm_convgrad.batching import VmapRule


@dataclass
class Vmapped:
    """A rule with operands (batch axes included) and attributes; `types` gives other shapes than the arrays'."""

    rule: VmapRule
    operands: Sequence[Any]
    attributes: dict[str, Any] = field(default_factory=dict)
    types: Sequence[Sequence[Any]] | None = None


def module_of(cases: Sequence[Vmapped]) -> Any:
    """An IRModule with one function a case."""
    builder = relax.BlockBuilder()
    for number, case in enumerate(cases):
        shapes = case.types or [array.shape for array in case.operands]
        parameters = [
            relax.Var(name, relax.TensorType(list(shape), str(array.dtype)))
            for name, shape, array in zip(case.rule.operands, shapes, case.operands, strict=True)
        ]
        with builder.function(f"case_{number}", parameters):
            with builder.dataflow():
                result = case.rule(builder, *parameters, **case.attributes)
                if isinstance(result, tuple):
                    result = relax.Tuple([part for part in result if part is not None])
                result = builder.emit_output(result)
            builder.emit_func_output(result)
    return builder.get()


def run(cases: Sequence[Vmapped]) -> list[Any]:
    """The result of each case; tuples as lists."""
    machine = quick_machine(module_of(cases))
    found = []
    for number, case in enumerate(cases):
        result = machine[f"case_{number}"](*map(tvm.runtime.tensor, map(np.ascontiguousarray, case.operands)))
        tensor = hasattr(result, "numpy")
        found.append(result.numpy() if tensor else [part.numpy() for part in result])
    return found


def calls_in(module: Any, name: str) -> list[str]:
    """Operators that a function calls, in order."""
    return [
        str(binding.value.op.name)
        for block in module[name].body.blocks
        for binding in block.bindings
        if isinstance(binding.value, tvm.ir.Call)
    ]


def looped(function: Any, levels: Sequence[Sequence[int | None]], operands: Sequence[Any]) -> Any:
    """The definition of vmap of `function(*operands)`, a tuple or an array: a loop over each level's batch axis."""
    if not levels:
        return function(*operands)
    dims = levels[0]
    (size,) = {array.shape[dim] for array, dim in zip(operands, dims, strict=True) if dim is not None}
    results = [
        looped(
            function,
            levels[1:],
            [array if dim is None else np.take(array, k, dim) for array, dim in zip(operands, dims, strict=True)],
        )
        for k in range(size)
    ]
    if isinstance(results[0], tuple):
        return tuple(np.stack(parts) for parts in zip(*results, strict=True))
    return np.stack(results)


def ints(rng: np.random.Generator, shape: Sequence[int], dtype: str = "float32") -> Any:
    """Small integers, whose sums are exact."""
    return rng.integers(-3, 4, tuple(shape)).astype(dtype)


def batched(shape: Sequence[int], size: int, dim: int | None) -> list[int]:
    """The shape with a batch axis of `size` at `dim` (negative counts from the end of the new shape)."""
    new = list(shape)
    if dim is not None:
        new.insert(dim % (len(new) + 1), size)
    return new
