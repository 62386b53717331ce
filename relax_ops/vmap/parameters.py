# SPDX-License-Identifier: Apache-2.0
"""vmap of a straight-line function over its parameters: many models of one architecture as one function.

A value is mapped (its first axis is that of the models) or the same for all. Each operator has its rule in
relax_ops.rules; which axis of the result is mapped is what the per-sample analysis finds as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Union

import tvm
from tvm import relax

from relax_ops.vmap.calls import mapped_call
from relax_ops.vmap.emitter import Vmap
from tvm_convgrad.core.errors import UnsupportedError


def vmap_over_parameters(
    builder: relax.BlockBuilder,
    function: relax.Function,
    values: Mapping[relax.Var, tuple[relax.Expr, bool]],
    count: int,
) -> list[relax.Expr]:
    """Emit `function` for all indices; its results, each with the mapped axis in front.

    Args:
        builder: with a dataflow block open.
        function: straight-line, for one index.
        values: for each of its parameters a value, and whether that is mapped (in front).
        count: of indices.

    Raises:
        UnsupportedError: an operator has no rule; it is named.
    """
    vmap = Vmap(builder, count)
    known: dict[relax.Var, _Value] = {param: (value, mapped) for param, (value, mapped) in values.items()}
    for value, mapped in values.values():
        if mapped:
            vmap.mark(value)
    for block in function.body.blocks:
        for binding in block.bindings:
            if not hasattr(binding, "value") or isinstance(binding, relax.MatchCast):
                raise UnsupportedError("ensemble: a match_cast has no rule for members; give the model fixed extents")
            known[binding.var] = _bound(vmap, binding.value, known)
    result = _looked_up(function.body.body, known)
    found = []
    for field in result if isinstance(result, list) else [result]:
        if isinstance(field, list):
            raise UnsupportedError("ensemble: the model returns a tuple in a tuple; return tensors")
        found.append(vmap.everywhere(*field))
    return found


_Value = Union["tuple[relax.Expr, bool]", "list[_Value]"]
"""An expression and whether it is mapped, or a tuple's fields."""


def _looked_up(expr: relax.Expr, known: Mapping[relax.Var, _Value]) -> _Value:
    if isinstance(expr, relax.Tuple):
        return [_looked_up(field, known) for field in expr.fields]
    if isinstance(expr, relax.TupleGetItem):
        whole = _looked_up(expr.tuple_value, known)
        return whole[expr.index] if isinstance(whole, list) else (relax.TupleGetItem(whole[0], expr.index), whole[1])
    return known.get(expr, (expr, False)) if isinstance(expr, relax.Var) else (expr, False)


def _bound(vmap: Vmap, value: relax.Expr, known: Mapping[relax.Var, _Value]) -> _Value:
    """What a binding's value is for all indices."""
    if not isinstance(value, tvm.ir.Call):
        found = _looked_up(value, known)
        if isinstance(found, tuple) and isinstance(found[0], relax.TupleGetItem):
            field = vmap.emit(found[0])
            return (vmap.mark(field) if found[1] else field), found[1]
        return found
    arguments, mapped = [], []
    for arg in value.args:
        found = _looked_up(arg, known)
        if isinstance(found, list):
            found = _tuple(vmap, found)
        arguments.append(found[0])
        mapped.append(found[1])
    if not any(mapped):
        return vmap.emit(vmap.call(value, arguments)), False
    result = mapped_call(vmap, value, arguments, mapped)
    if isinstance(result, relax.Tuple):
        return [(field, True) for field in result.fields]
    return result, True


def _tuple(vmap: Vmap, fields: list[_Value]) -> tuple[relax.Expr, bool]:
    """A literal tuple of tensors: mapped, all of it, if one of them is."""
    flat = [field for field in fields if isinstance(field, tuple)]
    mapped = any(flag for _, flag in flat)
    if mapped:
        return relax.Tuple([vmap.everywhere(value, flag) for value, flag in flat]), True
    return relax.Tuple([value for value, _ in flat]), False
