# SPDX-License-Identifier: Apache-2.0
"""FLegalize of the six operators: the compositions of legalize/, emitted as stock Relax operations.

Which composition is taken can be forced for the length of a `with forced_forms(...)` block.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tvm import relax

from legalize.forms import DATA_FORMS, WEIGHT_FORMS, compose_backward_data, compose_backward_weight
from relax_ops.builder import RelaxBuilder
from relax_ops.ir import PREFIX, AnalyzerProver, attributes_of, dtype_of, entry_of, problem_of, shape_values, spec_of
from tvm_convgrad.catalogue import BACKWARD_WEIGHT, NEW_OPS, expected_grad_shape, unproven_axes
from tvm_convgrad.errors import UnsupportedError

_forced: ContextVar[dict[str, str] | None] = ContextVar("tvm_convgrad_forms", default=None)


@contextmanager
def forced_forms(*, backward_weight: str | None = None, backward_data: str | None = None) -> Iterator[None]:
    """Legalize with these compositions inside the block; None leaves the default.

    Args:
        backward_weight: "swapped" or "tiled".
        backward_data: "transposed" or "dilated".

    Raises:
        UnsupportedError: a name is unknown. A form that refuses a problem raises when that problem is legalized.
    """
    chosen = dict(_forced.get() or {})
    for face, form, forms in (
        ("backward_weight", backward_weight, WEIGHT_FORMS),
        ("backward_data", backward_data, DATA_FORMS),
    ):
        if form is None:
            continue
        if form not in forms:
            raise UnsupportedError(f"{face}: there is no composition {form!r}; there are {', '.join(forms)}")
        chosen[face] = form
    token = _forced.set(chosen)
    try:
        yield
    finally:
        _forced.reset(token)


def chosen_form(face: str) -> str:
    """The composition that legalization takes for a face now: the forced one, or the default."""
    forms = WEIGHT_FORMS if face == BACKWARD_WEIGHT.name else DATA_FORMS
    return (_forced.get() or {}).get(face, next(iter(forms)))


def legalize(block_builder: Any, call: Any) -> Any:
    """FLegalize: the call as a composition of stock operations.

    Extents of grad that could be neither proven nor disproven when types were inferred are checked when the program
    runs, by a match_cast.
    """
    entry, problem = entry_of(call), problem_of(call)
    attributes = attributes_of(call)
    grad, other = call.args[0], call.args[1]
    data_shape = (
        spec_of(other, "data", entry.name).shape if entry.face is BACKWARD_WEIGHT else shape_values(call.args[2])
    )
    assert data_shape is not None  # problem_of has made sure
    grad_shape = spec_of(grad, "grad", entry.name).shape
    assert grad_shape is not None
    if unproven_axes(attributes, grad_shape, data_shape, problem.kernel, AnalyzerProver()):
        shape = expected_grad_shape(attributes, grad_shape, data_shape, problem.kernel)
        grad = block_builder.match_cast(grad, relax.TensorType(shape, dtype_of(grad.ty)))
    builder = RelaxBuilder(block_builder)
    form = chosen_form(entry.face.name)
    if entry.face is BACKWARD_WEIGHT:
        return compose_backward_weight(builder, problem, grad, other, form)
    return compose_backward_data(builder, problem, grad, other, data_shape, form)


LEGALIZATIONS = {PREFIX + entry.name: legalize for entry in NEW_OPS}
"""Legalization of each operator."""
