# SPDX-License-Identifier: Apache-2.0
"""Between Relay and the core: types to TensorSpec, Relay's attributes to ConvAttributes and ConvProblem, and back.

The operators use attribute classes that Relay has, so that programs are printed, parsed and saved as any other:

    conv{1,2,3}d_backward_weight   Conv{1,2,3}DAttrs, in upstream's reading for its conv2d_backward_weight: data_layout
                                   is that of grad, kernel_layout that of data, out_layout that of dW; channels are dW's
    conv{1,2,3}d_backward_data     Conv{1,2,3}DTransposeAttrs: data_layout is that of grad, out_layout that of dX,
                                   kernel_layout that of W in the forward convolution's letters; channels are dX's;
                                   output_padding is what floor division hides of X, so that it fixes X's extents
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tvm
from tvm import relay

from tvm_convgrad.core.arguments import integers, problem_of_call, problem_of_stock_call, stored_attributes
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, BY_NAME, FORWARD, Direction, OpEntry
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import (
    SPATIAL,
    Size,
    channel_multiplier,
    flat_padding,
    hidden_extent,
    kernel_layout_of,
    multiplied_kernel_layout,
    transposed_extent,
)
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import ConvAttributes, TensorSpec, infer_backward_data, infer_backward_weight

PREFIX = "nn."


class Unknown:
    """An unknown extent of Relay (`?`): any arithmetic on it gives another one."""

    def _unknown(self, other: Size) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _unknown

    def __str__(self) -> str:
        return "?"


class RelayProver:
    """The catalogue's Prover: ints are compared, nothing is known of unknown extents."""

    def equal(self, a: Size, b: Size) -> bool | None:
        """Whether two extents are equal, None if one is unknown."""
        return a == b if isinstance(a, int) and isinstance(b, int) else None

    def show(self, extent: Size) -> str:
        """An extent as text."""
        return str(extent)


def spec_of(ty: relay.Type, name: str, op: str) -> TensorSpec | None:
    """The TensorSpec of a Relay type; None if it is not inferred yet.

    Raises:
        DTypeError: it is not a tensor.
    """
    if isinstance(ty, relay.TensorType):
        shape = tuple(int(e) if isinstance(e, tvm.tir.IntImm) else Unknown() for e in ty.shape)
        return TensorSpec(shape, len(shape), str(ty.dtype))
    if ty is None or isinstance(ty, tvm.ir.type.TypeVar) or type(ty).__name__ == "IncompleteType":
        return None
    raise DTypeError(f"{op}: {name} must be a tensor, but is {ty}")


def tensor_type(spec: TensorSpec) -> relay.TensorType:
    """The Relay type of a tensor, unknown extents written as `?`."""
    assert spec.shape is not None
    return relay.TensorType([e if isinstance(e, int) else tvm.tir.Any() for e in spec.shape], spec.dtype)


def entry_of(op: tvm.ir.Op) -> OpEntry:
    """The catalogue's entry of one of the family's operators or of a stock convolution."""
    return BY_NAME[str(op.name).removeprefix(PREFIX)]


def attributes_of(entry: OpEntry, attrs: tvm.ir.Attrs) -> ConvAttributes:
    """The checked attributes of a call to wgrad or dgrad of any rank.

    Raises:
        ProblemError, DTypeError: an attribute breaks a rule.
    """
    if attrs is None:
        raise ProblemError(f"{entry.name}: the call has no attributes")
    first, second, own = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
    if entry.direction is BACKWARD_DATA:
        layouts = {"grad_layout": first, "data_layout": own or first, "kernel_layout": second}
    else:
        layouts = {"grad_layout": first, "data_layout": second, "kernel_layout": own or kernel_layout_of(entry.rank)}
    return stored_attributes(
        entry,
        kernel_size=attrs.kernel_size,
        strides=attrs.strides,
        padding=attrs.padding,
        dilation=attrs.dilation,
        groups=attrs.groups,
        out_dtype=attrs.out_dtype,
        **layouts,
    )


def data_shape_of(
    attributes: ConvAttributes, attrs: tvm.ir.Attrs, grad: TensorSpec, weight: TensorSpec
) -> tuple[Size, ...]:
    """The shape of X that a dgrad's attributes and operands determine: its transposed convolution's result.

    Raises:
        ProblemError: attributes and operands contradict each other.
    """
    assert grad.shape is not None
    assert weight.shape is not None
    if len(grad.shape) != attributes.rank + 2 or len(weight.shape) != attributes.rank + 2:
        raise ProblemError(
            f"{attributes.op}: grad has {len(grad.shape)} and weight {len(weight.shape)} axes; "
            f"both must have {attributes.rank + 2}"
        )
    axes = SPATIAL[attributes.rank]
    hidden = integers(attrs.output_padding)
    hidden = hidden * attributes.rank if len(hidden) == 1 else hidden
    if len(hidden) != attributes.rank:
        raise ProblemError(f"{attributes.op}: output_padding needs {attributes.rank} entries, but has {len(hidden)}")
    dy = dict(zip(attributes.grad_layout, grad.shape, strict=True))
    w = dict(zip(attributes.kernel_layout, weight.shape, strict=True))
    _check_stated(attributes.op, attrs, w["I"] * attributes.groups, [w[a] for a in axes])
    x = {"N": dy["N"], "C": w["I"] * attributes.groups}
    for i, axis in enumerate(axes):
        step, (low, high) = attributes.strides[i], attributes.padding[i]
        if not 0 <= hidden[i] < step:
            raise ProblemError(
                f"{attributes.op}: output_padding {hidden[i]} of axis {axis} must be at least 0 and below the stride "
                f"{step}: it is what floor division hides of the data"
            )
        x[axis] = transposed_extent(dy[axis], w[axis], step, attributes.dilation[i], low, high, hidden[i])
    return tuple(x[letter] for letter in attributes.data_layout)


