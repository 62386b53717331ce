# SPDX-License-Identifier: Apache-2.0
"""Layout rules that several operators share, for those which TVM carries layouts through not at all, or wrongly.

The stock rule of binary operators takes the first operand's layout, so that a (1, C, 1, 1) parameter transposes the
feature map that is added to it. Here the operand that is not broadcast decides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from legalize.builder import Extent
from relax_ops.expressions import known_shape, same_extent
from relax_ops.layouts.algebra import initial, position, trailing
from relax_ops.layouts.site import Decision, Layout, Site, is_tensor


def unary_layout(site: Site) -> Decision:
    """The result is stored as the first operand is; further operands are scalars."""
    layout = site.tensor(0)
    rest = [initial(int(arg.ty.ndim)) if is_tensor(arg.ty) else None for arg in site.call.args[1:]]
    return Decision([layout, *rest], layout)


def broadcast_layout(site: Site) -> Decision:
    """Operands that broadcast against each other: all follow the one that decides, see `_deciding`."""
    args = site.call.args
    tensors = [i for i, arg in enumerate(args) if is_tensor(arg.ty)]
    ndim = max(int(args[i].ty.ndim) for i in tensors)
    layout = _deciding(site, [i for i in tensors if int(args[i].ty.ndim) == ndim], ndim)
    inputs = _operands(site, tensors, layout)
    if inputs is None:
        # An operand with fewer axes does not line up with the last axes as they are stored.
        layout = initial(ndim)
        inputs = _operands(site, tensors, layout)
        assert inputs is not None
    return Decision([inputs.get(i) for i in range(len(args))], layout)


def _operands(site: Site, tensors: Sequence[int], layout: str) -> dict[int, Layout] | None:
    found: dict[int, Layout] = {}
    for i in tensors:
        ndim = int(site.call.args[i].ty.ndim)
        if ndim == len(layout):
            found[i] = layout
        elif _long_axes(site.shape(i), ndim) == 0:
            found[i] = site.tensor(i)
        else:
            own = trailing(layout, ndim)
            if own is None:
                return None
            found[i] = own
    return found


def _deciding(site: Site, candidates: Sequence[int], ndim: int) -> str:
    """The layout that costs least: that of the operands which hold as many elements as the result.

    Where these differ, it is the program's own layout: in practice parameters are added to their gradients there, and
    what becomes of the sum is a parameter. Vectors may be stored anyhow, so they take the layout of feature maps.
    """
    layouts = {i: site.tensor(i) for i in candidates}
    result = known_shape(site.call.ty)
    size = {i: _long_axes(site.shape(i), ndim) for i in candidates}
    most = max(size.values()) if result is None else max(_long_axes(result, ndim), max(size.values()))
    largest = [i for i in candidates if size[i] == most] or [i for i in candidates if size[i] == max(size.values())]
    if len({layouts[i] for i in largest}) == 1:
        return layouts[largest[0]]
    if most <= 1:
        return site.preferred(ndim)
    return initial(ndim) if initial(ndim) in (layouts[i] for i in largest) else layouts[largest[0]]


def _long_axes(shape: Sequence[Extent] | None, ndim: int) -> int:
    """How many axes have an extent other than 1."""
    return ndim if shape is None else sum(not same_extent(extent, 1) for extent in shape)


def along_axis_layout(site: Site) -> Decision:
    """An operator along one axis that keeps the shape; without an axis it flattens."""
    if site.attrs.axis is None:
        return Decision([site.initial(0)], initial(int(site.call.ty.ndim)))
    layout = site.tensor(0)
    return Decision([layout], layout, site.changed_attrs(axis=position(layout, int(site.attrs.axis))))


def most_common(layouts: list[Any]) -> str:
    """The layout that most tensors have; where as many have another one, not the program's own."""
    counts = Counter(str(layout) for layout in layouts)
    return max(counts, key=lambda layout: (counts[layout], layout != initial(len(layout))))
