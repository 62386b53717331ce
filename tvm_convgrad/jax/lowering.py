# SPDX-License-Identifier: Apache-2.0
"""The primitive in a program that is being compiled: on one CPU a kernel's custom call or XLA's own convolution.

On other platforms, over several devices, and in programs that are exported it is what JAX itself would have emitted:
XLA splits its own convolutions among devices, and a program that is exported may run where no kernel is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import jax
from jax.interpreters import mlir

from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD
from tvm_convgrad.core.geometry import data_layout_of, kernel_layout_of
from tvm_convgrad.jax.choice import CHOICES, TARGET
from tvm_convgrad.jax.primitive import Call, convolution_p

_aside: ContextVar[bool] = ContextVar("convgrad_aside", default=False)


@contextmanager
def aside() -> Iterator[None]:
    """Inside, convolutions are JAX's own, patched or not."""
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


def is_aside() -> bool:
    """Whether convolutions are to be JAX's own."""
    return _aside.get()


def own(first: jax.Array, second: jax.Array, *, call: Call) -> jax.Array:
    """A direction as JAX computes it: its convolution, or a transpose of that."""
    problem = call.problem
    data, weight, grad = problem.data_layout, problem.kernel_layout, problem.grad_layout
    letters, kernel = data_layout_of(problem.rank), kernel_layout_of(problem.rank)
    numbers = jax.lax.ConvDimensionNumbers(
        tuple(map(data.index, letters)), tuple(map(weight.index, kernel)), tuple(map(grad.index, letters))
    )

    def forward(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x,
            w,
            problem.strides,
            problem.padding,
            rhs_dilation=problem.dilation,
            dimension_numbers=numbers,
            feature_group_count=problem.groups,
            precision=call.precision,
        )

    with aside():
        if call.direction == FORWARD.name:
            return forward(first, second)
        if call.direction == BACKWARD_WEIGHT.name:
            like = replace(call, direction=BACKWARD_DATA.name).operands[1]
            return jax.linear_transpose(lambda w: forward(second, w), like)(first)[0]
        like = replace(call, direction=FORWARD.name).operands[0]
        return jax.linear_transpose(lambda x: forward(x, second), like)(first)[0]


def _several(context: mlir.LoweringRuleContext) -> str:
    """Why XLA computes all convolutions of a program that is being lowered; or nothing."""
    module = context.module_context
    if module.lowering_parameters.for_export:
        return "the program is exported, and may run where no kernel is"
    axes = module.axis_context
    devices = axes.mesh.size if isinstance(axes, mlir.SPMDAxisContext) else getattr(axes, "num_devices", 1)
    return f"the program runs on {devices} devices" if devices > 1 else ""


_lower_own = mlir.lower_fun(own, multiple_results=False)
_lower_kernel = jax.ffi.ffi_lowering(TARGET)


def _lower_cpu(context: mlir.LoweringRuleContext, first: Any, second: Any, *, call: Call) -> Sequence[Any]:
    """The lowering on CPUs. Values are MLIR's, for which jaxlib has no types."""
    choice = CHOICES.of(call, _several(context), lambda one, other: own(one, other, call=call))
    if choice.kernel is None:
        return _lower_own(context, first, second, call=call)
    return _lower_kernel(context, first, second, kernel=choice.kernel.job.key)


mlir.register_lowering(convolution_p, _lower_own)
mlir.register_lowering(convolution_p, _lower_cpu, platform="cpu")

__all__ = ["aside", "is_aside", "own"]
