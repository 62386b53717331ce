# SPDX-License-Identifier: Apache-2.0
"""layout_transform between orders of letters, with or without packed axes such as NCHW4c."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.importer.context import Context, extent_product
from tvm_convgrad.importer.shapes import layout_parts
from tvm_convgrad.importer.table import op


@op(
    "layout_transform",
    attributes="LayoutTransformAttrs",
    note="extents of packed axes must be divisible by their block",
)
def _layout_transform(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    source, target = layout_parts(attrs.src_layout), layout_parts(attrs.dst_layout)
    letters = [name for name, _ in target if name.isupper()]
    if sorted(letters) != sorted(name for name, _ in source if name.isupper()):
        raise ModelError(f"{attrs.src_layout} and {attrs.dst_layout} have other axes")
    shape = context.shape(args[0])
    if len(shape) != len(source):
        raise ModelError(f"{len(shape)} axes do not fit {attrs.src_layout}")
    places = {name: place for place, (name, _) in enumerate(source)}
    for (name, factor), extent in zip(source, shape, strict=True):
        if factor and extent != factor:
            raise ModelError(f"{factor}{name} does not fit the extent {extent}")
    order = [[places[name] for name in (letter, letter.lower()) if name in places] for letter in letters]
    value = context.permute(args[0], [place for group in order for place in group])
    plain = [extent_product([shape[place] for place in group]) for group in order]
    value = context.reshape(value, plain)

    factors = {name.upper(): factor for name, factor in target if factor}
    split: list[Any] = []
    names: list[str] = []
    for letter, extent in zip(letters, plain, strict=True):
        factor = factors.get(letter, 0)
        if factor and (not isinstance(extent, int) or extent % factor):
            raise ModelError(f"{extent} along {letter} does not divide by {factor}")
        split += [extent // factor, factor] if factor else [extent]
        names += [letter, letter.lower()] if factor else [letter]
    value = context.reshape(value, split)
    return context.permute(value, [names.index(name) for name, _ in target])
