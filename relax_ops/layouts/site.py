# SPDX-License-Identifier: Apache-2.0
"""Input and output of layout rules: `Site` and `Decision`, and their translation to TVM's FRelaxInferLayout.

ConvertLayout walks a dataflow block once, forwards. At each call it applies the operator's rule, which gives the
layouts that the operands must have and that the result will have, transposes operands that are stored otherwise, and
replaces attributes and non-tensor arguments. A rule sees nothing of what comes later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import tvm
import tvm_ffi
from tvm import relax

from legalize.builder import Extent
from relax_ops.expressions import changed_attributes, known_shape
from relax_ops.layouts.algebra import initial, is_plain, relative
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of

Layout: TypeAlias = "str | list[Layout]"


@tvm_ffi.register_object("relax.transform.LayoutDecision")
class LayoutDecision(tvm_ffi.Object):
    """TVM's layout of one tensor."""


@tvm_ffi.register_object("relax.transform.InferLayoutOutput")
class InferLayoutOutput(tvm_ffi.Object):
    """TVM's result of a layout rule."""


@dataclass(frozen=True)
class Decision:
    """The result of a rule.

    Attributes:
        inputs: layouts of the leading arguments; None for one that is not a tensor. Arguments beyond stay.
        output: layout of the result, a list for a tuple.
        attrs: attributes of the converted call; None leaves them.
        arguments: replacements of non-tensor arguments by position.
    """

    inputs: Sequence[Layout | None]
    output: Layout
    attrs: tvm.ir.Attrs = None
    arguments: Mapping[int, Any] = field(default_factory=dict)


class Site:
    """One call that ConvertLayout has come to."""

    def __init__(self, call: relax.Call, desired: Any, layouts: Any) -> None:
        self.call = call
        self.attrs = call.attrs
        self.desired: dict[str, list[str]] = {str(k): [str(v) for v in values] for k, values in desired.items()}
        self._layouts = layouts

    @property
    def name(self) -> str:
        """The operator's name."""
        return str(self.call.op.name)

    def layout(self, argument: relax.Expr) -> Layout:
        """The layout that an argument is stored in now, a list for a tuple."""
        if isinstance(argument, relax.Tuple):
            return [self.layout(item) for item in argument.fields]
        if isinstance(argument, relax.Var) and argument in self._layouts:
            return _text(self._layouts[argument])
        return initial_layout(argument.ty)

    def tensor(self, index: int) -> str:
        """The layout of argument `index`, which is a tensor."""
        layout = self.layout(self.call.args[index])
        assert isinstance(layout, str), f"{self.name}: argument {index} is a tuple"
        return layout

    def initial(self, index: int) -> str:
        """The layout in which the program writes argument `index`, a tensor."""
        return initial(int(self.call.args[index].ty.ndim))

    def shape(self, index: int) -> tuple[Extent, ...] | None:
        """Extents of argument `index` in the program's order, None if they are not known."""
        return known_shape(self.call.args[index].ty)

    def preferred(self, ndim: int) -> str:
        """The layout to give a tensor that can as well be made in any: that of the converted convolutions' data.

        The program's own convolutions are taken to be written in NCHW; if they are not, nothing is wrong but the
        number of transforms.
        """
        rank = ndim - 2
        if rank not in SPATIAL:
            return initial(ndim)
        names = data_layout_of(rank)
        for suffix in ("", "_backward_data", "_backward_weight", "_transpose"):
            wanted = self.desired.get(f"relax.nn.conv{rank}d{suffix}")
            if wanted and sorted(wanted[0]) == sorted(names):
                return relative(names, wanted[0])
        return initial(ndim)

    def all_plain(self) -> bool:
        """Whether no argument is stored in a packed layout."""
        return all(_plain(self.layout(arg)) for arg in self.call.args if is_tensor(arg.ty))

    def changed_attrs(self, **changes: Any) -> Any:
        """The call's attributes with other values."""
        return changed_attributes(self.attrs, **changes)


Rule = Callable[[Site], Decision]

LayoutFunction: TypeAlias = Callable[[relax.Call, object, object], object]
"""TVM's FRelaxInferLayout: function(call, desired layouts, layouts of variables) -> InferLayoutOutput."""


def layout_rule(rule: Rule, stock: LayoutFunction | None) -> LayoutFunction:
    """A rule as FRelaxInferLayout.

    Packed layouts, which our rules do not cover, are left to the stock rule, if there is one, else are transformed
    back before the call.
    """

    def infer_layout(call: relax.Call, desired: object, layouts: object) -> object:
        site = Site(call, desired, layouts)
        if not site.all_plain():
            if stock is not None:
                return stock(call, desired, layouts)
            return _output(call, unconverted(call))
        return _output(call, rule(site))

    infer_layout.__name__ = getattr(rule, "__name__", "infer_layout")
    infer_layout.__doc__ = rule.__doc__
    return infer_layout


def stored_as_written(call: relax.Call, _desired: object, _layouts: object) -> object:
    """FRelaxInferLayout of an operator without a rule: operands and result in the layouts that the program writes."""
    return _output(call, unconverted(call))


def unconverted(call: relax.Call) -> Decision:
    """The decision to compute a call as the program writes it."""
    inputs = [initial_layout(arg.ty) if is_tensor(arg.ty) else None for arg in call.args]
    return Decision(inputs, initial_layout(call.ty))


def is_tensor(ty: relax.Type) -> bool:
    """Whether a type is a tensor or a tuple of such."""
    if isinstance(ty, relax.TupleType):
        return all(is_tensor(item) for item in ty.fields)
    return isinstance(ty, relax.TensorType)


def initial_layout(ty: relax.Type) -> Layout:
    """The layout in which a program writes a value of this type."""
    if isinstance(ty, relax.TupleType):
        return [initial_layout(item) for item in ty.fields]
    return initial(int(ty.ndim))


def _plain(layout: Layout) -> bool:
    return is_plain(layout) if isinstance(layout, str) else all(_plain(item) for item in layout)


def _text(nested: Any) -> Layout:
    if isinstance(nested, LayoutDecision):
        name = "" if nested.layout is None else str(nested.layout.name)
        return "" if name == "__undef__" else name
    return [_text(item) for item in nested]


def _decision(layout: Layout | None) -> Any:
    if layout is None:
        return LayoutDecision(None, True)
    if isinstance(layout, str):
        # slayout("") is TVM's undefined layout, which is not the layout of rank 0.
        value = tvm.s_tir.slayout(layout, "int64") if layout else tvm.ir.make_node("s_tir.SLayout", name="", axes=[])
        return LayoutDecision(value, False)
    return [_decision(item) for item in layout]


def _output(call: relax.Call, decision: Decision) -> relax.Expr:
    arguments = {tvm.tirx.IntImm("int32", index): value for index, value in decision.arguments.items()}
    return InferLayoutOutput(
        [_decision(layout) for layout in decision.inputs],
        [_decision(decision.output)],
        call.attrs if decision.attrs is None else decision.attrs,
        arguments,
    )
