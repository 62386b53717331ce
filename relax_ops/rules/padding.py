# SPDX-License-Identifier: Apache-2.0
"""nn.pad in its four modes: the border's gradient is dropped, or folded back to where it was taken from."""

from __future__ import annotations

from tvm import relax
from tvm.relax import op

from legalize.builder import Extent
from relax_ops.gradients.common import shape_of, slice_axis
from relax_ops.layouts.algebra import stored
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes
from tvm_convgrad.core.errors import ProblemError, UnsupportedError

_MODES = ("constant", "reflect", "replicate", "circular")


def pad_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x with a border: dx = the inner part of dy, plus each border element's gradient where its value came from.

    Raises:
        UnsupportedError: another mode, or widths below zero in a mode that copies.
        ProblemError: a border that copies more than the axis holds; the stock forward reads outside of it.
    """
    x, attrs = orig_call.args[0], orig_call.attrs
    mode = str(attrs.pad_mode)
    if mode not in _MODES:
        raise UnsupportedError(f"relax.nn.pad: pad_mode {mode!r} has no gradient; the modes are {', '.join(_MODES)}")
    widths = [int(w) for w in attrs.pad_width]
    grad = output_grad
    for axis, extent in enumerate(shape_of(x, "relax.nn.pad")):
        before, after = widths[2 * axis : 2 * axis + 2]
        if before == 0 and after == 0:
            continue
        _check(mode, axis, extent, before, after)
        low = slice_axis(ctx, grad, axis, 0, before) if before > 0 else None
        high = slice_axis(ctx, grad, axis, before + extent, before + extent + after) if after > 0 else None
        grad = slice_axis(ctx, grad, axis, max(before, 0), max(before, 0) + extent + min(before, 0) + min(after, 0))
        if before < 0 or after < 0:
            # A negative width crops: what was cropped has no gradient.
            rest = [0] * len(widths)
            rest[2 * axis], rest[2 * axis + 1] = max(-before, 0), max(-after, 0)
            grad = ctx.emit(op.nn.pad(grad, rest))
        if mode == "constant":
            continue
        if low is not None:
            grad = _fold(ctx, mode, grad, low, axis, extent, low_side=True)
        if high is not None:
            grad = _fold(ctx, mode, grad, high, axis, extent, low_side=False)
    return [grad]


def _check(mode: str, axis: int, extent: Extent, before: int, after: int) -> None:
    if mode == "constant":
        return
    if before < 0 or after < 0:
        raise UnsupportedError(
            f"relax.nn.pad: pad_width ({before}, {after}) on axis {axis} is negative, which {mode} mode does not have; "
            f"crop with strided_slice"
        )
    limit = {"reflect": 1, "circular": 0}.get(mode)
    if limit is not None and isinstance(extent, int) and max(before, after) > extent - limit:
        raise ProblemError(
            f"relax.nn.pad: pad_width ({before}, {after}) on axis {axis} must be at most {extent - limit} in {mode} "
            f"mode, as the axis has {extent} elements"
        )


def _fold(
    ctx: relax.BlockBuilder,
    mode: str,
    grad: relax.Expr,
    border: relax.Expr,
    axis: int,
    extent: Extent,
    *,
    low_side: bool,
) -> relax.Expr:
    """`grad` of extent `extent` plus the border's gradient at the places whose values the border repeats."""
    width = shape_of(ctx.normalize(border))[axis]
    if mode == "replicate":
        border = ctx.emit(op.sum(border, axis=[axis], keepdims=True))
        start, width = (0 if low_side else extent - 1), 1
    elif mode == "circular":
        start = extent - width if low_side else 0
    else:
        border = ctx.emit(op.flip(border, axis))
        start = 1 if low_side else extent - 1 - width
    parts = [
        slice_axis(ctx, grad, axis, 0, start),
        ctx.emit(op.add(slice_axis(ctx, grad, axis, start, start + width), border)),
        slice_axis(ctx, grad, axis, start + width, extent),
    ]
    kept = [part for part in parts if not _empty(part, axis)]
    return ctx.emit(op.concat(kept, axis)) if len(kept) > 1 else kept[0]


def _empty(part: relax.Expr, axis: int) -> bool:
    extent = shape_of(part)[axis]
    return isinstance(extent, int) and extent == 0


def pad_layout(site: Site) -> Decision:
    """Padding: widths, two for each axis, go with the axes."""
    layout = site.tensor(0)
    widths = [int(width) for width in site.attrs.pad_width]
    pairs = stored(list(zip(widths[::2], widths[1::2], strict=True)), layout)
    return Decision([layout], layout, site.changed_attrs(pad_width=[width for pair in pairs for width in pair]))


def pad_axis(call: relax.Call, axes: Axes) -> int | str:
    """A border along other axes."""
    axis = axes.first
    return "it pads the samples" if any(int(w) for w in call.attrs.pad_width[2 * axis : 2 * axis + 2]) else axis


def pad_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """A border around the tensor of each index."""
    return m.call(call, args, pad_width=[0, 0, *(int(w) for w in call.attrs.pad_width)])


def _has_no_other_values(call: relax.Call) -> bool:
    return str(call.attrs.pad_mode) != "constant" or float(call.attrs.pad_value) == 0


RULES = (
    OperatorRules(
        named("nn.pad"),
        gradient=pad_gradient,
        layout=pad_layout,
        mapped_axis=pad_axis,
        vmap=pad_vmap,
        linear=((0,),),
        linear_if=_has_no_other_values,
    ),
)
