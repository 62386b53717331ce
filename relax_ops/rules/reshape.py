# SPDX-License-Identifier: Apache-2.0
"""Operators that give the same elements another shape: reshape, flatten, batch_flatten, expand_dims, squeeze.

A layout goes through wherever no element has to move; axes of extent 1 never matter. New axes are put where the layout
of the converted convolutions' data wants them, as the result will probably be added to or multiplied by feature maps.
The mapped axis may take in the axes before and behind it, or give them up (`MappedAxis.blocks`, `entries`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax
from tvm.relax import op

from legalize.builder import Extent
from relax_ops.expressions import known_extents, known_shape, ndim_of, same_extent
from relax_ops.gradients.common import no_grads, shape_of
from relax_ops.ir import AnalyzerProver
from relax_ops.layouts.algebra import (
    initial,
    reshape_groups,
    reshaped_order,
    same_order,
    storage_order,
    stored,
    with_units,
    without,
)
from relax_ops.layouts.site import Decision, Site
from relax_ops.rules.contract import OperatorRules, named
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, MappedAxis, Unknown


def reshaped(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y holds x's elements in the same order in another shape (reshape, flatten, batch_flatten): dx = dy reshaped."""
    x = orig_call.args[0]
    back = op.reshape(output_grad, relax.ShapeExpr(list(shape_of(x, str(orig_call.op.name)))))
    return [back, *no_grads(orig_call.args[1:])]


def squeeze_gradient(
    _orig_var: relax.Var, orig_call: relax.Call, output_grad: relax.Expr, _ctx: relax.BlockBuilder
) -> list[relax.Expr]:
    """y = x without axes of extent 1: dx = dy with these axes put back."""
    x = orig_call.args[0]
    shape = shape_of(x, "relax.squeeze")
    axes = _removed(shape, orig_call.attrs.axis)
    return [op.expand_dims(output_grad, axes) if axes else output_grad]


def _removed(shape: Sequence[Extent], given: Sequence[int] | None) -> list[int]:
    """The axes that a squeeze removes: those of one element; TVM leaves others among the given ones as they are."""
    if given is None:
        return [axis for axis, extent in enumerate(shape) if same_extent(extent, 1)]
    axes = sorted({int(axis) % len(shape) for axis in given})
    return [axis for axis in axes if not isinstance(shape[axis], int) or shape[axis] == 1]


def reshape_layout(site: Site) -> Decision:
    """Reshape: the new shape is given as it is stored."""
    shape, ndim = known_shape(site.call.ty), int(site.call.ty.ndim)
    order = _order(site)
    if shape is None or order is None:
        return Decision([site.initial(0), None], initial(ndim))
    output = _with_units(site, order, ndim)
    return Decision([site.tensor(0), None], output, None, {1: relax.ShapeExpr(stored(shape, output))})


def flatten_layout(site: Site) -> Decision:
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
    before, after = site.shape(0), known_shape(site.call.ty)
    groups = None if before is None or after is None else reshape_groups(before, after, same_extent)
    return None if groups is None else reshaped_order(site.tensor(0), groups)


def _with_units(site: Site, order: Sequence[int], ndim: int) -> str:
    candidates = [site.preferred(ndim), initial(ndim)]
    # A vector over the last axis is the mark of a program that is written in NHWC already.
    return with_units(order, ndim, candidates[::-1] if list(order) == [ndim - 1] else candidates)


def expand_dims_layout(site: Site) -> Decision:
    """The axes that the tensor has keep their order in storage; the new ones come where it suits."""
    layout, ndim = site.tensor(0), int(site.call.ty.ndim)
    new = sorted(int(axis) % ndim for axis in site.attrs.axis)
    old = [axis for axis in range(ndim) if axis not in new]
    order = [old[axis] for axis in storage_order(layout)]
    output = _with_units(site, order, ndim)
    return Decision([layout], output, site.changed_attrs(axis=[storage_order(output).index(axis) for axis in new]))


