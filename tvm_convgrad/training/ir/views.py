# SPDX-License-Identifier: Apache-2.0
"""Which variables of a function may share memory: views such as reshapes, and results that are stored in place."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax

from relax_ops.compat import SBlockRealize
from tvm_convgrad.training.ir.graph import bindings_of, operator_name

_NAMES = ("reshape", "permute_dims", "expand_dims", "squeeze", "flatten", "memory.ensure_zero_offset")
VIEWS = frozenset(f"relax.{name}" for name in _NAMES)
"""Operators whose result may be the memory of their operand."""


def owners(module: tvm.IRModule, function: relax.Function) -> dict[relax.Var, relax.Var]:
    """For each variable that may be a view, or is stored in place, the first variable that has this memory.

    Args:
        module: has the TIR functions that `function` calls.
        function: straight-line.
    """
    found: dict[Any, Any] = {}
    places: dict[Any, list[Any]] = {}  # of calls in place: for each result the operand whose memory it takes, or None

    def owner(expr: relax.Expr) -> relax.Expr:
        return found.get(expr, expr)

    for binding in bindings_of(function):
        variable, value = binding.var, binding.value
        memory = None
        if isinstance(value, relax.Var):
            memory = value
        elif isinstance(value, relax.TupleGetItem) and value.tuple_value in places:
            memory = places[value.tuple_value][value.index]
        elif isinstance(value, tvm.ir.Call):
            name = operator_name(value)
            if name == "relax.call_tir_inplace":
                operands = list(value.args[1].fields)
                numbers = [int(number) for number in value.attrs.inplace_indices]
                results = [operands[number] if number >= 0 else None for number in numbers]
                if len(results) == 1:
                    (memory,) = results
                else:
                    places[variable] = results
            elif name in VIEWS:
                memory = value.args[0]
            elif name == "relax.call_tir" and is_reshape(module[value.args[0]]):
                memory = value.args[1].fields[0] if isinstance(value.args[1], relax.Tuple) else value.args[1]
        if isinstance(memory, relax.Var):
            found[variable] = owner(memory)
    return found


def is_reshape(function: tvm.tirx.PrimFunc) -> bool:
    """Whether TVM may take a TIR function for a reshape, and return a view of its operand instead of a copy."""
    # TVM looks at functions made of blocks only; the others are kernels.
    return isinstance(function.body, SBlockRealize) and bool(relax.analysis.has_reshape_pattern(function))


__all__ = ["VIEWS", "is_reshape", "owners"]
