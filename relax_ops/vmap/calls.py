# SPDX-License-Identifier: Apache-2.0
"""One call under vmap, by the rules of its operator."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax

from relax_ops.rules import mapped_axis, rules_of
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, MappedAxis
from tvm_convgrad.core.errors import UnsupportedError


def mapped_call(vmap: Vmap, call: relax.Call, arguments: Sequence[relax.Expr], mapped: Sequence[bool]) -> relax.Expr:
    """The value of a call for all indices, bound, with the mapped axis in front; a literal tuple has it in each field.

    Args:
        call: for one index.
        arguments: for all indices.
        mapped: which of them have the mapped axis, in front.

    Raises:
        UnsupportedError: the operator has no rule for vmap.
    """
    name = str(call.op.name) if isinstance(call.op, tvm.ir.Op) else f"a call of {call.op}"
    rules = rules_of(call)
    if rules is None or rules.vmap is None:
        raise UnsupportedError(f"ensemble: {name} has no rule for members; replace it in the model")
    made = rules.vmap(vmap, call, list(arguments), list(mapped))
    if isinstance(made, relax.Call):
        made = vmap.builder.normalize(made)
        found = mapped_axis(made, Axes(tuple(0 if vmap.is_mapped(arg) else None for arg in made.args)))
        if found != MappedAxis(0):
            reason = found if isinstance(found, str) else f"the mapped axis becomes axis {found.axis}"
            raise UnsupportedError(f"ensemble: {name} cannot be mapped over members: {reason}")
        made = vmap.emit(made)
    return vmap.mark(made)
