# SPDX-License-Identifier: Apache-2.0
"""The six operators in Relay: registration, type relation, and the Python function that makes their calls.

nn.conv2d_backward_weight is upstream's: it keeps its registration and its attributes, and gets the catalogue's type
relation, which covers every layout and grouping. The other five are new.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relay

from relay_ops.ir import PREFIX, RelayProver, call_of, infer, spec_of, tensor_type
from tvm_convgrad.core.arguments import integers, make_attributes, missing, problem_of_call
from tvm_convgrad.core.catalogue import BACKWARD_DATA, NEW_OPS, OpEntry
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.type_relation import infer_backward_data, infer_backward_weight

LEVEL = 15
"""Above upstream's level of 10, so that what is registered here wins."""

MOST_KNOWN = 4096
"""Results of one operator's type relation that are kept at a time."""


def register_ops() -> None:
    """Declare the five new operators, and give all six their type relation."""
    known = {str(name) for name in tvm.ir.Op.list_op_names()}
    for entry in NEW_OPS:
        name = PREFIX + entry.name
        is_new = name not in known
        if is_new:
            relay.op.op.register(name, f"{entry.direction.result}'s gradient of a {entry.rank}-d convolution")
        op = tvm.ir.Op.get(name)
        if is_new:
            op.set_num_inputs(2)
            for operand in entry.direction.operands:
                op.add_argument(operand, "Tensor", f"The {operand} of the convolution.")
            op.set_support_level(2)
            kind = "Transpose" if entry.direction is BACKWARD_DATA else ""
            op.set_attrs_type_key(f"relay.attrs.Conv{entry.rank}D{kind}Attrs")
            relay.op.op.register_stateful(name, False, LEVEL)
        op.add_type_rel(f"tvm_convgrad.{entry.name}", _relation(entry))


def make_call(
    entry: OpEntry,
    first: relay.Expr,
    second: relay.Expr,
    *,
    data_shape: Sequence[int] | None = None,
    **attributes: Any,
) -> relay.Call:
    """A call to one of the six operators; the operands' types must be known (variables, constants, inferred ones).

    Args:
        entry: the catalogue's entry.
        first, second: the operands, Relay expressions.
        data_shape: dgrad only: full shape of the data in `data_layout`, ints.
        attributes: kernel_size, strides, padding, dilation, groups, layouts, out_dtype: see tvm_convgrad.op.

    Raises:
        ProblemError, DTypeError: an argument or operand breaks a rule.
        UnsupportedError: the type of an operand is not known, or an extent is not a number.
    """
    specs = {}
    for name, operand in zip(entry.direction.operands, (first, second), strict=True):
        spec = spec_of(type_of(operand), name, entry.name)
        if spec is None or not all(isinstance(e, int) for e in spec.shape or ()):
            raise UnsupportedError(
                f"{entry.name}: the shape of {name} is not known; run relay.transform.InferType first, or give its "
                f"variable a static type"
            )
        specs[name] = spec
    shapes = {name: spec.shape or () for name, spec in specs.items()}
    if entry.direction is BACKWARD_DATA:
        if data_shape is None:
            raise missing(entry, "data_shape")
        shapes["data"] = integers(data_shape)
    checked = make_attributes(
        entry, data_shape=lambda: shapes["data"], weight_shape=lambda: shapes["weight"], **attributes
    )
    if entry.direction is BACKWARD_DATA:
        infer_backward_data(checked, specs["grad"], specs["weight"], shapes["data"], RelayProver())
    else:
        infer_backward_weight(checked, specs["grad"], specs["data"], RelayProver())
    dtypes = {name: str(spec.dtype) for name, spec in specs.items()}
    return call_of(entry.direction, problem_of_call(entry.direction, checked, shapes, dtypes), first, second)


def _relation(entry: OpEntry) -> Callable[[Sequence[relay.Type], tvm.ir.Attrs], relay.TensorType | None]:
    """The type relation that Relay calls with the operands' types and the attributes; None is "not yet".

    Passes infer types again and again, so results are kept by the structure of what they follow from.
    """
    known: dict[int, list[tuple[tvm.ir.Attrs, list[relay.Type], relay.TensorType]]] = {}

    def relation(types: Sequence[relay.Type], attrs: tvm.ir.Attrs) -> relay.TensorType | None:
        operands = list(types)[: len(entry.direction.operands)]
        if attrs is None or not all(isinstance(operand, relay.TensorType) for operand in operands):
            result = infer(entry, attrs, operands)
            return None if result is None else tensor_type(result)
        key = hash((tvm.ir.structural_hash(attrs), *map(tvm.ir.structural_hash, operands)))
        found = known.get(key, [])
        for same_attrs, same_operands, result_type in found:
            if tvm.ir.structural_equal(attrs, same_attrs) and all(
                map(tvm.ir.structural_equal, operands, same_operands)
            ):
                return result_type
        result = infer(entry, attrs, operands)
        if result is None:
            return None
        if len(known) >= MOST_KNOWN:
            known.clear()
        known[key] = [*found, (attrs, operands, tensor_type(result))]
        return known[key][-1][-1]

    return relation


def type_of(operand: relay.Expr) -> relay.Type:
    """The operand's type: inferred before, annotated on a variable, or inferred now."""
    if getattr(operand, "_checked_type_", None) is not None:
        return operand.checked_type
    module = relay.transform.InferType()(tvm.IRModule.from_expr(operand))
    body = module["main"] if isinstance(operand, relay.Function) else module["main"].body
    return body.checked_type
