# SPDX-License-Identifier: Apache-2.0
"""Layout rules of the stock operators of a training step that have none, so that ConvertLayout goes through.

An `_infer` function gets the layouts of the operands before (`old`) and after conversion (`new`, None on the first
call) and returns those that the operator wants. An undefined layout ends the conversion at that operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relay, te
from tvm.relay.transform.infer_layout_utils import InferCorrectLayoutOutput

UNDEFINED = "__undef__"
Layouts = Sequence["tvm.tir.Layout | None"]
InferRule = Callable[[tvm.ir.Attrs, "Layouts | None", Layouts, Sequence[relay.Type]], InferCorrectLayoutOutput]
ConvertRule = Callable[[tvm.ir.Attrs, Sequence[relay.Expr], Sequence[te.Tensor], Sequence[str]], relay.Expr]


def stock_infer_rules() -> dict[str, InferRule]:
    """FInferCorrectLayout of the stock operators for which TVM registers none."""
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    return {
        name: rule
        for name, rule in RULES.items()
        if name in known and tvm.ir.Op.get(name).get_attr("FInferCorrectLayout") is None
    }


def stock_convert_rules() -> dict[str, ConvertRule]:
    """FTVMConvertOpLayout of the stock convolution for which TVM registers none, nn.conv1d."""
    op = tvm.ir.Op.get("nn.conv1d")
    return {} if op.get_attr("FTVMConvertOpLayout") is not None else {"nn.conv1d": _convert_conv1d}


def _convert_conv1d(
    attrs: tvm.ir.Attrs, inputs: Sequence[relay.Expr], tensors: Sequence[te.Tensor], desired: Sequence[str]
) -> relay.Expr:
    """The convolution in the desired layouts; "default" of the weight is what TVM's conv1d of that layout takes."""
    data, weight = (str(layout) for layout in (*desired, "default")[:2])
    weight = {"NCW": "OIW", "NWC": "WIO"}.get(data, weight) if weight == "default" else weight
    values = _fields(attrs) | {"data_layout": data, "kernel_layout": weight, "out_layout": ""}
    converted = tvm.ir.make_node("relay.attrs.Conv1DAttrs", **values)
    return relay.Call(tvm.ir.Op.get("nn.conv1d"), list(inputs), converted)


def _fields(attrs: tvm.ir.Attrs) -> dict[str, Any]:
    return {str(field.name): attrs[field.name] for field in attrs.list_field_info()}


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


def _infer_stretched(value: int) -> InferRule:
    def infer(
        attrs: tvm.ir.Attrs, new: Layouts | None, old: Layouts, types: Sequence[relay.Type]
    ) -> InferCorrectLayoutOutput:
        """The layout of the other operand, which an operand of the same rank has as well."""
        rank, like = len(types[value].shape), 1 - value
        name = _name((new or old)[like]) if rank in (0, len(types[like].shape)) else ""
        layout = tvm.tir.layout(name or UNDEFINED)
        # A scalar's layout is any one that stays the same: TVM has no defined layout of rank 0.
        layouts = [layout if rank else tvm.tir.layout("N")] * 2
        layouts[like] = layout
        return InferCorrectLayoutOutput(layouts, [layout], attrs)

    return infer


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
        values = _fields(attrs) | {"layout": chosen}
        return InferCorrectLayoutOutput([layout] * 2, [layout], tvm.ir.make_node(attrs_type, **values))

    return infer


RULES: dict[str, InferRule] = {
    "where": _infer_where,
    "broadcast_to_like": _infer_stretched(value=0),
    "full_like": _infer_stretched(value=1),
    "nn.bias_add": _infer_bias_add,
    "nn.max_pool2d_grad": _infer_pool_grad("relay.attrs.MaxPool2DAttrs"),
    "nn.avg_pool2d_grad": _infer_pool_grad("relay.attrs.AvgPool2DAttrs"),
}
"""By operator."""
