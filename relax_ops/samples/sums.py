# SPDX-License-Identifier: Apache-2.0
"""Sums over the samples: the operators that make them, with their terms, and those that pass them on term by term."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax

from relax_ops.batching import vmap_call
from relax_ops.ir import attributes_of, dtype_of, entry_of
from relax_ops.samples.axis import Axes, axes_of
from relax_ops.samples.state import Own, State, Summed, apart, ndim_of, shape_of, sum_of_squares
from relax_ops.unfolded import UnfoldingBuilder, patches
from tvm_convgrad.geometry import data_layout_of

GHOST = 2
"""Norms of wgrad's terms are taken from Gram matrices if that takes fewer products by this factor (`_ghost_pays`)."""


def made(call: Any, axes: Axes, inner: int) -> Summed | None:
    """The state of a call that sums over the samples, of `inner` entries each; None if it is no such call."""
    name = str(call.op.name)
    if name.startswith("relax.nn.conv") and name.endswith("_backward_weight"):
        return _backward_weight(call, axes, inner)
    if name == "relax.sum":
        return _sum(call, axes, inner)
    return _product(call, axes, inner) if name == "relax.matmul" else None


def _sum(call: Any, axes: Axes, inner: int) -> Summed | None:
    (axis,), value = axes, call.args[0]
    reduced = axes_of(call.attrs.axis, ndim_of(value))
    if axis is None or axis not in reduced:
        return None
    own = Own(axis, inner)

    def terms(builder: Any) -> Any:
        """The axis of the samples split in two, of which the first comes to the front and the second is summed over."""
        found = apart(builder, value, own)
        order = [own.axis, *(other for other in range(ndim_of(found)) if other != own.axis)]
        found = builder.emit(relax.op.permute_dims(found, order)) if own.axis else found
        return builder.emit(relax.op.sum(found, [other + 1 for other in reduced], keepdims=bool(call.attrs.keepdims)))

    return Summed(terms)


def _product(call: Any, axes: Axes, inner: int) -> Summed | None:
    """A (m, n) @ B (n, k) over samples n: a term is a column times a row, or the product of a sample's own entries."""
    left, right = call.args
    if ndim_of(left) != 2 or ndim_of(right) != 2 or tuple(axes) != (1, 0):
        return None

    def columns(builder: Any) -> Any:
        return builder.emit(relax.op.permute_dims(apart(builder, left, Own(1, inner)), [1, 0, 2]))

    def terms(builder: Any) -> Any:
        rows = apart(builder, right, Own(0, inner))
        multiply = relax.op.multiply if inner == 1 else relax.op.matmul
        return builder.emit(relax.op.astype(builder.emit(multiply(columns(builder), rows)), call.ty.dtype))

    def norm(builder: Any) -> Any:
        rows = builder.emit(relax.op.permute_dims(apart(builder, right, Own(0, inner)), [0, 2, 1]))
        if inner > 1:
            return _gram(UnfoldingBuilder(builder), columns(builder), rows, [1, 2])
        squares = (sum_of_squares(builder, left, axis=1), sum_of_squares(builder, right, axis=0))
        return builder.emit(relax.op.multiply(*squares))

    (height, width) = shape_of(call)
    known = isinstance(height, int) and isinstance(width, int)
    return Summed(terms, norm if inner == 1 or (known and _pays(inner, height, width)) else None)


def _backward_weight(call: Any, axes: Axes, inner: int) -> Summed | None:
    """wgrad: the terms are its vmap over the samples, with the entries of one as its batch."""
    entry, attributes = entry_of(call), attributes_of(call)
    batch = {name: attributes.layout(name).index("N") for name in entry.face.operands}
    if any(axis not in (None, batch[name]) for name, axis in zip(batch, axes, strict=True)):
        return None

    def terms(builder: Any) -> Any:
        operands = [
            apart(builder, value, Own(batch[name], inner))
            for name, value in zip(entry.face.operands, call.args, strict=True)
        ]
        names = ("kernel_size", "strides", "padding", "dilation", "groups", "grad_layout", "data_layout")
        given = {name: getattr(attributes, name) for name in (*names, "kernel_layout", "out_dtype")}
        return vmap_call(builder, entry, [batch], operands, **given)

    pays = inner == 1 and _ghost_pays(call)
    return Summed(terms, (lambda builder: _ghost(builder, call)) if pays else None)


def _pays(pixels: int, rows: int, columns: int) -> bool:
    """Whether Gram matrices over T pixels are cheaper: T·(rows + columns) products instead of rows·columns."""
    return GHOST * pixels * (rows + columns) <= rows * columns


