# SPDX-License-Identifier: Apache-2.0
"""The operators conv{1,2,3}d_backward_weight and conv{1,2,3}d_backward_data as functions on Relax or Relay expressions.

On them stands `convolution_backward`, with PyTorch's contract. Arguments that the operators share:

    strides, dilation   an int, or one int an axis
    padding             an int; one int an axis; lows then highs (top, left, bottom, right); pairs; "SAME" (TensorFlow's
                        formula) or "VALID"; never negative
    groups              divides both channel counts
    grad_layout         permutation of NCW, NCHW or NCDHW: of Y and of grad, its gradient
    data_layout         the same for the data
    kernel_layout       permutation of OIW, OIHW or OIDHW
    out_dtype           of the result: float16, bfloat16, float32 or float64; None is the operands' common type, or the
                        wider one. Sums are in float32 (float64 if an operand is) whatever it says.

A call is checked when its type is inferred: ProblemError and DTypeError name operator, argument, rule, values, remedy.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import tvm

from tvm_convgrad import register
from tvm_convgrad.arguments import Ints, Padding
from tvm_convgrad.catalogue import BY_NAME
from tvm_convgrad.errors import SetupError, UnsupportedError


def _call(name: str, first: Any, second: Any, **attributes: Any) -> Any:
    kind = _checked_kind(name, first, second)
    make_call = importlib.import_module(f"{kind.lower()}_ops.ops").make_call
    return make_call(BY_NAME[name], first, second, **attributes)


def _checked_kind(name: str, *operands: Any) -> str:
    """ "Relay" or "Relax", whose expressions all operands are; registers the operators."""
    kind = "Relay" if hasattr(tvm, "relay") else "Relax"
    if not hasattr(tvm, kind.lower()):
        raise SetupError(f"{name}: TVM {tvm.__version__} has no Relax; install 'apache-tvm>=0.26,<0.28'")
    for operand in operands:
        if not isinstance(operand, getattr(tvm, kind.lower()).Expr):
            raise UnsupportedError(
                f"{name}: the operands must be {kind} expressions, not {type(operand).__name__}; for numpy arrays "
                f"there is tvm_convgrad.evaluate({name!r}, ...)"
            )
    register()
    return kind


def conv1d_backward_weight(
    grad: Any,
    data: Any,
    *,
    kernel_size: Ints,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCW",
    data_layout: str = "NCW",
    kernel_layout: str = "OIW",
    out_dtype: str | None = None,
) -> Any:
    """dW of a 1-d convolution, in `kernel_layout`.

    Args:
        grad: dY, gradient of the convolution's result, in `grad_layout`.
        data: X, what the convolution took, in `data_layout`.
        kernel_size: extents of the kernel, (W,); strides larger than 1 make them ambiguous otherwise.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see the module.
    """
    return _call(
        "conv1d_backward_weight",
        grad,
        data,
        kernel_size=kernel_size,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def conv1d_backward_data(
    grad: Any,
    weight: Any,
    *,
    data_shape: Any,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCW",
    data_layout: str = "NCW",
    kernel_layout: str = "OIW",
    out_dtype: str | None = None,
) -> Any:
    """dX of a 1-d convolution, in `data_layout`.

    Args:
        grad: dY, gradient of the convolution's result, in `grad_layout`.
        weight: W, in `kernel_layout`.
        data_shape: the full shape of X in `data_layout`: ints, symbolic extents, or a Relax shape expression; in
            Relay ints. With a stride s, s different extents of X give one of Y, so that it cannot be guessed.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see the module.
    """
    return _call(
        "conv1d_backward_data",
        grad,
        weight,
        data_shape=data_shape,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def conv2d_backward_weight(
    grad: Any,
    data: Any,
    *,
    kernel_size: Ints,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCHW",
    data_layout: str = "NCHW",
    kernel_layout: str = "OIHW",
    out_dtype: str | None = None,
) -> Any:
    """dW of a 2-d convolution, in `kernel_layout`.

    Args:
        grad: dY, gradient of the convolution's result, in `grad_layout`.
        data: X, what the convolution took, in `data_layout`.
        kernel_size: extents of the kernel, (H, W); strides larger than 1 make them ambiguous otherwise.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see the module.
    """
    return _call(
        "conv2d_backward_weight",
        grad,
        data,
        kernel_size=kernel_size,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def conv2d_backward_data(
    grad: Any,
    weight: Any,
    *,
    data_shape: Any,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCHW",
    data_layout: str = "NCHW",
    kernel_layout: str = "OIHW",
    out_dtype: str | None = None,
) -> Any:
    """dX of a 2-d convolution, in `data_layout`.

    Args:
        grad: dY, gradient of the convolution's result, in `grad_layout`.
        weight: W, in `kernel_layout`.
        data_shape: the full shape of X in `data_layout`: ints, symbolic extents, or a Relax shape expression; in
            Relay ints. With a stride s, s different extents of X give one of Y, so that it cannot be guessed.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see the module.
    """
    return _call(
        "conv2d_backward_data",
        grad,
        weight,
        data_shape=data_shape,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def conv3d_backward_weight(
    grad: Any,
    data: Any,
    *,
    kernel_size: Ints,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCDHW",
    data_layout: str = "NCDHW",
    kernel_layout: str = "OIDHW",
    out_dtype: str | None = None,
) -> Any:
    """dW of a 3-d convolution, in `kernel_layout`.

    Args:
        grad: dY, gradient of the convolution's result, in `grad_layout`.
        data: X, what the convolution took, in `data_layout`.
        kernel_size: extents of the kernel, (D, H, W); strides larger than 1 make them ambiguous otherwise.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see the module.
    """
    return _call(
        "conv3d_backward_weight",
        grad,
        data,
        kernel_size=kernel_size,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def conv3d_backward_data(
    grad: Any,
    weight: Any,
    *,
    data_shape: Any,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCDHW",
    data_layout: str = "NCDHW",
    kernel_layout: str = "OIDHW",
    out_dtype: str | None = None,
) -> Any:
    """dX of a 3-d convolution, in `data_layout`.

    Args:
        grad: dY, gradient of the convolution's result, in `grad_layout`.
        weight: W, in `kernel_layout`.
        data_shape: the full shape of X in `data_layout`: ints, symbolic extents, or a Relax shape expression; in
            Relay ints. With a stride s, s different extents of X give one of Y, so that it cannot be guessed.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see the module.
    """
    return _call(
        "conv3d_backward_data",
        grad,
        weight,
        data_shape=data_shape,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )


def convolution_backward(
    grad: Any,
    data: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None = None,
    stride: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    transposed: bool = False,
    output_padding: Ints = 0,
    groups: int = 1,
    output_mask: Sequence[bool] = (True, True, True),
    *,
    grad_layout: str | None = None,
    data_layout: str | None = None,
    kernel_layout: str | None = None,
) -> tuple[Any, Any, Any]:
    """Gradients of data, weight and bias of a convolution: aten::convolution_backward of PyTorch on Relax expressions.

    The rank is that of the tensors. The results are expressions to emit; on arrays: evaluate("convolution_backward").

    Args:
        grad: gradient of the convolution's result.
        data: what the convolution took.
        weight: (O, I / groups, …); of a transposed convolution (I, O / groups, …).
        bias_sizes: (O,), or None where there was no bias; its gradient does not depend on that. Not read if masked.
        stride, dilation: an int, or one an axis.
        padding: an int, one an axis, or another form of the operators; a transposed convolution takes no names.
        transposed: whether it was a transposed convolution.
        output_padding: of a transposed convolution; less than the stride or the dilation.
        groups: divides both channel counts.
        output_mask: which of the three are wanted.
        grad_layout, data_layout: permutations of NCW, NCHW or NCDHW; None is that order.
        kernel_layout: a permutation of OIW, OIHW or OIDHW; None is that order, and IO… of a transposed convolution.

    Returns:
        Three expressions, of the shape, layout and type of data, of weight, and of (O,) and weight's type; None where
        `output_mask` says False.

    Raises:
        ProblemError, DTypeError: the tensors do not belong to one convolution.
        UnsupportedError: an operand is no Relax expression, or its type is not known.
    """
    kind = _checked_kind("convolution_backward", grad, data, weight)
    if kind == "Relay":
        raise UnsupportedError(
            "convolution_backward: it makes Relax expressions; in Relay take conv{1,2,3}d_backward_data and _weight"
        )
    function = importlib.import_module("relax_ops.backward").convolution_backward
    result: tuple[Any, Any, Any] = function(
        {"grad": grad, "data": data, "weight": weight},
        bias_sizes=bias_sizes,
        stride=stride,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
        output_mask=output_mask,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    )
    return result