def types_of(call: relay.Call) -> list[relay.Type]:
    """The types of a call's operands and of its result, as `problem_of` takes them."""
    return [*(arg.checked_type for arg in call.args), call.checked_type]


def with_batch(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type], batch: int = 1) -> list[relay.Type]:
    """The types with a number for a batch that is not known; calls of the family do not depend on it.

    Args:
        op: one of the six operators, or a stock (transposed) convolution.
        attrs: its attributes.
        types: of its operands, and perhaps of its result.
        batch: the number.
    """
    name = str(op.name)
    first, second, own = str(attrs.data_layout), str(attrs.kernel_layout), str(attrs.out_layout)
    # The layouts of both operands and of the result; a kernel's has no N.
    layouts = (first, second, second if name.endswith("backward_weight") and not own else own or first)
    bound = []
    for kind, layout in zip(types, layouts, strict=False):
        place = layout.find("N")
        if place < 0 or not isinstance(kind, relay.TensorType) or len(kind.shape) != len(layout):
            bound.append(kind)
            continue
        known = [isinstance(extent, tvm.tir.IntImm) for extent in kind.shape]
        shape = [batch if i == place and not known[i] else extent for i, extent in enumerate(kind.shape)]
        bound.append(relay.TensorType(shape, kind.dtype))
    return bound


