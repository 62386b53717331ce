# SPDX-License-Identifier: Apache-2.0
"""The operators conv{1,2,3}d_backward_weight and conv{1,2,3}d_backward_data as functions on Relax or Relay expressions.

`convolution_backward` returns all three gradients of a convolution, with the arguments of PyTorch's operator. Each
function creates a call expression. Attributes are checked immediately, the operands when the type of the call is
inferred.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from tvm_convgrad.core.arguments import Ints, Padding
from tvm_convgrad.core.catalogue import BY_NAME
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, Size, data_layout_of, kernel_layout_of
from tvm_convgrad.graph_ir import checked_ir

if TYPE_CHECKING:
    from tvm import relax, relay

Expr: TypeAlias = "relax.Expr | relay.Expr"
"""An expression of the IR that the TVM in use has."""

ShapeLike: TypeAlias = "Sequence[Size] | relax.Expr"
"""Ints or symbolic extents, or a Relax shape expression."""

Gradients: TypeAlias = "tuple[Expr | None, Expr | None, Expr | None]"
"""Of data, weight and bias; None where masked."""

F = TypeVar("F", bound=Callable[..., Any])

_LETTERS = """
Letters: N batch, C channels of X, O channels of Y, I = C / groups, {axes} spatial axes. n, o and i count samples,
output channels and the input channels of a group, g = o // (O / groups) is the group; k, y and x are positions in
kernel, Y and X. The tensors' axes have the order of the layouts. An extent of Y is
(X + low + high - dilation * (kernel - 1) - 1) // stride + 1, where low and high are the padding of the axis.
"""

_BACKWARD_WEIGHT = """
It is the transpose of the forward convolution (oneDNN's developer guide, "Convolution"; cuDNN calls it backward
filter) with respect to W, where X is 0 outside of its extents:

    Y[n, o, y]  = sum over i, k of  X[n, g * I + i, y * strides + k * dilation - low] * W[o, i, k]
    dW[o, i, k] = sum over n, y of  dY[n, o, y] * X[n, g * I + i, y * strides + k * dilation - low]
{letters}
Args:
    grad: dY, the gradient of the convolution's result: a tensor (N, O, {axes}).
    data: X, the data of the convolution: a tensor (N, C, {axes}).
    kernel_size: extents of the kernel, ({axes}), or one int for all axes. It is required because with strides above 1
        several kernel sizes fit the same operands.
{common}
Returns:
    dW, a call of type `out_dtype` and shape (O, I, {axes}) in `kernel_layout`.
{raises}
Example:
    >>> from tvm import relax
    >>> from tvm_convgrad import op
    >>> grad = relax.Var("grad", relax.TensorType({y}, "float32"))
    >>> data = relax.Var("data", relax.TensorType({x}, "float32"))
    >>> dw = op.conv{rank}d_backward_weight(grad, data, kernel_size=3, strides=2, padding=1)
    >>> print(relax.BlockBuilder().normalize(dw).ty)
    R.Tensor({w}, dtype="float32")
"""

_BACKWARD_DATA = """
It is the transpose of the forward convolution (oneDNN's developer guide, "Convolution"; cuDNN's backward data) with
respect to X; a transposed convolution computes the same:

    Y[n, o, y]          = sum over i, k of  X[n, g * I + i, y * strides + k * dilation - low] * W[o, i, k]
    dX[n, g * I + i, x] = sum over o of group g, and k, y with y * strides + k * dilation - low = x, of
                          dY[n, o, y] * W[o, i, k]
{letters}
Args:
    grad: dY, the gradient of the convolution's result: a tensor (N, O, {axes}).
    weight: W: a tensor (O, I, {axes}).
    data_shape: the whole shape of X in `data_layout`, batch and channels included: ints, symbolic extents, or a Relax
        shape expression; in Relay ints. With a stride s, s different extents of X give the same extent of Y.
{common}
Returns:
    dX, a call of type `out_dtype` and shape `data_shape`.
{raises}
Example:
    >>> from tvm import relax
    >>> from tvm_convgrad import op
    >>> grad = relax.Var("grad", relax.TensorType({y}, "float32"))
    >>> weight = relax.Var("weight", relax.TensorType({w}, "float32"))
    >>> dx = op.conv{rank}d_backward_data(grad, weight, data_shape={x}, strides=2, padding=1)
    >>> print(relax.BlockBuilder().normalize(dx).ty)
    R.Tensor({x}, dtype="float32")