def squeeze_layout(site: Site) -> Decision:
    """The axes that stay keep their order in storage."""
    shape, ndim = site.shape(0), len(site.initial(0))
    if shape is None:
        if site.attrs.axis is None:
            return Decision([site.initial(0)], initial(int(site.call.ty.ndim)))
        gone = [int(axis) % ndim for axis in site.attrs.axis]
    else:
        gone = _removed(shape, site.attrs.axis)
    layout = site.tensor(0)
    axes = [storage_order(layout).index(axis) for axis in gone]
    return Decision([layout], without(layout, gone), site.changed_attrs(axis=axes))


def _quotient(extent: Extent, divisor: Extent) -> int:
    """How often a number is in another one, 0 where it is not a whole number of times, or not known."""
    if not isinstance(extent, int) or not isinstance(divisor, int) or divisor <= 0 or extent % divisor:
        return 0
    return extent // divisor


def reshape_axis(call: relax.Call, axes: Axes) -> MappedAxis | str:
    """A reshape of which one axis has the samples, with the entries of others before and behind them."""
    axis, prover = axes.first, AnalyzerProver()
    before, after = known_extents(call.args[0]), known_extents(call)
    outer, inner = math.prod(before[:axis]) * axes.blocks, axes.entries * math.prod(before[axis + 1 :])
    passed = 1
    for place, extent in enumerate(after):
        blocks = 1 if prover.equal(passed, outer) is True else _quotient(outer, passed)
        entries = _quotient(inner, math.prod(after[place + 1 :]))
        if blocks and entries:
            return MappedAxis(place, entries, blocks)
        # Where extents behind are symbolic, the samples are found only if they keep an axis of their own.
        is_known = all(isinstance(each, int) for each in (inner, *after[place + 1 :]))
        if not is_known and blocks == axes.each == 1 and prover.equal(extent, before[axis]):
            return MappedAxis(place)
        passed = passed * extent
    return Unknown("it merges the axis of the samples with others")


def expand_dims_axis(call: relax.Call, axes: Axes) -> int | str:
    """New axes of one element."""
    ndim = ndim_of(call)
    new = {int(a) % ndim for a in call.attrs.axis}
    return [place for place in range(ndim) if place not in new][axes.first]


def squeeze_axis(call: relax.Call, axes: Axes) -> int | str:
    """Axes of one element go away."""
    axis, shape = axes.first, known_extents(call.args[0])
    gone = _removed(shape, call.attrs.axis)
    return "it removes the axis of the samples" if axis in gone else axis - sum(other < axis for other in gone)


def reshape_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """The mapped axis stays in front; the shape of the result is known from one index."""
    return m.reshaped(args[0], known_extents(call))


def expand_dims_vmap(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """New axes, counted in the result."""
    ndim = m.own_ndim(args[0], True) + len(call.attrs.axis)
    return relax.op.expand_dims(args[0], [int(a) % ndim + 1 for a in call.attrs.axis])


_SUMS: dict[str, Any] = {"linear": ((0,),), "isometric": True}

RULES = (
    OperatorRules(
        named("reshape"),
        gradient=reshaped,
        layout=reshape_layout,
        mapped_axis=reshape_axis,
        vmap=reshape_vmap,
        **_SUMS,
    ),
    OperatorRules(
        named("flatten", "nn.batch_flatten"),
        gradient=reshaped,
        layout=flatten_layout,
        mapped_axis=reshape_axis,
        vmap=reshape_vmap,
        **_SUMS,
    ),
    OperatorRules(
        named("expand_dims"),
        layout=expand_dims_layout,
        mapped_axis=expand_dims_axis,
        vmap=expand_dims_vmap,
        **_SUMS,
    ),
    OperatorRules(
        named("squeeze"),
        gradient=squeeze_gradient,
        layout=squeeze_layout,
        mapped_axis=squeeze_axis,
        vmap=reshape_vmap,
        **_SUMS,
    ),
)