def infer(entry: OpEntry, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> TensorSpec | None:
    """The catalogue's type relation on Relay types; None while an operand's type is not known.

    Raises:
        ProblemError, DTypeError: see tvm_convgrad.core.catalogue.
    """
    first, second = (spec_of(ty, name, entry.name) for ty, name in zip(types, entry.direction.operands, strict=False))
    if first is None or second is None:
        return None
    attributes = attributes_of(entry, attrs)
    if entry.direction is BACKWARD_DATA:
        shape = data_shape_of(attributes, attrs, first, second)
        return infer_backward_data(attributes, first, second, shape, RelayProver())
    result = infer_backward_weight(attributes, first, second, RelayProver())
    assert result.shape is not None
    assert attributes.kernel_size is not None
    _check_stated(entry.name, attrs, result.shape[attributes.kernel_layout.index("O")], attributes.kernel_size)
    return result


def problem_of(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> ConvProblem:
    """The ConvProblem of a well-typed call.

    Args:
        op: one of the six operators, or nn.conv{1,2,3}d.
        attrs: its attributes.
        types: of its operands; for a stock convolution also of its result.

    Raises:
        UnsupportedError: an extent is unknown, a layout is packed, or the weight's I axis is a channel multiplier.
        ProblemError: no such convolution.
    """
    entry = entry_of(op)
    names = (*entry.direction.operands, entry.direction.result)
    shapes, dtypes = _static(entry.name, dict(zip(names, types, strict=False)))
    if entry.direction is FORWARD:
        multiplier = _channel_multiplier(entry.rank, attrs, shapes)
        if multiplier > 1:
            raise UnsupportedError(
                f"{entry.name}: the weight's I axis is the channel multiplier {multiplier} of a depthwise convolution; "
                f"reshape the weight to O={attrs.channels}, I=1, which is the same convolution"
            )
        return problem_of_stock_call(entry.name, entry.rank, attrs, shapes, dtypes)
    attributes = attributes_of(entry, attrs)
    operands = {name: shapes[name] for name in entry.direction.operands}
    if entry.direction is BACKWARD_DATA:
        specs = [TensorSpec(shapes[name], len(shapes[name]), dtypes[name]) for name in entry.direction.operands]
        operands["data"] = data_shape_of(attributes, attrs, *specs)
    return problem_of_call(entry.direction, attributes, operands, {n: dtypes[n] for n in entry.direction.operands})


def multiplied_problem_of(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> ConvProblem | None:
    """The problem of a depthwise nn.conv{2,3}d whose weight has the channel multiplier on its I axis.

    The problem's weight has O=channels and I=1, and its kernel layout has I right behind O: in that order of axes the
    elements of both weights are the same.

    Args:
        op: a stock convolution.
        attrs: its attributes.
        types: of its operands and its result.

    Returns:
        None if the call is no such convolution.

    Raises:
        UnsupportedError: an extent is unknown.
    """
    entry = entry_of(op)
    shapes, dtypes = _static(entry.name, dict(zip(("data", "weight", "grad"), types, strict=True)))
    if entry.direction is not FORWARD or _channel_multiplier(entry.rank, attrs, shapes) == 1:
        return None
    layout = str(attrs.kernel_layout)
    extents = dict(zip(layout, shapes["weight"], strict=True)) | {"O": int(attrs.channels), "I": 1}
    order = multiplied_kernel_layout(layout)
    shapes["weight"] = tuple(extents[letter] for letter in order)
    return problem_of_stock_call(entry.name, entry.rank, attrs, shapes, dtypes, kernel_layout=order)


def _channel_multiplier(rank: int, attrs: tvm.ir.Attrs, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What Relay takes the weight's I axis for where it is not channels of the data in a group; 1 elsewhere."""
    layouts = {"data": str(attrs.data_layout), "weight": str(attrs.kernel_layout)}
    if any(len(layouts[name]) != rank + 2 for name in layouts):
        return 1
    weight = dict(zip(layouts["weight"], shapes["weight"], strict=True))
    channels = None if attrs.channels is None or attrs.kernel_size is None else int(attrs.channels)
    data_channels = shapes["data"][layouts["data"].index("C")]
    return channel_multiplier(rank, data_channels, weight["O"], weight["I"], int(attrs.groups), channels)


def transposed_problem_of(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> ConvProblem:
    """The problem whose dgrad nn.conv{1,2,3}d_transpose is: its result is X, its data dY, its weight W.

    What it calls I and O of the weight are that convolution's O and I.

    Raises:
        UnsupportedError: an extent is unknown, a layout is packed, or output_padding reaches the stride.
    """
    name = str(op.name).removeprefix(PREFIX)
    shapes, dtypes = _static(name, dict(zip(("grad", "weight", "data"), types, strict=True)))
    return problem_of_stock_call(name, len(attrs.strides), attrs, shapes, dtypes, transposed=True)


def call_of(direction: Direction, problem: ConvProblem, first: relay.Expr, second: relay.Expr) -> relay.Call:
    """A Relay call of a direction: nn.conv{1,2,3}d or one of the six operators, with the problem's types."""
    rank, entry = problem.rank, OpEntry(direction, problem.rank)
    out_dtype = {"data": problem.data_dtype, "weight": problem.kernel_dtype, "grad": problem.grad_dtype}[
        direction.result
    ]
    values: dict[str, Any] = {
        "channels": problem.in_channels if direction is BACKWARD_DATA else problem.out_channels,
        "kernel_size": list(problem.kernel),
        "strides": list(problem.strides),
        "padding": list(flat_padding(problem.padding)),
        "dilation": list(problem.dilation),
        "groups": problem.groups,
        "out_dtype": out_dtype,
    }
    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
    # In all three directions the first operand's layout is called data_layout, the second's kernel_layout.
    values["data_layout"], values["kernel_layout"] = (layouts[operand] for operand in direction.operands)
    # Empty is "as the first operand"; Relay's ConvertLayout of stock convolutions minds one that is spelled out.
    same = direction is not BACKWARD_WEIGHT and layouts[direction.result] == values["data_layout"]
    values["out_layout"] = "" if same else layouts[direction.result]
    kind = f"Conv{rank}DAttrs"
    if direction is BACKWARD_DATA:
        kind = f"Conv{rank}DTransposeAttrs"
        values["output_padding"] = [
            hidden_extent(int(x), k, s, d, low, high)
            for x, k, s, d, (low, high) in zip(
                problem.data_extents, problem.kernel, problem.strides, problem.dilation, problem.padding, strict=True
            )
        ]
    attrs = tvm.ir.make_node(f"relay.attrs.{kind}", **values)
    return relay.Call(tvm.ir.Op.get(PREFIX + entry.name), [first, second], attrs)


def _static(op: str, types: Mapping[str, relay.Type]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    shapes, dtypes = {}, {}
    for name, ty in types.items():
        spec = spec_of(ty, name, op)
        if spec is None or spec.shape is None or not all(isinstance(e, int) for e in spec.shape):
            raise UnsupportedError(
                f"{op}: {name} is {ty}; its extents, all but perhaps the batch, must be numbers: give the program "
                "fixed shapes (relay.transform.DynamicToStatic, or types without `?`)"
            )
        shapes[name], dtypes[name] = spec.shape, str(spec.dtype)
    return shapes, dtypes


def _check_stated(op: str, attrs: tvm.ir.Attrs, channels: Size, kernel: Sequence[Size]) -> None:
    """Raise ProblemError if attributes that repeat extents of the operands differ from them."""
    if attrs.channels is not None and isinstance(channels, int) and int(attrs.channels) != channels:
        raise ProblemError(
            f"{op}: channels={attrs.channels}, but the operands have {channels}; leave it out or mend it"
        )
    stated = None if attrs.kernel_size is None else integers(attrs.kernel_size)
    if stated is not None and stated != tuple(kernel):
        raise ProblemError(f"{op}: kernel_size={stated}, but the weight has {tuple(kernel)}; leave it out or mend it")
