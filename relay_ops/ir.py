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

from tvm_convgrad.arguments import problem_of_call
from tvm_convgrad.catalogue import (
    BACKWARD_DATA,
    BACKWARD_WEIGHT,
    BY_NAME,
    FORWARD,
    ConvAttributes,
    Face,
    OpEntry,
    TensorSpec,
    canonical_layouts,
    infer_backward_data,
    infer_backward_weight,
)
from tvm_convgrad.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.geometry import (
    SPATIAL,
    channel_multiplier,
    effective_kernel,
    flat_padding,
    hidden_extent,
    multiplied_kernel_layout,
    normalize_padding,
    swapped_kernel_layout,
)
from tvm_convgrad.problem import ConvProblem

PREFIX = "nn."


class Unknown:
    """An extent that Relay does not know (`?`): any arithmetic on it gives another one."""

    def _unknown(self, other: Any) -> Unknown:
        return self

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __floordiv__ = _unknown

    def __str__(self) -> str:
        return "?"


class RelayProver:
    """The catalogue's Prover: ints are compared, nothing is known of unknown extents."""

    def equal(self, a: Any, b: Any) -> bool | None:
        """Whether two extents are equal, None if one is unknown."""
        return a == b if isinstance(a, int) and isinstance(b, int) else None

    def show(self, extent: Any) -> str:
        """An extent as text."""
        return str(extent)


def spec_of(ty: Any, name: str, op: str) -> TensorSpec | None:
    """What a Relay type says of a tensor; None if it is not inferred yet.

    Raises:
        DTypeError: it is not a tensor.
    """
    if isinstance(ty, relay.TensorType):
        shape = tuple(int(e) if isinstance(e, tvm.tir.IntImm) else Unknown() for e in ty.shape)
        return TensorSpec(shape, len(shape), str(ty.dtype))
    if ty is None or isinstance(ty, tvm.ir.type.TypeVar) or type(ty).__name__ == "IncompleteType":
        return None
    raise DTypeError(f"{op}: {name} must be a tensor, but is {ty}")


def tensor_type(spec: TensorSpec) -> Any:
    """The Relay type of a tensor, unknown extents written as `?`."""
    assert spec.shape is not None
    return relay.TensorType([e if isinstance(e, int) else tvm.tir.Any() for e in spec.shape], spec.dtype)


def entry_of(op: Any) -> OpEntry:
    """The catalogue's entry of one of the family's operators or of a stock convolution."""
    return BY_NAME[str(op.name).removeprefix(PREFIX)]


def attributes_of(entry: OpEntry, attrs: Any) -> ConvAttributes:
    """The checked attributes of a call to wgrad or dgrad of any rank.

    Raises:
        ProblemError, DTypeError: an attribute breaks a rule.
    """
    rank = entry.rank
    if attrs is None:
        raise ProblemError(f"{entry.name}: the call has no attributes")
    own, third = str(attrs.out_layout), entry.face is BACKWARD_DATA
    layouts = dict(zip(("grad_layout", "data_layout", "kernel_layout"), canonical_layouts(rank), strict=True))
    layouts["grad_layout"] = str(attrs.data_layout)
    if third:
        layouts["kernel_layout"], layouts["data_layout"] = str(attrs.kernel_layout), own or layouts["grad_layout"]
    else:
        layouts["data_layout"], layouts["kernel_layout"] = str(attrs.kernel_layout), own or layouts["kernel_layout"]
    kernel = None if attrs.kernel_size is None else _ints(attrs.kernel_size)
    if kernel is None and entry.face is BACKWARD_WEIGHT:
        raise ProblemError(f"{entry.name}: kernel_size is missing; grad and data do not determine it")
    strides, dilation = _ints(attrs.strides), _ints(attrs.dilation)
    for name, values in (("strides", strides), ("dilation", dilation)):
        if len(values) != rank:
            raise ProblemError(f"{entry.name}: {name} needs {rank} entries, but has {len(values)}")
    try:
        padding = normalize_padding(
            _ints(attrs.padding), data_extents=[0] * rank, kernel=[1] * rank, strides=strides, dilation=dilation
        )
    except ProblemError as error:
        raise ProblemError(f"{entry.name}: {error}") from None
    return ConvAttributes(
        op=entry.name,
        rank=rank,
        strides=strides,
        padding=padding,
        dilation=dilation,
        groups=int(attrs.groups),
        out_dtype=str(attrs.out_dtype) or None,
        kernel_size=kernel if entry.face is BACKWARD_WEIGHT else None,
        **layouts,
    )


