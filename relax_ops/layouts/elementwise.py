# SPDX-License-Identifier: Apache-2.0
"""Layout rules of element-wise operators: those without a stock rule, and all that broadcast.

The stock rule of binary operators takes the first operand's layout, so that a (1, C, 1, 1) parameter transposes the
feature map that it meets. Here the operand that is not broadcast decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_ops.layouts.algebra import initial, trailing
from relax_ops.layouts.site import Decision, Layout, Rule, Site, equal, is_tensor, shape_of

_BINARY = (
    *("add", "subtract", "multiply", "divide", "floor_divide", "mod", "floor_mod", "power", "atan2"),
    *("maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal"),
    *("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor"),
    *("left_shift", "right_shift", "logaddexp"),
)
_UNARY = (
    *("clip", "zeros_like", "ones_like", "full_like", "nn.leakyrelu", "nn.softplus"),
    *("grad.no_grad", "grad.start_checkpoint", "grad.end_checkpoint"),
)


def unary(site: Site) -> Decision:
    """The result is stored as the first operand is; further operands are scalars."""
    layout = site.tensor(0)
    rest = [initial(int(arg.ty.ndim)) if is_tensor(arg.ty) else None for arg in site.call.args[1:]]
    return Decision([layout, *rest], layout)


def broadcast(site: Site) -> Decision:
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

    Where these differ, it is the program's own layout: in practice parameters meet their gradients there, and what
    becomes of the sum is a parameter. Vectors may be stored anyhow, so they take the layout of feature maps.
    """
    layouts = {i: site.tensor(i) for i in candidates}
    result = shape_of(site.call.ty)
    size = {i: _long_axes(site.shape(i), ndim) for i in candidates}
    most = max(size.values()) if result is None else max(_long_axes(result, ndim), max(size.values()))
    largest = [i for i in candidates if size[i] == most] or [i for i in candidates if size[i] == max(size.values())]
    if len({layouts[i] for i in largest}) == 1:
        return layouts[largest[0]]
    if most <= 1:
        return site.preferred(ndim)
    return initial(ndim) if initial(ndim) in (layouts[i] for i in largest) else layouts[largest[0]]


def _long_axes(shape: Sequence[Any] | None, ndim: int) -> int:
    """How many axes have an extent other than 1."""
    return ndim if shape is None else sum(not equal(extent, 1) for extent in shape)


RULES: dict[str, Rule] = {
    **{f"relax.{name}": broadcast for name in _BINARY},
    "relax.where": broadcast,
    **{f"relax.{name}": unary for name in _UNARY},
}
"""Layout rules by operator."""
