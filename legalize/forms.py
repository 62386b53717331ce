# SPDX-License-Identifier: Apache-2.0
"""The compositions by name, with what each refuses, and the two entry points that take any layout and dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from legalize import data as _data
from legalize import weight as _weight
from legalize.builder import Builder, Extent, Value
from legalize.rearrange import permute
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, kernel_layout_of
from tvm_convgrad.core.problem import ConvProblem


@dataclass(frozen=True)
class Form:
    """One composition: its function, and a predicate that gives the reason of a refusal or None."""

    compose: Callable[..., Value]
    refuses: Callable[[ConvProblem], str | None] = lambda problem: None


WEIGHT_FORMS = {
    "swapped": Form(_weight.swapped_roles),
    "tiled": Form(_weight.tiled_depthwise, _weight.tiled_depthwise_refuses),
}
"""Forms of wgrad; the first is the default."""

DATA_FORMS = {"transposed": Form(_data.transposed), "dilated": Form(_data.dilated)}
"""Forms of dgrad; the first is the default."""


def compose_backward_weight(
    builder: Builder, problem: ConvProblem, grad: Value, data: Value, form: str = "swapped"
) -> Value:
    """dW in `kernel_layout` and `kernel_dtype`, from dY in `grad_layout` and X in `data_layout`.

    Of an empty problem (no samples, say) dW is zero.

    Raises:
        UnsupportedError: the form is unknown or refuses this problem; the sentence has the reason.
    """
    compose = _find(WEIGHT_FORMS, form, problem, "backward_weight").compose
    if problem.is_empty:
        return builder.zeros(problem.weight_shape, problem.kernel_dtype)
    dy, x = _operands(builder, problem, (grad, problem.grad_dtype), (data, problem.data_dtype))
    canonical = data_layout_of(problem.rank)
    dw = compose(
        builder,
        problem,
        permute(builder, dy, problem.grad_layout, canonical),
        permute(builder, x, problem.data_layout, canonical),
    )
    return builder.cast(
        permute(builder, dw, kernel_layout_of(problem.rank), problem.kernel_layout), problem.kernel_dtype
    )


def compose_backward_data(
    builder: Builder,
    problem: ConvProblem,
    grad: Value,
    weight: Value,
    data_shape: Sequence[Extent],
    form: str = "transposed",
) -> Value:
    """dX in `data_layout` and `data_dtype`, from dY in `grad_layout`, W in `kernel_layout` and X's shape.

    Of an empty problem dX is empty or zero.

    Raises:
        UnsupportedError: the form is unknown or refuses this problem; the sentence has the reason.
    """
    compose = _find(DATA_FORMS, form, problem, "backward_data").compose
    if problem.is_empty:
        return builder.zeros(data_shape, problem.data_dtype)
    dy, w = _operands(builder, problem, (grad, problem.grad_dtype), (weight, problem.kernel_dtype))
    canonical = data_layout_of(problem.rank)
    dx = compose(
        builder,
        problem,
        permute(builder, dy, problem.grad_layout, canonical),
        permute(builder, w, problem.kernel_layout, kernel_layout_of(problem.rank)),
        [data_shape[problem.data_layout.index(axis)] for axis in SPATIAL[problem.rank]],
    )
    return builder.cast(permute(builder, dx, canonical, problem.data_layout), problem.data_dtype)


def _operands(builder: Builder, problem: ConvProblem, *operands: tuple[Value, str]) -> list[Any]:
    """Operands of one type as they are; of two types, both in the accumulator's."""
    if len({dtype for _, dtype in operands}) == 1:
        return [value for value, _ in operands]
    return [builder.cast(value, problem.accumulator) for value, _ in operands]


def _find(forms: dict[str, Form], name: str, problem: ConvProblem, direction: str) -> Form:
    if name not in forms:
        raise UnsupportedError(f"{direction}: there is no composition {name!r}; there are {', '.join(forms)}")
    reason = forms[name].refuses(problem)
    if reason is not None:
        raise UnsupportedError(f"{direction}: composition {name!r} refuses {problem.descriptor}: {reason}")
    return forms[name]
