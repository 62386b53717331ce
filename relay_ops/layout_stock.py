# SPDX-License-Identifier: Apache-2.0
"""FInferCorrectLayout of the stock operators of a training step that have none, so that ConvertLayout goes through.

A function here gets the layouts of the operands before (`old`) and after conversion (`new`, None on the first call) and
returns those that the operator wants. An undefined layout ends the conversion at that operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relay
from tvm.relay.transform.infer_layout_utils import InferCorrectLayoutOutput

UNDEFINED = "__undef__"
Layouts = Sequence["tvm.tir.Layout | None"]
InferRule = Callable[[tvm.ir.Attrs, "Layouts | None", Layouts, Sequence[relay.Type]], InferCorrectLayoutOutput]


def stock_infer_rules() -> dict[str, InferRule]:
    """FInferCorrectLayout of the stock operators for which TVM registers none."""
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    return {
        name: rule
        for name, rule in RULES.items()
        if name in known and tvm.ir.Op.get(name).get_attr("FInferCorrectLayout") is None
    }


def _name(layout: tvm.tir.Layout | None) -> str:
    """A layout's letters; empty if it is undefined or packed, as NCHW16c."""
    return str(layout.name) if layout is not None and str(layout.name).isupper() else ""


def _layout_of_all(new: Layouts | None, old: Layouts) -> str:
    """The layout of operands that share one: one that was converted if there is any, else the first that is known."""
    changed = [after for after, before in zip(new or (), old, strict=False) if _name(after) != _name(before)]
    return next((_name(layout) for layout in (*changed, *(new or ()), *old) if _name(layout)), "")


def _infer_where(
    attrs: tvm.ir.Attrs, new: Layouts | None, old: Layouts, types: Sequence[relay.Type]
) -> InferCorrectLayoutOutput:
    """One layout for all three operands, if no operand is broadcast."""
    equal = all(tvm.ir.structural_equal(ty.shape, types[0].shape) for ty in types)
    layout = tvm.tir.layout((_layout_of_all(new, old) if equal else "") or UNDEFINED)
    return InferCorrectLayoutOutput([layout] * len(old), [layout], attrs)


def _infer_bias_add(
    attrs: tvm.ir.Attrs, new: Layouts | None, old: Layouts, types: Sequence[relay.Type]
) -> InferCorrectLayoutOutput:
    """The data's layout; the axis is that of the same letter."""
    before = _name(old[0])
    after = _name(new[0]) if new else before
    if not before or not after:
        none = tvm.tir.layout(UNDEFINED)
        return InferCorrectLayoutOutput([none, none], [none], attrs)
    letter = before[int(attrs.axis)]
    layout = tvm.tir.layout(after)
    moved = tvm.ir.make_node("relay.attrs.BiasAddAttrs", axis=after.index(letter))
    return InferCorrectLayoutOutput([layout, tvm.tir.layout(letter)], [layout], moved)


def _infer_pool_grad(attrs_type: str) -> InferRule:
    def infer(
        attrs: tvm.ir.Attrs, new: Layouts | None, old: Layouts, types: Sequence[relay.Type]
    ) -> InferCorrectLayoutOutput:
        """The layout of the gradient and of the pooled data, which is an attribute."""
        own = str(attrs.layout)
        chosen = _layout_of_all(new, [tvm.tir.layout(own)] * 2) if new else own
        if sorted(chosen) != sorted(own):
            chosen = own
        layout = tvm.tir.layout(chosen)
        values: dict[str, Any] = {str(field.name): attrs[field.name] for field in attrs.list_field_info()}
        return InferCorrectLayoutOutput(
            [layout] * 2, [layout], tvm.ir.make_node(attrs_type, **values | {"layout": chosen})
        )

    return infer


RULES: dict[str, InferRule] = {
    "where": _infer_where,
    "nn.bias_add": _infer_bias_add,
    "nn.max_pool2d_grad": _infer_pool_grad("relay.attrs.MaxPool2DAttrs"),
    "nn.avg_pool2d_grad": _infer_pool_grad("relay.attrs.AvgPool2DAttrs"),
}
"""By operator."""
