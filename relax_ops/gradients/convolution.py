# SPDX-License-Identifier: Apache-2.0
"""Gradients of every convolution: stock conv{1,2,3}d and their transposes, and the six operators of this package.

All come from one table, `Face.gradients` of the catalogue: the family is closed under differentiation. A transposed
convolution is dgrad read forwards (its data is grad, its result is data), so it needs no rule of its own. A partial has
the type of the operand it belongs to, whatever `out_dtype` was.
"""

from __future__ import annotations

from typing import Any

from tvm.relax.op.grad import no_grad

from relax_ops.ir import PREFIX, attributes_of, dtype_of, entry_of, pairs_of, shape_values, spec_of
from relax_ops.program import Convolution
from tvm_convgrad.catalogue import BACKWARD_DATA, FACES, FORWARD, NEW_OPS, Face
from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.geometry import SPATIAL, check_layout, swapped_kernel_layout


def stock_gradient(orig_var: Any, orig_call: Any, output_grad: Any, builder: Any) -> list[Any]:
    """Gradient of conv{1,2,3}d: [dX, dW].

    Raises:
        UnsupportedError: a packed layout, or a shape that is not known at compile time.
    """
    return _partials(FORWARD, orig_call, _stock_convolution(orig_call), output_grad, builder)


def transpose_gradient(orig_var: Any, orig_call: Any, output_grad: Any, builder: Any) -> list[Any]:
    """Gradient of conv{1,2,3}d_transpose: [dX, dW].

    The transposed convolution is the dgrad of a convolution that maps its result to its data; what it calls I and O of
    the weight are that convolution's O and I. Output padding is the floor division's remainder, implied by the shapes.

    Raises:
        UnsupportedError: a packed layout, or a shape that is not known at compile time.
    """
    return _partials(BACKWARD_DATA, orig_call, _transposed_convolution(orig_var, orig_call), output_grad, builder)


def family_gradient(orig_var: Any, orig_call: Any, output_grad: Any, builder: Any) -> list[Any]:
    """Gradient of the operators of this package, so that Gradient can be applied again and again."""
    face = entry_of(orig_call).face
    partials = _partials(face, orig_call, _family_convolution(orig_var, orig_call), output_grad, builder)
    return [*partials, no_grad(orig_call.args[2])] if face is BACKWARD_DATA else partials


def _partials(face: Face, call: Any, convolution: Convolution, output_grad: Any, builder: Any) -> list[Any]:
    """Walk the catalogue's table: one partial for each operand of `face`, in that operand's type."""
    values = dict(zip(face.operands, call.args, strict=False))
    values["result"] = output_grad
    partials = []
    for operand, (gradient_face, (first, second)) in zip(face.operands, face.gradients, strict=True):
        out_dtype = dtype_of(values[operand].ty)
        partials.append(convolution.call(FACES[gradient_face], values[first], values[second], out_dtype, builder))
    return partials


def _stock_convolution(call: Any) -> Convolution:
    name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
    rank = len(attrs.strides)
    data_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    layouts = {"data": data_layout, "weight": kernel_layout, "grad": str(attrs.out_layout) or data_layout}
    return _convolution(name, rank, attrs, layouts, _shape(call.args[0], name), _shape(call.args[1], name))


def _transposed_convolution(orig_var: Any, call: Any) -> Convolution:
    name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
    rank = len(attrs.strides)
    swapped = swapped_kernel_layout(str(attrs.kernel_layout))
    grad_layout = str(attrs.data_layout)
    layouts = {"grad": grad_layout, "weight": swapped, "data": str(attrs.out_layout) or grad_layout}
    return _convolution(name, rank, attrs, layouts, _shape(orig_var, name), _shape(call.args[1], name))


def _family_convolution(orig_var: Any, call: Any) -> Convolution:
    attributes, entry = attributes_of(call), entry_of(call)
    layouts = {name: attributes.layout(name) for name in ("grad", "data", "weight")}
    if entry.face is BACKWARD_DATA:
        data_shape, weight_shape = shape_values(call.args[2]), _shape(call.args[1], entry.name)
    else:
        data_shape, weight_shape = _shape(call.args[1], entry.name), _shape(orig_var, entry.name)
    return _convolution(entry.name, entry.rank, call.attrs, layouts, data_shape, weight_shape)


def _convolution(
    name: str, rank: int, attrs: Any, layouts: dict[str, str], data_shape: Any, weight_shape: Any
) -> Convolution:
    for tensor, layout in layouts.items():
        kind = "kernel" if tensor == "weight" else "data"
        if len(layout) != rank + 2:
            raise UnsupportedError(
                f"{name}: the gradient of packed layout {layout!r} is not served; take the gradient in a plain layout "
                f"and convert afterwards with relax.transform.ConvertLayout"
            )
        check_layout(layout, rank, kind, f"{name}: layout of {tensor}")
    return Convolution(
        rank=rank,
        strides=tuple(int(s) for s in attrs.strides),
        padding=pairs_of(attrs.padding, rank),
        dilation=tuple(int(d) for d in attrs.dilation),
        groups=int(attrs.groups),
        layouts=layouts,
        kernel=tuple(int(weight_shape[layouts["weight"].index(axis)]) for axis in SPATIAL[rank]),
        data_shape=data_shape,
    )


def _shape(expr: Any, op: str) -> tuple[Any, ...]:
    shape = spec_of(expr, "operand", op).shape
    if shape is None:
        raise UnsupportedError(f"{op}: the gradient needs the shape of {expr}, which is not known; use R.match_cast")
    return shape


GRADIENTS = {
    **{f"{PREFIX}conv{rank}d": stock_gradient for rank in SPATIAL},
    **{f"{PREFIX}conv{rank}d_transpose": transpose_gradient for rank in SPATIAL},
    **{PREFIX + entry.name: family_gradient for entry in NEW_OPS},
}
"""Gradient rules by operator."""
