# SPDX-License-Identifier: Apache-2.0
"""Layout rules of operators along axes: reductions, scans, arg max, log_softmax, repeat, take.

The stock rule of the reductions gives a scalar a layout that TVM takes for another one, and so transposes scalars.
"""

from __future__ import annotations

from relax_ops.layouts.algebra import initial, position, without
from relax_ops.layouts.site import Decision, Rule, Site, is_tensor, unconverted


def reduction(site: Site) -> Decision:
    """Sum, mean and the like over some axes, or all of them."""
    layout, ndim = site.tensor(0), len(site.initial(0))
    given = site.attrs.axis
    axes = range(ndim) if given is None else sorted({int(axis) % ndim for axis in given})
    output = layout if site.attrs.keepdims else without(layout, axes)
    return Decision([layout], output, site.changed_attrs(axis=sorted(position(layout, axis) for axis in axes)))


def along_axis(site: Site) -> Decision:
    """An operator along one axis that keeps the shape; without an axis it flattens."""
    if site.attrs.axis is None:
        return Decision([site.initial(0)], initial(int(site.call.ty.ndim)))
    layout = site.tensor(0)
    return Decision([layout], layout, site.changed_attrs(axis=position(layout, int(site.attrs.axis))))


def arg_extremum(site: Site) -> Decision:
    """Arg max or arg min along one axis; over all elements the index is one into the program's order."""
    if site.attrs.axis is None:
        return Decision([site.initial(0)], initial(int(site.call.ty.ndim)))
    layout = site.tensor(0)
    axis = int(site.attrs.axis) % len(layout)
    output = layout if site.attrs.keepdims else without(layout, [axis])
    return Decision([layout], output, site.changed_attrs(axis=position(layout, axis)))


def take(site: Site) -> Decision:
    """Elements along one axis at the places of a vector (or at one place, where the axis goes away)."""
    ndim = int(site.call.args[1].ty.ndim) if is_tensor(site.call.args[1].ty) else -1
    if site.attrs.axis is None or ndim not in (0, 1):
        return unconverted(site.call)
    layout = site.tensor(0)
    axis = int(site.attrs.axis) % len(layout)
    output = layout if ndim else without(layout, [axis])
    return Decision([layout, initial(ndim)], output, site.changed_attrs(axis=position(layout, axis)))


def repeat(site: Site) -> Decision:
    """Repeat along one axis; without one, stock repeats in the order of storage, which is another tensor."""
    return along_axis(site)


RULES: dict[str, Rule] = {
    **{f"relax.{name}": reduction for name in ("sum", "mean", "max", "min", "prod", "variance", "std")},
    **{f"relax.{name}": along_axis for name in ("cumsum", "cumprod", "nn.log_softmax", "nn.softmax")},
    "relax.argmax": arg_extremum,
    "relax.argmin": arg_extremum,
    "relax.repeat": repeat,
    "relax.take": take,
}
"""Layout rules by operator."""
