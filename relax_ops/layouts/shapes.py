# SPDX-License-Identifier: Apache-2.0
"""Layout rules of operators that change the shape: reshape, flatten, expand_dims, squeeze, broadcast_to, permute_dims.

A reshape goes through a layout wherever no element has to move; axes of extent 1 never matter. New axes are put where
the layout of the converted convolutions' data wants them, as the result will probably meet feature maps.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from relax_ops.layouts.algebra import (
    axes_of,
    initial,
    layout_of,
    relative,
    reshape_groups,
    reshaped_order,
    same_order,
    stored,
    with_units,
    without,
)
from relax_ops.layouts.site import Decision, Rule, Site, equal, shape_of


def reshape(site: Site) -> Decision:
    """Reshape: the new shape is given as it is stored."""
    shape, ndim = shape_of(site.call.ty), int(site.call.ty.ndim)
    order = _order(site)
    if shape is None or order is None:
        return Decision([site.initial(0), None], initial(ndim))
    output = _with_units(site, order, ndim)
    return Decision([site.tensor(0), None], output, None, {1: relax.ShapeExpr(stored(shape, output))})


def flatten(site: Site) -> Decision:
    """A reshape whose result shape follows from the operand: same rules, no argument to change."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    order = _order(site)
    # batch_flatten keeps the first axis that it sees.
    fits = site.name != "relax.nn.batch_flatten" or layout.startswith("A")
    if order is None or not fits or not same_order(order, initial(ndim)):
        return Decision([site.initial(0)], initial(ndim))
    return Decision([layout], initial(ndim))


def _order(site: Site) -> list[int] | None:
    """In which order the operand, as it is stored, holds the result's axes; None if elements have to move."""
    before, after = site.shape(0), shape_of(site.call.ty)
    groups = None if before is None or after is None else reshape_groups(before, after, equal)
    return None if groups is None else reshaped_order(site.tensor(0), groups)


def _with_units(site: Site, order: Sequence[int], ndim: int) -> str:
    candidates = [site.preferred(ndim), initial(ndim)]
    # A vector over the last axis is the mark of a program that is written in NHWC already.
    return with_units(order, ndim, candidates[::-1] if list(order) == [ndim - 1] else candidates)


def expand_dims(site: Site) -> Decision:
    """The axes that the tensor has keep their order in storage; the new ones come where it suits."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    new = sorted(int(axis) % ndim for axis in site.attrs.axis)
    old = [axis for axis in range(ndim) if axis not in new]
    order = [old[axis] for axis in axes_of(layout)]
    output = _with_units(site, order, ndim)
    return Decision([layout], output, site.changed_attrs(axis=[axes_of(output).index(axis) for axis in new]))


def squeeze(site: Site) -> Decision:
    """The axes that stay keep their order in storage."""
    shape, ndim = site.shape(0), len(site.initial(0))
    if site.attrs.axis is None:
        if shape is None:
            return Decision([site.initial(0)], initial(int(site.call.ty.ndim)))
        gone = [axis for axis, extent in enumerate(shape) if equal(extent, 1)]
    else:
        gone = [int(axis) % ndim for axis in site.attrs.axis]
    layout = site.tensor(0)
    axes = [axes_of(layout).index(axis) for axis in gone]
    return Decision([layout], without(layout, gone), site.changed_attrs(axis=axes))


def broadcast_to(site: Site) -> Decision:
    """To more elements along the same axes: stored alike. A scalar becomes what feature maps are."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    shape = shape_of(site.call.ty)
    before = site.shape(0)
    if shape is None or before is None:
        return Decision([site.initial(0), None], initial(ndim))
    if all(equal(extent, 1) for extent in before) and len(layout) < ndim:
        output = site.preferred(ndim)
    elif len(layout) == ndim:
        output = layout
    else:
        layout, output = site.initial(0), initial(ndim)
    return Decision([layout, None], output, None, {1: relax.ShapeExpr(stored(shape, output))})


def collapse_sum_to(site: Site) -> Decision:
    """Sums over axes: stored alike if no axis goes away."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    shape = shape_of(site.call.ty)
    if shape is None or len(layout) != ndim:
        return Decision([site.initial(0), None], initial(ndim))
    return Decision([layout, None], layout, None, {1: relax.ShapeExpr(stored(shape, layout))})


def collapse_sum_like(site: Site) -> Decision:
    """As collapse_sum_to; the second operand is stored as the first one is."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    if len(layout) != ndim:
        return Decision([site.initial(0), site.initial(1)], initial(ndim))
    return Decision([layout, layout], layout)


def permute_dims(site: Site) -> Decision:
    """A transpose: nothing moves where the layouts differ by just this transpose; else the layout stays what it is."""
    layout, ndim = site.tensor(0), len(site.initial(0))
    axes = site.attrs.axes
    order = list(reversed(range(ndim))) if axes is None else [int(axis) % ndim for axis in axes]
    # Logical axis order[i] of the operand is axis i of the result.
    unmoved = layout_of(order.index(axis) for axis in axes_of(layout))
    # Followed by a transpose of its own, a layout is often back where the program, or the conversion, wants it.
    home = initial(ndim)
    absorbed = layout != unmoved and (unmoved == home or (layout == home and unmoved == site.preferred(ndim)))
    output = unmoved if absorbed else layout
    moves = relative(layout, layout_of(order[axis] for axis in axes_of(output)))
    return Decision([layout], output, site.changed_attrs(axes=axes_of(moves)))


RULES: dict[str, Rule] = {
    "relax.reshape": reshape,
    "relax.flatten": flatten,
    "relax.nn.batch_flatten": flatten,
    "relax.expand_dims": expand_dims,
    "relax.squeeze": squeeze,
    "relax.broadcast_to": broadcast_to,
    "relax.collapse_sum_to": collapse_sum_to,
    "relax.collapse_sum_like": collapse_sum_like,
    "relax.permute_dims": permute_dims,
}
"""Layout rules by operator."""