def data_shape_of(attributes: ConvAttributes, attrs: Any, grad: TensorSpec, weight: TensorSpec) -> tuple[Any, ...]:
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
    hidden = _ints(attrs.output_padding)
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
        x[axis] = (dy[axis] - 1) * step + effective_kernel(w[axis], attributes.dilation[i]) - low - high + hidden[i]
    return tuple(x[letter] for letter in attributes.data_layout)


def types_of(call: Any) -> list[Any]:
    """The types of a call's operands and of its result, as `problem_of` takes them."""
    return [*(arg.checked_type for arg in call.args), call.checked_type]


def infer(entry: OpEntry, attrs: Any, types: Sequence[Any]) -> TensorSpec | None:
    """The catalogue's type relation on Relay types; None while an operand's type is not known.

    Raises:
        ProblemError, DTypeError: see tvm_convgrad.catalogue.
    """
    first, second = (spec_of(ty, name, entry.name) for ty, name in zip(types, entry.face.operands, strict=False))
    if first is None or second is None:
        return None
    attributes = attributes_of(entry, attrs)
    if entry.face is BACKWARD_DATA:
        shape = data_shape_of(attributes, attrs, first, second)
        return infer_backward_data(attributes, first, second, shape, RelayProver())
    result = infer_backward_weight(attributes, first, second, RelayProver())
    assert result.shape is not None
    assert attributes.kernel_size is not None
    _check_stated(entry.name, attrs, result.shape[attributes.kernel_layout.index("O")], attributes.kernel_size)
    return result


def problem_of(op: Any, attrs: Any, types: Sequence[Any]) -> ConvProblem:
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
    names = (*entry.face.operands, entry.face.result)
    shapes, dtypes = _static(entry.name, dict(zip(names, types, strict=False)))
    if entry.face is FORWARD:
        multiplier = _channel_multiplier(entry.rank, attrs, shapes)
        if multiplier > 1:
            raise UnsupportedError(
                f"{entry.name}: the weight's I axis is the channel multiplier {multiplier} of a depthwise convolution; "
                f"reshape the weight to O={attrs.channels}, I=1, which is the same convolution"
            )
        return _problem_from(entry.rank, entry.name, attrs, shapes, dtypes, str(attrs.kernel_layout))
    attributes = attributes_of(entry, attrs)
    operands = {name: shapes[name] for name in entry.face.operands}
    if entry.face is BACKWARD_DATA:
        specs = [TensorSpec(shapes[name], len(shapes[name]), dtypes[name]) for name in entry.face.operands]
        operands["data"] = data_shape_of(attributes, attrs, *specs)
    return problem_of_call(entry.face, attributes, operands, {n: dtypes[n] for n in entry.face.operands})


def multiplied_problem_of(op: Any, attrs: Any, types: Sequence[Any]) -> ConvProblem | None:
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
    if entry.face is not FORWARD or _channel_multiplier(entry.rank, attrs, shapes) == 1:
        return None
    layout = str(attrs.kernel_layout)
    extents = dict(zip(layout, shapes["weight"], strict=True)) | {"O": int(attrs.channels), "I": 1}
    order = multiplied_kernel_layout(layout)
    shapes["weight"] = tuple(extents[letter] for letter in order)
    return _problem_from(entry.rank, entry.name, attrs, shapes, dtypes, order)


