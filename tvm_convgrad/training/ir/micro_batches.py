# SPDX-License-Identifier: Apache-2.0
"""Which micro-batch each binding of a training step belongs to."""

from __future__ import annotations

from tvm import relax

from tvm_convgrad.training.ir.graph import bindings_of

MICRO_BATCHES = "convgrad.micro_batches"
"""Attribute of a step that has several: their number."""


def micro_batches_of(function: relax.Function) -> list[int]:
    """The micro-batch of each binding of a step, the latest that it reads; 0 where a step has only one.

    A micro-batch is recognised by its part of the first input. A binding that reads several belongs to the last.
    """
    bindings = list(bindings_of(function))
    if not function.attrs or MICRO_BATCHES not in function.attrs:
        return [0] * len(bindings)
    first, parts = function.params[0], 0
    number: dict[relax.Var, int] = {}
    for binding in bindings:
        used = relax.analysis.free_vars(binding.value)
        latest = max((number.get(variable, 0) for variable in used), default=0)
        if any(variable.same_as(first) for variable in used):
            latest, parts = max(latest, parts), parts + 1
        number[binding.var] = latest
    return list(number.values())
