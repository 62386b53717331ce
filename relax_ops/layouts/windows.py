# SPDX-License-Identifier: Apache-2.0
"""Layout rules of gradients of pools, resampling, padding, and operators that put tensors together along an axis."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relax_ops.layouts.algebra import axes_of, initial, layout_of, position, stored
from relax_ops.layouts.site import Decision, Rule, Site, unconverted


def pool_backward(site: Site) -> Decision:
    """(grad, data) of a pool, both stored as the gradient is, since that is the younger of the two."""
    layout = site.tensor(0)
    names = "".join(stored(str(site.attrs.layout), layout))
    changes: dict[str, Any] = {"layout": names}
    if hasattr(site.attrs, "out_layout"):
        changes["out_layout"] = names
        # Stock gives a tie to the element that is stored first: another one where W comes before H.
        tied = "max" in site.name and names.index("W") < names.index("H")
        if tied or str(site.attrs.out_layout) not in ("", str(site.attrs.layout)):
            return unconverted(site.call)
    return Decision([layout, layout], layout, site.changed_attrs(**changes))


def resize2d(site: Site) -> Decision:
    """Resampling, which TVM lowers in NCHW and NHWC only; the stock rule takes any layout."""
    layout = site.tensor(0)
    names = "".join(stored(str(site.attrs.layout), layout))
    if names not in ("NCHW", "NHWC"):
        layout, names = site.initial(0), str(site.attrs.layout)
    return Decision([layout, None], layout, site.changed_attrs(layout=names))


def pad(site: Site) -> Decision:
    """Padding: widths, two for each axis, go with the axes."""
    layout = site.tensor(0)
    widths = [int(width) for width in site.attrs.pad_width]
    pairs = stored(list(zip(widths[::2], widths[1::2], strict=True)), layout)
    return Decision([layout], layout, site.changed_attrs(pad_width=[width for pair in pairs for width in pair]))


def slice_scatter(site: Site) -> Decision:
    """Writing a slice: the slice is stored as the tensor is."""
    layout = site.tensor(0)
    axis = position(layout, int(site.attrs.axis))
    return Decision([layout, layout, None, None, None], layout, site.changed_attrs(axis=axis))


def concat(site: Site) -> Decision:
    """The layout that most of the tensors have; where as many have another one, not the program's own."""
    layouts = site.layout(site.call.args[0])
    assert isinstance(layouts, list)
    layout = _most(layouts)
    axis = 0 if site.attrs.axis is None else int(site.attrs.axis)
    return Decision([[layout] * len(layouts)], layout, site.changed_attrs(axis=position(layout, axis)))


def stack(site: Site) -> Decision:
    """The new axis comes first in storage, the others as they are. (Stock names it by a letter that is no axis.)"""
    layouts = site.layout(site.call.args[0])
    assert isinstance(layouts, list)
    layout = _most(layouts)
    axis = int(site.attrs.axis or 0) % (len(layout) + 1)
    if layout == initial(len(layout)):
        return Decision([[layout] * len(layouts)], initial(len(layout) + 1))
    moved = [old + (old >= axis) for old in axes_of(layout)]
    return Decision([[layout] * len(layouts)], layout_of([axis, *moved]), site.changed_attrs(axis=0))


def _most(layouts: list[Any]) -> str:
    counts = Counter(str(layout) for layout in layouts)
    return max(counts, key=lambda layout: (counts[layout], layout != initial(len(layout))))


RULES: dict[str, Rule] = {
    "relax.grad.max_pool2d_backward": pool_backward,
    "relax.grad.avg_pool2d_backward": pool_backward,
    "relax.nn.max_pool_backward": pool_backward,
    "relax.nn.avg_pool_backward": pool_backward,
    "relax.image.resize2d": resize2d,
    "relax.nn.pad": pad,
    "relax.slice_scatter": slice_scatter,
    "relax.concat": concat,
    "relax.stack": stack,
}
"""Layout rules by operator."""
