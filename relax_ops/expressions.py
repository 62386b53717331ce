# SPDX-License-Identifier: Apache-2.0
"""Questions about Relax expressions that rules of every kind have: number of axes, extents, attributes with changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from legalize.builder import Extent
from relax_ops.compat import arithmetic
from relax_ops.ir import shape_values


def ndim_of(expr: relax.Expr) -> int:
    """Number of axes of a tensor."""
    return int(expr.ty.ndim)


def known_shape(ty: relax.TensorType) -> tuple[Extent, ...] | None:
    """Extents of a tensor type, ints where constant; None if they are not known."""
    return None if ty.shape is None else shape_values(ty.shape)


def known_extents(expr: relax.Expr) -> tuple[Extent, ...]:
    """Extents of a tensor expression whose shape is known, as all are in models and their gradients."""
    shape = known_shape(expr.ty)
    assert shape is not None, f"the shape of {expr} is not known"
    return shape


def same_extent(a: Extent, b: Extent) -> bool:
    """Whether two extents are provably equal."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return bool(arithmetic.Analyzer().can_prove_equal(a, b))


def same_shape(a: Sequence[Extent], b: Sequence[Extent]) -> bool:
    """Whether two shapes are provably equal."""
    return len(a) == len(b) and all(map(same_extent, a, b))


def axes_of(axes: Any, ndim: int) -> list[int]:
    """The axes that an attribute names, all of them for None, counted from the front, in order."""
    if axes is None:
        return list(range(ndim))
    items = [axes] if isinstance(axes, (int, tvm.tirx.IntImm)) else list(axes)
    return sorted({int(a) % ndim for a in items}) if ndim else []


def axis_order(call: relax.Call) -> list[int]:
    """The order of axes of a permute_dims, counted from the front; the reverse one if its attribute is None."""
    ndim = ndim_of(call)
    if call.attrs.axes is None:
        return list(reversed(range(ndim)))
    return [int(axis) % ndim for axis in call.attrs.axes]


def changed_attributes(attrs: tvm.ir.Attrs, **changes: Any) -> tvm.ir.Attrs:
    """Attributes of a stock operator with other values; the same object without changes."""
    if not changes:
        return attrs
    info = type(attrs).__tvm_ffi_type_info__
    values = {field.name: getattr(attrs, field.name) for field in info.fields}
    return tvm.ir.make_node(str(info.type_key), **{**values, **changes})
