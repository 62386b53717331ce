# SPDX-License-Identifier: Apache-2.0
"""permute_dims: a transpose of any axes."""

from __future__ import annotations

from tvm import relax

from relax_ops.expressions import axis_order
from relax_ops.layouts.algebra import initial, layout_of, relative, storage_order
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes


def permute_dims_layout(site: Site) -> Decision:
    """A transpose: nothing moves where the layouts differ by just this transpose; else the layout stays what it is."""
    layout, ndim = site.tensor(0), len(site.initial(0))
    axes = site.attrs.axes
    order = list(reversed(range(ndim))) if axes is None else [int(axis) % ndim for axis in axes]
    # Logical axis order[i] of the operand is axis i of the result.
    unmoved = layout_of(order.index(axis) for axis in storage_order(layout))
    # Followed by a transpose of its own, a layout is often back where the program, or the conversion, wants it.
    home = initial(ndim)
    absorbed = layout != unmoved and (unmoved == home or (layout == home and unmoved == site.preferred(ndim)))
    output = unmoved if absorbed else layout
    moves = relative(layout, layout_of(order[axis] for axis in storage_order(output)))
    return Decision([layout], output, site.changed_attrs(axes=storage_order(moves)))


def permute_dims_axis(call: relax.Call, axes: Axes) -> int | str:
    """The mapped axis goes to its place in the order of axes."""
    return axis_order(call).index(axes.first)


def permute_dims_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """The mapped axis stays in front."""
    return relax.op.permute_dims(args[0], [0, *(place + 1 for place in axis_order(call))])


RULES = (
    OperatorRules(
        named("permute_dims"),
        layout=permute_dims_layout,
        mapped_axis=permute_dims_axis,
        vmap=permute_dims_vmap,
        linear=((0,),),
        isometric=True,
    ),
)
