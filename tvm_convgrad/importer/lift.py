# SPDX-License-Identifier: Apache-2.0
"""Weight gradients that older Relay wrote out as tile, reshape, conv2d, reshape, sum, transpose and slice.

    dY (N, O, …) is tiled C/g times and taken as N·(C/g)·O filters of one channel; X (N, C, …) becomes one sample of
    N·C channels; conv2d with groups = N·C gives (N, C/g, O, …) after a reshape; sum over N; transpose to (O, C/g, …).

That is dW for one group and for depthwise convolutions. For groups in between the chain pairs the wrong channels, as
Relay did, and is left as it is written: importing does not change what a program computes.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import relax

from relax_ops.ops import make_call
from tvm_convgrad.core.catalogue import BY_NAME
from tvm_convgrad.core.errors import ConvGradError
from tvm_convgrad.importer.context import Context

OP = "conv2d_backward_weight"


def lifted_weight_gradient(context: Context, name: str, value: relax.Expr) -> relax.Expr | None:
    """dW by the dedicated operator, if `value` ends a chain that is one.

    Args:
        name: of the Relay operator that made `value`: transpose, or strided_slice behind it.

    Returns:
        The result of the dedicated operator, or None.
    """
    call = context.origin(value)
    if name == "transpose":
        found = _chain(context, call)
    elif name == "strided_slice":
        found = _sliced(context, call)
    else:
        return None
    if found is None:
        return None
    try:
        result = context.emit(make_call(BY_NAME[OP], found.grad, found.data, **found.arguments))
    except ConvGradError:  # not the weight gradient of a convolution: the chain stays as it is written
        return None
    if context.shape(result) != context.shape(value) or context.dtype(result) != context.dtype(value):
        return None
    if name == "transpose":
        context.lifted.append(f"tile, reshape and nn.conv2d are the weight gradient {OP}")
    return result


def _name(call: relax.Call) -> str:
    return str(getattr(getattr(call, "op", None), "name", ""))


def _of(context: Context, value: relax.Expr, name: str) -> relax.Call | None:
    """The call that made a value, if it is of this operator."""
    call = context.origin(value)
    return call if call is not None and _name(call) == f"relax.{name}" else None


def _ints(context: Context, value: relax.Expr) -> tuple[int, ...] | None:
    shape = context.shape(value)
    return shape if all(isinstance(extent, int) for extent in shape) else None


def _chain(context: Context, call: relax.Call) -> SimpleNamespace | None:
    if call is None or _name(call) != "relax.permute_dims" or [int(a) for a in call.attrs.axes] != [1, 0, 2, 3]:
        return None
    total = _of(context, call.args[0], "sum")
    if total is None or total.attrs.keepdims or [int(axis) for axis in total.attrs.axis] != [0]:
        return None
    parts_of = _of(context, total.args[0], "reshape")
    parts = _ints(context, total.args[0])
    if parts is None or len(parts) != 5 or parts_of is None:
        return None
    product = _of(context, parts_of.args[0], "nn.conv2d")
    if product is None or product.attrs.data_layout != "NCHW" or product.attrs.kernel_layout != "OIHW":
        return None
    for data in _unshaped(context, product.args[0]):
        for filters in _unshaped(context, product.args[1]):
            tiled = _of(context, filters, "tile")
            grad, copies = filters, 1
            if tiled is not None:
                reps = [int(rep) for rep in tiled.attrs.repeats]
                if len(reps) != 4 or reps[0] != 1 or reps[2:] != [1, 1]:
                    continue
                grad, copies = tiled.args[0], reps[1]
            found = _described(context, grad, data, copies, parts, product)
            if found is not None:
                return found
    return None


def _unshaped(context: Context, value: relax.Expr) -> list[relax.Expr]:
    """What a value was before its reshape, if it has one, and the value itself.

    With one sample the chain's own reshape changes nothing and is not emitted; a reshape there is the program's.
    """
    reshape = _of(context, value, "reshape")
    return [value] if reshape is None else [reshape.args[0], value]


def _described(
    context: Context, grad: relax.Expr, data: relax.Expr, copies: int, parts: tuple[int, ...], product: relax.Expr
) -> SimpleNamespace | None:
    """What the chain computes, if its extents are those of a weight gradient."""
    dy, x = _ints(context, grad), _ints(context, data)
    folded, filters = _ints(context, product.args[0]), _ints(context, product.args[1])
    if dy is None or x is None or folded is None or filters is None or len(dy) != 4 or len(x) != 4:
        return None
    batch, outputs, channels = dy[0], dy[1], x[1]
    groups = 1 if copies == channels else channels
    if copies != channels // groups or outputs % groups or x[0] != batch:
        return None
    fits = (
        folded == (1, batch * channels, x[2], x[3])
        and filters == (batch * copies * outputs, 1, dy[2], dy[3])
        and int(product.attrs.groups) == batch * channels
        and parts[:3] == (batch, copies, outputs)
    )
    if not fits:
        return None
    return SimpleNamespace(
        grad=grad,
        data=data,
        arguments={
            "kernel_size": parts[3:],
            "strides": tuple(int(step) for step in product.attrs.dilation),
            "dilation": tuple(int(step) for step in product.attrs.strides),
            "padding": tuple(int(width) for width in product.attrs.padding),
            "groups": groups,
            "out_dtype": context.dtype(grad) if context.dtype(product.args[0]) == context.dtype(grad) else None,
        },
    )


def _sliced(context: Context, call: relax.Call) -> SimpleNamespace | None:
    """A lifted gradient whose kernel was sliced: the chain gives too many rows where strides leave some over."""
    if call is None or _name(call) != "relax.strided_slice":
        return None
    whole = _of(context, call.args[0], f"nn.{OP}")
    if whole is None:
        return None
    attrs = whole.attrs
    if str(attrs.kernel_layout) != "OIHW":
        return None
    shape = context.shape(call.args[0])
    axes, begin, end, strides = (_literals(argument) for argument in call.args[1:5])
    if set(axes) - {2, 3} or any(begin) or any(step != 1 for step in strides):
        return None
    kept = list(shape)
    for axis, stop in zip(axes, end, strict=True):
        kept[axis] = stop
    return SimpleNamespace(
        grad=whole.args[0],
        data=whole.args[1],
        arguments={
            "kernel_size": tuple(kept[2:]),
            "strides": tuple(int(v) for v in attrs.strides),
            "dilation": tuple(int(v) for v in attrs.dilation),
            "padding": tuple(int(v) for v in attrs.padding),
            "groups": int(attrs.groups),
            "grad_layout": str(attrs.grad_layout),
            "data_layout": str(attrs.data_layout),
            "kernel_layout": str(attrs.kernel_layout),
            "out_dtype": str(attrs.out_dtype) or None,
        },
    )


def _literals(argument: Any) -> list[int]:
    """The numbers of a tuple or list of literals."""
    fields = getattr(argument, "fields", None) or getattr(argument, "values", [])
    return [int(getattr(field, "value", field)) for field in fields]