"""

_COMMON = """\
    strides: of the convolution, one int for all axes, or one per axis ({axes}); at least 1.
    padding: zeros around X, not negative: an int; one int per axis; all lows, then all highs (in 2-d top, left, bottom,
        right); pairs (low, high), one per axis; "SAME" (TensorFlow's formula) or "VALID" (none).
    dilation: distance between the kernel's elements in X, in the form of `strides`; 1 is a dense kernel.
    groups: number of groups; it divides C and O. Output channels depend on the input channels of their group only.
    grad_layout: the order of the axes of dY, a permutation of {data_layout}.
    data_layout: the order of the axes of X and dX, a permutation of {data_layout}.
    kernel_layout: the order of the axes of W and dW, a permutation of {kernel_layout}.
    out_dtype: element type of the result: float16, bfloat16, float32 or float64. None means that of the operands; if
        these differ, float64 if one of them is float64, else float32. Products are summed in float32, or in float64 if
        an operand is float64.
"""

_RAISES = """
Raises:
    ProblemError: an attribute is invalid, or operands and attributes do not belong to one convolution.
    DTypeError: an element type is not float16, bfloat16, float32 or float64.
    UnsupportedError: an operand is not a Relax (or Relay) expression. For numpy arrays use `tvm_convgrad.evaluate`.
    SetupError: the installed TVM has neither Relax nor Relay in a supported version.
"""


def _documented(rank: int) -> Callable[[F], F]:
    """Complete the docstring of an operator of this rank: shapes, formula, arguments, result, errors, an example."""
    words = {
        "rank": rank,
        "axes": ", ".join(SPATIAL[rank]),
        "data_layout": data_layout_of(rank),
        "kernel_layout": kernel_layout_of(rank),
        "x": (2, 4, *[7, 8, 9][:rank]),
        "w": (6, 4, *[3] * rank),
        "y": (2, 6, *[4, 4, 5][:rank]),
    }

    def complete(function: F) -> F:
        template = _BACKWARD_WEIGHT if function.__name__.endswith("weight") else _BACKWARD_DATA
        shared = {"letters": _LETTERS.format(**words), "common": _COMMON.format(**words), "raises": _RAISES}
        function.__doc__ = f"{function.__doc__}\n{template.format(**words, **shared)}"
        return function

    return complete


@_documented(1)
def conv1d_backward_weight(
    grad: Expr,
    data: Expr,
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
) -> Expr:
    """Gradient of a 1-d convolution with respect to its weight (wgrad), as an expression."""
    return _call("conv1d_backward_weight", **locals())


@_documented(1)
def conv1d_backward_data(
    grad: Expr,
    weight: Expr,
    *,
    data_shape: ShapeLike,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCW",
    data_layout: str = "NCW",
    kernel_layout: str = "OIW",
    out_dtype: str | None = None,
) -> Expr:
    """Gradient of a 1-d convolution with respect to its data (dgrad), as an expression."""
    return _call("conv1d_backward_data", **locals())


@_documented(2)
def conv2d_backward_weight(
    grad: Expr,
    data: Expr,
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
) -> Expr:
    """Gradient of a 2-d convolution with respect to its weight (wgrad), as an expression."""
    return _call("conv2d_backward_weight", **locals())


@_documented(2)
def conv2d_backward_data(
    grad: Expr,
    weight: Expr,
    *,
    data_shape: ShapeLike,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCHW",
    data_layout: str = "NCHW",
    kernel_layout: str = "OIHW",
    out_dtype: str | None = None,
) -> Expr:
    """Gradient of a 2-d convolution with respect to its data (dgrad), as an expression."""
    return _call("conv2d_backward_data", **locals())


@_documented(3)
def conv3d_backward_weight(
    grad: Expr,
    data: Expr,
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
) -> Expr:
    """Gradient of a 3-d convolution with respect to its weight (wgrad), as an expression."""
    return _call("conv3d_backward_weight", **locals())


@_documented(3)
def conv3d_backward_data(
    grad: Expr,
    weight: Expr,
    *,
    data_shape: ShapeLike,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str = "NCDHW",
    data_layout: str = "NCDHW",
    kernel_layout: str = "OIDHW",
    out_dtype: str | None = None,
) -> Expr:
    """Gradient of a 3-d convolution with respect to its data (dgrad), as an expression."""
    return _call("conv3d_backward_data", **locals())


def convolution_backward(
    grad: Expr,
    data: Expr,
    weight: Expr,
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
) -> Gradients:
    """Gradients of a convolution's data, weight and bias as Relax expressions: PyTorch's aten::convolution_backward.

    The rank, 1 to 3, follows from the tensors. For Y = conv(X, W) + b the gradients are

        dX = dgrad(dY, W)    dW = wgrad(dY, X)    db[o] = sum over n, y of  dY[n, o, y]

    For a transposed convolution, which is a dgrad, dX is the forward convolution of dY, and dW is a wgrad with
    exchanged operands (aten/src/ATen/native/Convolution.cpp). 16-bit floats are summed in float32.

    Letters: N batch, C channels of X, O channels of Y, and spatial axes D, H, W.

    Args:
        grad: dY, the gradient of the convolution's result: (N, O, ...).
        data: X, the data of the convolution: (N, C, ...).
        weight: W: (O, C / groups, ...); for a transposed convolution (C, O / groups, ...).
        bias_sizes: (O,), the shape of the bias, or None. It is only checked: the bias gradient does not depend on it.
        stride: of the convolution, one int, or one per axis.
        padding: an int, one per axis, all lows then all highs, pairs (low, high), or, if `transposed` is False, "SAME"
            or "VALID".
        dilation: distance between the kernel's elements, in the form of `stride`; 1 is a dense kernel.
        transposed: whether the convolution is a transposed one.
        output_padding: of a transposed convolution, per axis less than the stride or the dilation.
        groups: number of groups; it divides both channel counts.
        output_mask: whether to compute the gradients of data, weight and bias.
        grad_layout: the order of the axes of grad, a permutation of NCW, NCHW or NCDHW; None means that order.
        data_layout: the order of the axes of data, likewise.
        kernel_layout: the order of the axes of weight, a permutation of OIW, OIHW or OIDHW. None means that order, or
            IOW, IOHW or IODHW for a transposed convolution.

    Returns:
        The gradients of data, weight and bias, None where `output_mask` is False. The first two have the shape, layout
        and type of their tensor, the third has the shape (O,) and the type of weight. They are not bound to variables:
        emit each one.

    Raises:
        ProblemError: the tensors and arguments do not belong to one convolution.
        DTypeError: an element type is not float16, bfloat16, float32 or float64.
        UnsupportedError: an operand is not a Relax expression, or its shape or type is unknown. For numpy arrays use
            `tvm_convgrad.evaluate("convolution_backward", ...)`.

    Example:
        >>> from tvm import relax
        >>> import tvm_convgrad
        >>> grad = relax.Var("grad", relax.TensorType((2, 6, 4, 4), "float32"))
        >>> data = relax.Var("data", relax.TensorType((2, 4, 7, 8), "float32"))
        >>> weight = relax.Var("weight", relax.TensorType((6, 4, 3, 3), "float32"))
        >>> gradients = tvm_convgrad.convolution_backward(grad, data, weight, (6,), stride=2, padding=1)
        >>> for gradient in gradients:
        ...     print(relax.BlockBuilder().normalize(gradient).ty)
        R.Tensor((2, 4, 7, 8), dtype="float32")
        R.Tensor((6, 4, 3, 3), dtype="float32")
        R.Tensor((6,), dtype="float32")
    """
    if checked_ir("convolution_backward", grad, data, weight) == "Relay":
        raise UnsupportedError(
            "convolution_backward: it makes Relax expressions; in Relay take conv{1,2,3}d_backward_data and _weight"
        )
    function = importlib.import_module("relax_ops.backward").convolution_backward
    result: Gradients = function(
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


def _call(name: str, grad: Expr, **arguments: Any) -> Expr:
    """A call of an operator of either IR, from the arguments of its function here."""
    entry = BY_NAME[name]
    second = arguments.pop(entry.direction.operands[1])
    binding = checked_ir(name, grad, second).lower()
    return importlib.import_module(f"{binding}_ops.ops").make_call(entry, grad, second, **arguments)
