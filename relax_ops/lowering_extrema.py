# SPDX-License-Identifier: Apache-2.0
"""FLegalize of relu, clip, maximum, minimum, max and min of floats that keeps NaN, as PyTorch and ONNX do.

TVM lowers them to max(x, 0) and the like, which gives 0 for NaN: a sample with a NaN then has a finite loss, while the
weights before the relu become NaN. Integers, which have no NaN, go to TVM's own functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import te, tirx

from relax_ops.compat import Constant, array_of
from relax_ops.gradients.common import FLOATS, axes_of, dtype_of
from relax_ops.ir import PREFIX
from tvm_convgrad.kernels.extrema import at_least, at_most, maximum, minimum

Legalize = Callable[[Any, Any], Any]
Combine = Callable[[Any, Any], Any]


def _relu(stock: Legalize) -> Legalize:
    def legalize(block_builder: Any, call: Any) -> Any:
        dtype = dtype_of(call)
        if dtype not in FLOATS:
            return stock(block_builder, call)

        def compute(x: Any) -> Any:
            return te.compute(x.shape, lambda *place: at_least(x(*place), tirx.const(0.0, dtype)), name="relu")

        return block_builder.call_te(compute, call.args[0], primfunc_name_hint="relu")

    return legalize


def _clip(stock: Legalize) -> Legalize:
    def legalize(block_builder: Any, call: Any) -> Any:
        dtype = dtype_of(call)
        bounds = [float(getattr(bound, "value", math.nan)) for bound in call.args[1:]]
        if dtype not in FLOATS or any(map(math.isnan, bounds)):
            return stock(block_builder, call)
        low, high = (tirx.const(bound, dtype) for bound in bounds)

        def compute(x: Any) -> Any:
            return te.compute(x.shape, lambda *place: at_most(at_least(x(*place), low), high), name="clip")

        return block_builder.call_te(compute, call.args[0], primfunc_name_hint="clip")

    return legalize


def _choice(against: Combine, both: Combine) -> Callable[[Legalize], Legalize]:
    """Legalization of an elementwise choice: `against` a constant that is not NaN, or of `both` tensors."""

    def make(stock: Legalize) -> Legalize:
        def legalize(block_builder: Any, call: Any) -> Any:
            shape = getattr(call.ty.shape, "values", None)
            if dtype_of(call) not in FLOATS or shape is None:
                return stock(block_builder, call)
            given = [_number(argument) for argument in call.args]
            tensors = [argument for argument, number in zip(call.args, given, strict=True) if number is None]
            if len(tensors) == 1:
                number = next(number for number in given if number is not None)

                def with_number(x: Any) -> Any:
                    return te.compute(shape, lambda *place: against(_at(x, place), number), name="choice")

                return block_builder.call_te(with_number, *tensors, primfunc_name_hint=_name(call))

            def with_tensor(x: Any, y: Any) -> Any:
                return te.compute(shape, lambda *place: both(_at(x, place), _at(y, place)), name="choice")

            return block_builder.call_te(with_tensor, *call.args, primfunc_name_hint=_name(call))

        return legalize

    return make


def _number(argument: Any) -> Any:
    """A scalar constant that is not NaN, as a TIR constant; None for all other operands."""
    if isinstance(argument, Constant) and not array_of(argument).shape:
        value = float(array_of(argument))
        return None if math.isnan(value) else tirx.const(value, dtype_of(argument))
    return None


def _at(operand: Any, place: Sequence[Any]) -> Any:
    """The element of a tensor that is broadcast to the result's shape; a scalar of the program is its own element."""
    if not hasattr(operand, "shape"):
        return operand
    last = list(place)[len(place) - len(operand.shape) :]
    is_one = [isinstance(extent, tirx.IntImm) and int(extent) == 1 for extent in operand.shape]
    return operand(*(0 if one else index for one, index in zip(is_one, last, strict=True)))


def _name(call: Any) -> str:
    return str(call.op.name).rpartition(".")[2]


def _reduction(combine: Combine, start: float) -> Callable[[Legalize], Legalize]:
    """Legalization of a maximum or minimum over axes; `start` is that of no elements."""

    def make(stock: Legalize) -> Legalize:
        def legalize(block_builder: Any, call: Any) -> Any:
            data, keep = call.args[0], bool(call.attrs.keepdims)
            shape = getattr(data.ty.shape, "values", None)
            if dtype_of(call) not in FLOATS or not shape:
                return stock(block_builder, call)
            axes = axes_of(call.attrs.axis, len(shape))
            if not axes or any(isinstance(shape[axis], tirx.IntImm) and int(shape[axis]) == 0 for axis in axes):
                return stock(block_builder, call)

            def compute(x: Any) -> Any:
                reduce = te.comm_reducer(combine, lambda dtype: tirx.const(start, dtype), name=_name(call))
                over = [te.reduce_axis((0, x.shape[axis]), name=f"k{axis}") for axis in axes]
                left = [axis for axis in range(len(x.shape)) if axis not in axes]

                def element(*place: Any) -> Any:
                    kept = [place[axis] for axis in left] if keep else list(place)
                    at: list[Any] = [None] * len(x.shape)
                    for axis, index in [*zip(left, kept, strict=True), *zip(axes, over, strict=True)]:
                        at[axis] = index
                    return reduce(x(*at), axis=over)

                extents = [x.shape[axis] if axis in left else 1 for axis in range(len(x.shape))]
                return te.compute(extents if keep else [extents[axis] for axis in left], element, name=_name(call))

            return block_builder.call_te(compute, data, primfunc_name_hint=_name(call))

        return legalize

    return make


_MAKERS: dict[str, Callable[[Legalize], Legalize]] = {
    PREFIX + "relu": _relu,
    "relax.clip": _clip,
    "relax.maximum": _choice(at_least, maximum),
    "relax.minimum": _choice(at_most, minimum),
    "relax.max": _reduction(maximum, -math.inf),
    "relax.min": _reduction(minimum, math.inf),
}

LEGALIZATIONS = {name: make(tvm.ir.Op.get(name).get_attr("FLegalize")) for name, make in _MAKERS.items()}
"""Legalization of each operator."""
