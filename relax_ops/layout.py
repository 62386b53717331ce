# SPDX-License-Identifier: Apache-2.0
"""Layout rules (FRelaxInferLayout) of the six operators, and the table of all layout rules of this package.

In the argument of relax.transform.ConvertLayout an entry of ours reads as one of a stock convolution does:

    {"relax.nn.conv2d": ["NHWC", "OHWI"],
     "relax.nn.conv2d_backward_weight": ["NHWC", "OHWI"],
     "relax.nn.conv2d_backward_data": ["NHWC", "OHWI"]}

First the layout of the data and of grad (for backward_data the result is the data), then that of the kernel (for
backward_weight the result); an optional third one is grad's, if it differs from the data's, as the third of a stock
convolution is its result's. An operator without entry reads its operands as they are stored: backward_data then gives
its result the order of axes that grad has, backward_weight leaves the kernel as the program writes it.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

import relax_ops.layouts
from relax_ops.attrs import ATTRS
from relax_ops.ir import PREFIX, entry_of, shape_values
from relax_ops.layouts.algebra import initial, relative, stored
from relax_ops.layouts.site import RULE, Decision, Rule, Site, layout_rule, unconverted
from tvm_convgrad.catalogue import BACKWARD_DATA, NEW_OPS, OpEntry
from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.geometry import check_layout

_NAMES = {"grad": "grad_layout", "data": "data_layout", "weight": "kernel_layout"}


def family_rule(site: Site) -> Decision:
    """The rule of all six operators.

    Raises:
        UnsupportedError: the wanted layouts are too few or too many, or packed.
        ProblemError: they are no permutations of the tensors' axes.
    """
    entry = entry_of(site.call)
    face = entry.face
    names = {tensor: str(getattr(site.attrs, attribute)) for tensor, attribute in _NAMES.items()}
    wanted = _wanted(site, entry)
    if wanted is None:
        layouts = {face.operands[0]: site.tensor(0), face.operands[1]: site.tensor(1)}
        layouts[face.result] = layouts["grad"] if face is BACKWARD_DATA else initial(entry.rank + 2)
    else:
        layouts = {tensor: relative(names[tensor], wanted[tensor]) for tensor in names}
    arguments = {}
    if face is BACKWARD_DATA:
        shape = shape_values(site.call.args[2])
        if shape is None:
            return unconverted(site.call)
        arguments[2] = relax.ShapeExpr(stored(shape, layouts["data"]))
    attrs = {name: getattr(site.attrs, name) for name in entry.attributes}
    attrs.update({_NAMES[tensor]: "".join(stored(names[tensor], layouts[tensor])) for tensor in names})
    inputs = [layouts[operand] for operand in face.operands]
    return Decision(inputs, layouts[face.result], ATTRS[face.name](**attrs), arguments)


def _wanted(site: Site, entry: OpEntry) -> dict[str, str] | None:
    entries = site.desired.get(site.name)
    if entries is None:
        return None
    if len(entries) not in (2, 3):
        raise UnsupportedError(
            f"ConvertLayout: {site.name} wants 2 or 3 layouts (data, kernel, and grad if it differs), "
            f"but {len(entries)} are given: {', '.join(entries)}"
        )
    data, kernel, grad = entries[0], entries[1], entries[-1] if len(entries) == 3 else entries[0]
    for layout, kind in ((data, "data"), (kernel, "kernel"), (grad, "data")):
        if len(layout) != entry.rank + 2:
            raise UnsupportedError(
                f"ConvertLayout: {site.name} has no packed layouts, but {kind} layout {layout!r} is wanted; "
                f"give a permutation of its {entry.rank + 2} axes"
            )
        check_layout(layout, entry.rank, kind, f"ConvertLayout: {kind} layout of {site.name}")
    return {"data": data, "weight": kernel, "grad": grad}


def _stock_operators() -> dict[str, Callable[..., Any]]:
    """The rules of relax_ops.layouts for the operators that this TVM has."""
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    rules: dict[str, Callable[..., Any]] = {}
    for module in sorted(module.name for module in pkgutil.iter_modules(relax_ops.layouts.__path__)):
        table: dict[str, Rule] = getattr(importlib.import_module(f"relax_ops.layouts.{module}"), "RULES", {})
        for name in table.keys() & known:
            rules[name] = layout_rule(table[name], tvm.ir.Op.get(name).get_attr(RULE))
    return rules


LAYOUT_RULES: dict[str, Callable[..., Any]] = {
    **{PREFIX + entry.name: layout_rule(family_rule) for entry in NEW_OPS},
    **_stock_operators(),
}
"""FRelaxInferLayout by operator; import this module when the operators of gradients are declared."""
