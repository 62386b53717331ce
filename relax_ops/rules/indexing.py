# SPDX-License-Identifier: Apache-2.0
"""Operators whose second operand holds indices: take, and one_hot, which undoes it."""

from __future__ import annotations

from tvm import relax

from relax_ops.expressions import ndim_of
from relax_ops.layouts.algebra import initial, position, without
from relax_ops.layouts.site import Decision, Site, is_tensor, unconverted
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.mapped_axis import Axes


def take_layout(site: Site) -> Decision:
    """Elements along one axis at the places of a vector (or at one place, where the axis goes away)."""
    ndim = int(site.call.args[1].ty.ndim) if is_tensor(site.call.args[1].ty) else -1
    if site.attrs.axis is None or ndim not in (0, 1):
        return unconverted(site.call)
    layout = site.tensor(0)
    axis = int(site.attrs.axis) % len(layout)
    output = layout if ndim else without(layout, [axis])
    return Decision([layout, initial(ndim)], output, site.changed_attrs(axis=position(layout, axis)))


def take_axis(call: relax.Call, axes: Axes) -> int | str:
    """Elements of another axis at places that are the same for all samples."""
    if axes[0] is None or axes[1] is not None or call.attrs.axis is None:
        return "its places depend on the sample"
    axis, along = axes[0], int(call.attrs.axis) % ndim_of(call.args[0])
    if along == axis:
        return "it selects samples"
    return axis + (ndim_of(call.args[1]) - 1 if along < axis else 0)


def one_hot_axis(call: relax.Call, axes: Axes) -> int | str:
    """A new axis of classes."""
    axis, along = axes.first, int(call.attrs.axis) % ndim_of(call)
    return axis + (along <= axis)


RULES = (
    OperatorRules(named("take"), layout=take_layout, mapped_axis=take_axis),
    OperatorRules(named("one_hot"), mapped_axis=one_hot_axis),
)