def _ghost_pays(call: Any) -> bool:
    attributes = attributes_of(call)
    assert attributes.kernel_size is not None
    grad = dict(zip(attributes.grad_layout, shape_of(call.args[0]), strict=True))
    data = dict(zip(attributes.data_layout, shape_of(call.args[1]), strict=True))
    pixels = [extent for letter, extent in grad.items() if letter not in "NC"]
    if not all(isinstance(extent, int) for extent in pixels):
        return False
    rows = int(data["C"]) // attributes.groups * math.prod(attributes.kernel_size)
    return _pays(math.prod(pixels), rows, int(grad["C"]) // attributes.groups)


def _ghost(builder: Any, call: Any) -> Any:
    """The squared norm of each sample's dW without dW: the sum over pixels t, u of (x_t · x_u)(dy_t · dy_u).

    With x_t what the kernel reads for pixel t, dW is the sum over t of dy_t x_tᵀ. Source: I. Goodfellow, "Efficient
    per-example gradient computations", 2015; for convolutions: G. Rochette et al., 2019.
    """
    attributes, own = attributes_of(call), UnfoldingBuilder(builder)
    assert attributes.kernel_size is not None
    canonical = data_layout_of(attributes.rank)
    grad, data = (
        own.transpose(value, [attributes.layout(name).index(letter) for letter in canonical])
        for name, value in zip(("grad", "data"), call.args, strict=True)
    )
    n, channels, *pixels = own.shape(grad)
    groups, count = attributes.groups, math.prod(pixels)
    unfolded = patches(own, attributes, attributes.kernel_size, data)
    rows = own.shape(unfolded)[1] // groups * own.shape(unfolded)[2]
    left = own.reshape(unfolded, [n, groups, rows, count])
    return _gram(own, left, own.reshape(grad, [n, groups, channels // groups, count]), [1, 2, 3])


def _gram(own: UnfoldingBuilder, left: Any, right: Any, axes: Sequence[int]) -> Any:
    """The sum over `axes` of the product of two tensors' Gram matrices; they are (…, length, pixels)."""
    grams = []
    for value in (left, right):
        wide = own.cast(value, "float64" if dtype_of(value.ty) == "float64" else "float32")
        ndim = ndim_of(wide)
        grams.append(own.matmul(own.transpose(wide, [*range(ndim - 2), ndim - 1, ndim - 2]), wide))
    return own.sum_of_products(grams[0], grams[1], axes)


# ------------------------------------------------------------------------------------ passing sums on


def passed(call: Any, states: Sequence[State]) -> Summed | str:
    """The state of a call of which an argument is Summed and none has the samples: Summed, or why not.

    Linear operators only: a sum's terms go through them one by one.
    """
    name = str(call.op.name)
    if name in _LINEAR and isinstance(states[0], Summed) and all(state is None for state in states[1:]):
        first = states[0]
        rule, norm = _LINEAR[name], first.norm if name in _ISOMETRIC else None
        return Summed(lambda builder: builder.emit(rule(call, first.terms(builder))), norm)
    if name in _PRODUCTS and all(ndim_of(arg) <= ndim_of(call) for arg in call.args):
        return _scaled(call, states)
    if name in ("relax.add", "relax.subtract") and all(isinstance(state, Summed) for state in states):
        if any(ndim_of(arg) != ndim_of(call) for arg in call.args):
            return "it broadcasts sums over the samples"
        both = [state for state in states if isinstance(state, Summed)]
        return Summed(lambda b: b.emit(relax.Call(call.op, [s.terms(b) for s in both], call.attrs)))
    if name == "relax.broadcast_to":
        return "it takes a sum over the samples back to each of them"
    return "it is not linear in a sum over the samples"


def _scaled(call: Any, states: Sequence[State]) -> Summed | str:
    summed = [number for number, state in enumerate(states) if isinstance(state, Summed)]
    allowed = [0] if str(call.op.name) == "relax.divide" else [0, 1]
    if len(summed) != 1 or summed[0] not in allowed:
        return "it is not linear in a sum over the samples"
    place = summed[0]
    if ndim_of(call.args[place]) != ndim_of(call):
        return "it broadcasts a sum over the samples"
    state = states[place]
    assert isinstance(state, Summed)

    def terms(builder: Any) -> Any:
        operands = list(call.args)
        operands[place] = state.terms(builder)
        return builder.emit(relax.Call(call.op, operands, call.attrs))

    return Summed(terms)


def _reshape(call: Any, terms: Any) -> Any:
    return relax.op.reshape(terms, relax.ShapeExpr([shape_of(terms)[0], *shape_of(call)]))


def _permute_dims(call: Any, terms: Any) -> Any:
    ndim, order = ndim_of(call), call.attrs.axes
    moved = list(reversed(range(ndim))) if order is None else [int(a) % ndim for a in order]
    return relax.op.permute_dims(terms, [0, *(axis + 1 for axis in moved)])


def _sum_on(call: Any, terms: Any) -> Any:
    reduced = axes_of(call.attrs.axis, ndim_of(call.args[0]))
    return relax.op.sum(terms, [axis + 1 for axis in reduced], keepdims=bool(call.attrs.keepdims))


def _unary(call: Any, terms: Any) -> Any:
    return relax.Call(call.op, [terms], call.attrs)


_RESHAPES = ("relax.reshape", "relax.flatten", "relax.expand_dims", "relax.squeeze")
_LINEAR: dict[str, Callable[[Any, Any], Any]] = {
    **dict.fromkeys(_RESHAPES, _reshape),
    "relax.permute_dims": _permute_dims,
    "relax.sum": _sum_on,
    "relax.negative": _unary,
    "relax.astype": _unary,
    "relax.grad.no_grad": _unary,
}
_ISOMETRIC = (*_RESHAPES, "relax.permute_dims", "relax.negative")
_PRODUCTS = ("relax.multiply", "relax.divide")
