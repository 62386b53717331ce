# SPDX-License-Identifier: Apache-2.0
"""convolution_backward as Relax expressions: the directions that `core.backward` names, and the sum for the bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relax

from relax_ops.ir import AnalyzerProver, dtype_of, spec_of
from relax_ops.program import Convolution
from tvm_convgrad.core.backward import NAME, OPERANDS, BackwardCall, backward_call
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL

Gradients = tuple[relax.Expr | None, relax.Expr | None, relax.Expr | None]


class _Nested:
    """In the place of a BlockBuilder: what it would emit stays nested in the expression that reads it."""

    def __init__(self) -> None:
        self._builder = relax.BlockBuilder()

    def normalize(self, expr: relax.Expr) -> relax.Expr:
        return self._builder.normalize(expr)

    def emit(self, expr: relax.Expr) -> relax.Expr:
        return expr


def convolution_backward(tensors: Mapping[str, relax.Expr], **arguments: Any) -> Gradients:
    """Expressions for the gradients of data, weight and bias; None where masked.

    Args:
        tensors: "grad", "data" and "weight", Relax expressions whose types are known.
        arguments: those of `tvm_convgrad.core.backward.backward_call`.

    Raises:
        ProblemError, DTypeError: the tensors do not belong to one convolution.
        UnsupportedError: a type or shape is not known.
    """
    specs = {}
    for name, tensor in tensors.items():
        typed = tensor.ty is not None and type(tensor.ty) is not tvm.ir.Type  # what a call has before it is emitted
        if typed:
            specs[name] = spec_of(tensor, name, NAME)
        if not typed or specs[name].shape is None or specs[name].dtype is None:
            raise UnsupportedError(
                f"{NAME}: the shape or dtype of {name} is not known; emit the expression first, or use R.match_cast"
            )
    return gradients_of(backward_call(specs, AnalyzerProver(), **arguments), tensors)


def gradients_of(call: BackwardCall, tensors: Mapping[str, relax.Expr]) -> Gradients:
    """The expressions of a checked call."""
    builder, layouts = _Nested(), dict(zip(OPERANDS, call.layouts, strict=True))
    operands = dict(tensors) | {"grad": _cropped(builder, call, tensors["grad"], layouts["grad"])}
    convolution = Convolution(
        rank=len(call.kernel),
        strides=call.strides,
        padding=call.padding,
        dilation=call.dilation,
        groups=call.groups,
        layouts={role: layouts[name] for role, name in call.roles.items()},
        kernel=call.kernel,
        data_shape=spec_of(tensors[call.roles["data"]], "data", NAME).shape,
    )
    results: list[relax.Expr | None] = []
    for wanted, name, (direction, (first, second)) in zip(call.mask, ("data", "weight"), call.gradients, strict=False):
        dtype = dtype_of(tensors[name].ty)
        made = convolution.call(direction, operands[first], operands[second], dtype, builder) if wanted else None
        results.append(made)
    bias = None
    if call.mask[2]:
        bias = bias_gradient(builder, tensors["grad"], layouts["grad"], str(dtype_of(tensors["weight"].ty)))
    return results[0], results[1], bias


def backward_module(call: BackwardCall, tensors: Mapping[str, tuple[tuple[int, ...], str]]) -> tvm.IRModule:
    """An IRModule whose `main(grad, data, weight)` gives a tuple of the wanted gradients.

    Args:
        tensors: shape and type of each of the three.
    """
    parameters = {name: relax.Var(name, relax.TensorType(*tensors[name])) for name in OPERANDS}
    builder = relax.BlockBuilder()
    with builder.function("main", list(parameters.values())):
        with builder.dataflow():
            wanted = [builder.emit(value) for value in gradients_of(call, parameters) if value is not None]
            result = builder.emit_output(relax.Tuple(wanted))
        builder.emit_func_output(result)
    return builder.get()


def _cropped(builder: _Nested, call: BackwardCall, grad: relax.Expr, layout: str) -> relax.Expr:
    """grad without the elements that the transposed convolution wrote no product to."""
    axes = [i for i, crop in enumerate(call.crop) if crop]
    if not axes:
        return grad
    places = [layout.index(SPATIAL[len(call.crop)][i]) for i in axes]
    shape = spec_of(grad, "grad", NAME).shape
    assert shape is not None  # convolution_backward has made sure
    ends = [shape[place] - call.crop[i] for place, i in zip(places, axes, strict=True)]
    sliced = relax.op.strided_slice(grad, axes=places, begin=[0] * len(axes), end=ends, assume_inbound=True)
    return builder.normalize(sliced)


def bias_gradient(
    builder: relax.BlockBuilder | _Nested, grad: relax.Expr, layout: str, dtype: str, levels: Sequence[int | None] = ()
) -> relax.Expr:
    """grad summed over everything but channels, 16-bit floats in float32; under vmap for each entry of the batch axes.

    Args:
        builder: emits the operations.
        grad: a Relax tensor of known type; its batch axes are where `levels`, outermost first, says.
        layout: of grad without its batch axes.
        dtype: of the result, whose batch axes come first.
    """
    axes: list[str | int] = list(layout)
    for number, dim in reversed(list(enumerate(levels))):
        if dim is not None:
            axes.insert(dim, number)
    own = str(dtype_of(grad.ty))
    wide = wide_dtype(own)
    summed = grad if own == wide else builder.emit(relax.op.astype(grad, wide))
    others = [i for i, axis in enumerate(axes) if isinstance(axis, str) and axis != "C"]
    total = builder.emit(relax.op.sum(summed, others))
    kept = [axis for axis in axes if axis == "C" or isinstance(axis, int)]
    wanted: list[str | int] = [*(number for number in range(len(levels)) if number in kept), "C"]
    if kept != wanted:
        total = builder.emit(relax.op.permute_dims(total, [kept.index(axis) for axis in wanted]))
    return total if wide == dtype else builder.emit(relax.op.astype(total, dtype))