def _channel_multiplier(rank: int, attrs: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """What Relay takes the weight's I axis for where it is not channels of the data in a group; 1 elsewhere."""
    layouts = {"data": str(attrs.data_layout), "weight": str(attrs.kernel_layout)}
    if any(len(layouts[name]) != rank + 2 for name in layouts):
        return 1
    weight = dict(zip(layouts["weight"], shapes["weight"], strict=True))
    channels = None if attrs.channels is None or attrs.kernel_size is None else int(attrs.channels)
    data_channels = shapes["data"][layouts["data"].index("C")]
    return channel_multiplier(rank, data_channels, weight["O"], weight["I"], int(attrs.groups), channels)


def transposed_problem_of(op: Any, attrs: Any, types: Sequence[Any]) -> ConvProblem:
    """The problem whose dgrad nn.conv{1,2,3}d_transpose is: its result is X, its data dY, its weight W.

    What it calls I and O of the weight are that convolution's O and I.

    Raises:
        UnsupportedError: an extent is unknown, a layout is packed, or output_padding reaches the stride.
    """
    name = str(op.name).removeprefix(PREFIX)
    shapes, dtypes = _static(name, dict(zip(("grad", "weight", "data"), types, strict=True)))
    kernel_layout = swapped_kernel_layout(str(attrs.kernel_layout))
    problem = _problem_from(len(attrs.strides), name, attrs, shapes, dtypes, kernel_layout, transposed=True)
    if problem.grad_shape != shapes["grad"]:
        raise UnsupportedError(f"{name}: output_padding {list(attrs.output_padding)} is not below the strides")
    return problem


def call_of(face: Face, problem: ConvProblem, first: Any, second: Any) -> Any:
    """A Relay call of a face of a problem: nn.conv{1,2,3}d or one of the six operators; typed as the problem says."""
    rank, entry = problem.rank, OpEntry(face, problem.rank)
    out_dtype = {"data": problem.data_dtype, "weight": problem.kernel_dtype, "grad": problem.grad_dtype}[face.result]
    values: dict[str, Any] = {
        "channels": problem.in_channels if face is BACKWARD_DATA else problem.out_channels,
        "kernel_size": list(problem.kernel),
        "strides": list(problem.strides),
        "padding": list(flat_padding(problem.padding)),
        "dilation": list(problem.dilation),
        "groups": problem.groups,
        "out_dtype": out_dtype,
    }
    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
    # In all three faces the first operand's layout is called data_layout, the second's kernel_layout.
    values["data_layout"], values["kernel_layout"] = (layouts[operand] for operand in face.operands)
    # Empty is "as the first operand"; Relay's ConvertLayout of stock convolutions minds one that is spelled out.
    same = face is not BACKWARD_WEIGHT and layouts[face.result] == values["data_layout"]
    values["out_layout"] = "" if same else layouts[face.result]
    kind = f"Conv{rank}DAttrs"
    if face is BACKWARD_DATA:
        kind = f"Conv{rank}DTransposeAttrs"
        values["output_padding"] = [
            hidden_extent(int(x), k, s, d, low, high)
            for x, k, s, d, (low, high) in zip(
                problem.data_extents, problem.kernel, problem.strides, problem.dilation, problem.padding, strict=True
            )
        ]
    attrs = tvm.ir.make_node(f"relay.attrs.{kind}", **values)
    return relay.Call(tvm.ir.Op.get(PREFIX + entry.name), [first, second], attrs)


def _problem_from(
    rank: int,
    name: str,
    attrs: Any,
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, str],
    kernel_layout: str,
    *,
    transposed: bool = False,
) -> ConvProblem:
    """The problem of a stock convolution or transposed convolution, from the shapes of X and W."""
    first = str(attrs.data_layout)
    last = str(attrs.out_layout) or first
    data_layout, grad_layout = (last, first) if transposed else (first, last)
    if any(len(layout) != rank + 2 for layout in (data_layout, grad_layout, kernel_layout)):
        raise UnsupportedError(
            f"{name}: packed layouts ({first}, {attrs.kernel_layout}) are not served; take the gradient in a plain "
            f"layout and convert afterwards"
        )
    return ConvProblem.from_shapes(
        shapes["data"],
        shapes["weight"],
        strides=_ints(attrs.strides),
        padding=_ints(attrs.padding),
        dilation=_ints(attrs.dilation),
        groups=int(attrs.groups),
        data_layout=data_layout,
        kernel_layout=kernel_layout,
        grad_layout=grad_layout,
        dtypes=(dtypes["data"], dtypes["weight"], dtypes["grad"]),
    )


def _static(op: str, types: Mapping[str, Any]) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    shapes, dtypes = {}, {}
    for name, ty in types.items():
        spec = spec_of(ty, name, op)
        if spec is None or spec.shape is None or not all(isinstance(e, int) for e in spec.shape):
            raise UnsupportedError(
                f"{op}: {name} is {ty}; its extents must be numbers: give the program fixed shapes "
                f"(relay.transform.DynamicToStatic, or types without `?`)"
            )
        shapes[name], dtypes[name] = spec.shape, str(spec.dtype)
    return shapes, dtypes


def _check_stated(op: str, attrs: Any, channels: Any, kernel: Sequence[Any]) -> None:
    """Attributes that repeat what the operands say must agree with them."""
    if attrs.channels is not None and isinstance(channels, int) and int(attrs.channels) != channels:
        raise ProblemError(
            f"{op}: channels={attrs.channels}, but the operands have {channels}; leave it out or mend it"
        )
    stated = None if attrs.kernel_size is None else _ints(attrs.kernel_size)
    if stated is not None and stated != tuple(kernel):
        raise ProblemError(f"{op}: kernel_size={stated}, but the weight has {tuple(kernel)}; leave it out or mend it")


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(int(v) for v in values)
