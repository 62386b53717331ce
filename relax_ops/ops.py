# SPDX-License-Identifier: Apache-2.0
"""The six operators in Relax: type rule, purity, mixed precision, and the Python functions that make their calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from relax_ops.attrs import ATTRS
from relax_ops.declaration import LEVEL
from relax_ops.ir import PREFIX, AnalyzerProver, attributes_of, entry_of, shape_values, spec_of
from tvm_convgrad.core.arguments import Ints, Padding, make_attributes, missing
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, NEW_OPS, OpEntry
from tvm_convgrad.core.errors import DTypeError, ProblemError
from tvm_convgrad.core.geometry import Size, flat_padding
from tvm_convgrad.core.type_relation import infer_backward_data, infer_backward_weight


def infer_type(call: relax.Call, block_builder: relax.BlockBuilder) -> relax.Type:
    """FInferType of all six operators: the catalogue's type relation on Relax types."""
    entry = entry_of(call)
    wanted = 2 if entry.direction is BACKWARD_WEIGHT else 3
    if len(call.args) != wanted:
        raise ProblemError(f"{entry.name}: {len(call.args)} arguments were given; it takes {wanted}")
    attributes, prover = attributes_of(call), AnalyzerProver()
    first, second = (
        spec_of(arg, name, entry.name) for name, arg in zip(entry.direction.operands, call.args, strict=False)
    )
    if entry.direction is BACKWARD_WEIGHT:
        result = infer_backward_weight(attributes, first, second, prover)
    else:
        if not isinstance(call.args[2].ty, relax.ShapeType):
            raise DTypeError(
                f"{entry.name}: data_shape must be a shape, but is {call.args[2].ty}; write R.shape([...])"
            )
        result = infer_backward_data(attributes, first, second, shape_values(call.args[2]), prover)
    device = call.args[0].ty.vdevice
    if result.shape is None:
        return relax.TensorType(dtype=result.dtype, ndim=result.ndim, vdevice=device)
    return relax.TensorType(result.shape, result.dtype, device)


def infer_mixed_precision(call: relax.Call, out_dtype: str) -> relax.Call:
    """FInferMixedPrecision: the same call with another result type; sums stay in float32 either way."""
    entry = entry_of(call)
    attrs = {name: getattr(call.attrs, name) for name in entry.attributes}
    return relax.Call(call.op, call.args, ATTRS[entry.direction.name](**{**attrs, "out_dtype": str(out_dtype)}))


def make_call(
    entry: OpEntry,
    first: relax.Expr,
    second: relax.Expr,
    *,
    kernel_size: Ints | None = None,
    data_shape: Sequence[Size] | relax.Expr | None = None,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    grad_layout: str | None = None,
    data_layout: str | None = None,
    kernel_layout: str | None = None,
    out_dtype: str | None = None,
) -> relax.Call:
    """A call to one of the six operators, with every accepted form of an argument made canonical.

    Args:
        entry: the catalogue's entry.
        first, second: the operands, Relax tensors.
        kernel_size: wgrad only.
        data_shape: dgrad only: full shape of the data in `data_layout`; ints, symbolic extents, or a Relax shape.
        strides, padding, dilation, groups, grad_layout, data_layout, kernel_layout, out_dtype: see tvm_convgrad.op.

    Raises:
        ProblemError, DTypeError: an argument breaks a rule; those of the operands are checked when types are inferred.
    """
    if entry.direction is BACKWARD_DATA:
        if data_shape is None:
            raise missing(entry, "data_shape")
        if not isinstance(data_shape, relax.Expr):
            data_shape = relax.ShapeExpr(list(data_shape))
    attributes = make_attributes(
        entry,
        data_shape=lambda: (
            shape_values(data_shape) if entry.direction is BACKWARD_DATA else spec_of(second, "data", entry.name).shape
        ),
        weight_shape=lambda: spec_of(second, "weight", entry.name).shape,
        kernel_size=None if kernel_size is None else _plain(kernel_size),
        strides=_plain(strides),
        padding=_plain(padding),
        dilation=_plain(dilation),
        groups=groups,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        out_dtype=out_dtype,
    )
    values = {
        "strides": attributes.strides,
        "padding": flat_padding(attributes.padding),
        "dilation": attributes.dilation,
        "groups": attributes.groups,
        "out_dtype": attributes.out_dtype or "",
        "grad_layout": attributes.grad_layout,
        "data_layout": attributes.data_layout,
        "kernel_layout": attributes.kernel_layout,
    }
    if entry.direction is BACKWARD_WEIGHT:
        values["kernel_size"] = attributes.kernel_size
    operands = [first, second] if entry.direction is BACKWARD_WEIGHT else [first, second, data_shape]
    return relax.Call(tvm.ir.Op.get(PREFIX + entry.name), operands, ATTRS[entry.direction.name](**values))


def register_ops() -> None:
    """Register the six operators with the TVM in use, and their functions under relax.op.nn for the script parser."""
    register = tvm_ffi.get_global_func("ir.RegisterOp")
    known = set(tvm.ir.Op.list_op_names())
    for entry in NEW_OPS:
        name = PREFIX + entry.name
        if name not in known:
            register(name, f"{entry.direction.result}'s gradient of a {entry.rank}-d convolution")
        op = tvm.ir.Op.get(name)
        op.set_attr("FInferType", infer_type, LEVEL)
        op.set_attr("FPurity", True, LEVEL)
        op.set_attr("TMixedPrecisionPolicy", 0, LEVEL)
        op.set_attr("FInferMixedPrecision", infer_mixed_precision, LEVEL)
        setattr(relax.op.nn, entry.name, script_function(entry))


def script_function(entry: OpEntry) -> Callable[..., Any]:
    """The function that TVMScript calls as R.nn.<name>; keywords are named as the attributes."""
    if entry.direction is BACKWARD_WEIGHT:

        def weight(grad: relax.Expr, data: relax.Expr, **attributes: Any) -> relax.Call:
            return make_call(entry, grad, data, **attributes)

        function: Callable[..., Any] = weight
    else:

        def data(
            grad: relax.Expr, weight: relax.Expr, data_shape: Sequence[Size] | relax.Expr, **attributes: Any
        ) -> relax.Call:
            return make_call(entry, grad, weight, data_shape=data_shape, **attributes)

        function = data
    function.__name__ = function.__qualname__ = entry.name
    function.__doc__ = f"See tvm_convgrad.op.{entry.name}."
    return function


def _plain(value: Any) -> Any:
    """TVM integers and arrays as Python ones, to any depth; strings and ints as they are."""
    if isinstance(value, (int, str)):
        return value
    if isinstance(value, tvm.tirx.IntImm):
        return int(value.value)
    return tuple(_plain(v) for v in value)
