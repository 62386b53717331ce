# SPDX-License-Identifier: Apache-2.0
"""image.resize2d; its gradient for nearest_neighbor and linear, all coordinate transformation modes, any extents.

Both methods are linear maps along each axis, one after the other. With constant extents their matrices are computed
here, in float32 by the formulas of the forward operator; with symbolic ones the forward operator itself is applied to
a unit matrix when the program runs. Cubic interpolation is refused.
"""

from __future__ import annotations

import numpy as np
import tvm
from numpy.typing import NDArray
from tvm import relax
from tvm.relax import op

from legalize.builder import Extent
from relax_ops.expressions import same_extent
from relax_ops.gradients.common import cast, dtype_of, no_grads, shape_of
from relax_ops.gradients.separable import apply_transposed, identity, multiply_transposed
from relax_ops.layouts.algebra import stored
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.common import window, window_axis
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.errors import UnsupportedError

_METHODS = ("nearest_neighbor", "linear")
_MODES = (
    "half_pixel",
    "align_corners",
    "asymmetric",
    "pytorch_half_pixel",
    "tf_half_pixel_for_nn",
    "tf_crop_and_resize",
)
_ROUNDINGS = ("", "round", "round_prefer_floor", "round_prefer_ceil", "floor", "ceil")


def resize2d_gradient(
    orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """Y = A_h·X·A_wᵀ: dX = A_hᵀ·dY·A_w.

    Raises:
        UnsupportedError: cubic, an unknown mode or rounding, or a packed layout.
    """
    x, attrs = orig_call.args[0], orig_call.attrs
    layout = str(attrs.layout)
    _check(attrs, layout)
    source, result = shape_of(x, "relax.image.resize2d"), shape_of(orig_var, "relax.image.resize2d")
    grad = cast(output_grad, wide_dtype(dtype_of(x)), ctx)
    for letter in "HW":
        axis = layout.index(letter)
        have, want = source[axis], result[axis]
        if isinstance(have, int) and isinstance(want, int):
            start, end = _region(attrs, letter)
            matrix = resize_matrix(
                have,
                want,
                str(attrs.method),
                str(attrs.coordinate_transformation_mode),
                str(attrs.rounding_method),
                start,
                end,
            )
            grad = apply_transposed(ctx, grad, axis, matrix)
        elif same_extent(have, want) and str(attrs.coordinate_transformation_mode) not in (
            "tf_crop_and_resize",
            "tf_half_pixel_for_nn",
        ):
            continue
        else:
            grad = multiply_transposed(ctx, grad, axis, _probe(ctx, x, axis, want, attrs, letter))
    return [cast(grad, dtype_of(x), ctx), *no_grads(orig_call.args[1:])]


def _check(attrs: tvm.ir.Attrs, layout: str) -> None:
    for name, value, served in (
        ("method", str(attrs.method), _METHODS),
        ("coordinate_transformation_mode", str(attrs.coordinate_transformation_mode), _MODES),
        ("rounding_method", str(attrs.rounding_method), _ROUNDINGS),
    ):
        if value not in served:
            raise UnsupportedError(
                f"relax.image.resize2d: {name} {value!r} has no gradient; use one of "
                f"{', '.join(repr(s) for s in served)}"
            )
    if sorted(layout) != sorted("NCHW"):
        raise UnsupportedError(
            f"relax.image.resize2d: layout {layout!r} has no gradient; use NCHW or NHWC, and convert afterwards with "
            f"relax.transform.ConvertLayout"
        )


def _region(attrs: tvm.ir.Attrs, letter: str) -> tuple[float, float]:
    roi = [float(value) for value in attrs.roi] or [0.0] * 4
    return (roi[0], roi[2]) if letter == "H" else (roi[1], roi[3])


def resize_matrix(
    source: int, result: int, method: str, mode: str, rounding: str, start: float, end: float
) -> NDArray[np.float64]:
    """A with Y = A·X along one axis, of shape (result, source).

    The formulas are those of tvm.topi.image.resize in float32: coordinate, adjacent places clamped to the border, rows
    outside of the image 0 for tf_crop_and_resize (the extrapolation value is a constant).
    """
    f = np.float32
    place = np.arange(result, dtype=f)
    scale = f(source / result)
    if mode in ("half_pixel", "pytorch_half_pixel"):
        at = (place + f(0.5)) * scale - f(0.5)
        if mode == "pytorch_half_pixel" and result == 1:
            at = np.zeros(1, f)
    elif mode == "align_corners":
        at = f((source - 1) / (result - 1)) * place if result > 1 else np.zeros(1, f)
    elif mode == "asymmetric":
        at = scale * place
    elif mode == "tf_half_pixel_for_nn":
        at = (place + f(0.5)) * scale
    elif result > 1:
        at = f(start * (source - 1)) + place * f(end - start) * f(source - 1) / f(result - 1)
    else:
        at = np.full(1, 0.5 * (start + end) * (source - 1), f)
    matrix = np.zeros((result, source))
    rows = np.arange(result)
    if method == "linear":
        low = np.floor(at)
        share = (at - low).astype(f)
        for offset, weight in ((0, f(1) - share), (1, share)):
            np.add.at(matrix, (rows, np.clip(low.astype("int64") + offset, 0, source - 1)), weight)
    else:
        if not rounding:
            rounding = "round" if mode == "align_corners" else "floor"
        nearest = {
            "round": lambda: np.rint(at),
            "round_prefer_floor": lambda: np.ceil(at - f(0.5)),
            "round_prefer_ceil": lambda: np.floor(at + f(0.5)),
            "floor": lambda: np.floor(at + f(1e-5)),
            "ceil": lambda: np.ceil(at - f(1e-5)),
        }[rounding]()
        matrix[rows, np.clip(nearest.astype("int64"), 0, source - 1)] = 1
    if mode == "tf_crop_and_resize":
        matrix[(at < 0) | (at > source - 1)] = 0
    return matrix


def _probe(
    ctx: relax.BlockBuilder, x: relax.Expr, axis: int, want: Extent, attrs: tvm.ir.Attrs, letter: str
) -> relax.Expr:
    """A along one axis, of shape (result, source): the forward operator applied to the unit matrix.

    The unit matrix lies in the channels and H of an image two wide, whose width stays two, so that no division by
    (width − 1) = 0 arises; its region of interest is the whole width.
    """
    unit = identity(ctx, x, axis)
    extent = shape_of(x)[axis]
    image = ctx.emit(op.reshape(unit, relax.ShapeExpr([1, extent, extent, 1])))
    image = ctx.emit(op.concat([image, image], 3))
    start, end = _region(attrs, letter)
    resized = ctx.emit(
        op.image.resize2d(
            image,
            (want, 2),
            roi=(start, 0.0, end, 1.0),
            layout="NCHW",
            method=str(attrs.method),
            coordinate_transformation_mode=str(attrs.coordinate_transformation_mode),
            rounding_method=str(attrs.rounding_method),
        )
    )
    column = ctx.emit(op.strided_slice(resized, axes=[3], begin=[0], end=[1], assume_inbound=True))
    return ctx.emit(op.permute_dims(ctx.emit(op.squeeze(column, [0, 3])), [1, 0]))


def resize2d_layout(site: Site) -> Decision:
    """Resampling, which TVM lowers in NCHW and NHWC only; the stock rule takes any layout."""
    layout = site.tensor(0)
    names = "".join(stored(str(site.attrs.layout), layout))
    if names not in ("NCHW", "NHWC"):
        layout, names = site.initial(0), str(site.attrs.layout)
    return Decision([layout, None], layout, site.changed_attrs(layout=names))


RULES = (
    OperatorRules(
        named("image.resize2d"),
        gradient=resize2d_gradient,
        layout=resize2d_layout,
        mapped_axis=window_axis,
        vmap=window,
    ),
)
