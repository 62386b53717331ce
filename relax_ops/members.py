# SPDX-License-Identifier: Apache-2.0
"""vmap of a straight-line forward function over members that have parameters of their own: one function for all.

A value is batched (its first axis is the members) or the same for all. Convolutions follow the batching table, pools
take the members into their batch, norms over channels take them into the channels, element-wise operators broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union

import tvm
from tvm import relax

from legalize.rearrange import rearrange
from relax_ops.batching import transposed_arguments, vmap_call
from relax_ops.builder import RelaxBuilder
from relax_ops.ir import PREFIX, TRANSPOSED, pairs_of, spec_of
from relax_ops.samples import axis
from tvm_convgrad.catalogue import BACKWARD_DATA, FORWARD, OpEntry
from tvm_convgrad.errors import UnsupportedError
from tvm_convgrad.geometry import SPATIAL

Rule = Callable[["Members", Any, "list[Any]", "list[bool]"], Any]
"""rule(members, call of the original function, its arguments now, which of them are batched) -> an expression, batched.

The call says what one member's types and attributes are. A literal tuple is the result's fields, all batched.
"""


class Members:
    """The rules at work on one function: `count` members, operations emitted through `builder`."""

    def __init__(self, builder: Any, count: int) -> None:
        self.builder, self.count = builder, count
        self._ops = RelaxBuilder(builder)

    def emit(self, expr: Any) -> Any:
        """Bind an expression."""
        return self.builder.emit(expr)

    def shape(self, value: Any) -> tuple[Any, ...]:
        """Extents of a tensor."""
        return self._ops.shape(value)

    def rearrange(self, value: Any, pattern: str) -> Any:
        """Rearrange axes, where k is the members (see legalize.rearrange)."""
        return rearrange(self._ops, value, pattern, k=self.count)

    def reshape(self, value: Any, shape: Sequence[Any]) -> Any:
        """The same elements under another shape."""
        return self._ops.reshape(value, shape)

    def own_ndim(self, value: Any, batched: bool) -> int:
        """Axes of one member's tensor."""
        return int(value.ty.ndim) - batched

    def aligned(self, value: Any, batched: bool, ndim: int) -> Any:
        """The tensor so that it broadcasts against batched ones of `ndim` axes a member."""
        missing = ndim - self.own_ndim(value, batched)
        if not batched or missing == 0:
            return value
        return self.emit(relax.op.expand_dims(value, list(range(1, 1 + missing))))

    def everywhere(self, value: Any, batched: bool) -> Any:
        """The tensor batched, if need be by copies."""
        if batched:
            return value
        shape = relax.ShapeExpr([self.count, *self.shape(value)])
        return self.emit(relax.op.broadcast_to(self.emit(relax.op.expand_dims(value, 0)), shape))

    def call(self, call: Any, arguments: Sequence[Any], **changes: Any) -> Any:
        """The call with other arguments and attributes, bound."""
        return self.emit(relax.Call(call.op, list(arguments), _changed(call.attrs, changes), list(call.ty_args)))


def replay_members(builder: Any, function: Any, values: Mapping[Any, tuple[Any, bool]], count: int) -> list[Any]:
    """Emit `function` for all members; its results, each with the members first.

    Args:
        builder: with a dataflow block open.
        function: straight-line, for one member.
        values: for each of its parameters a value, and whether that is batched (members first).
        count: of members.

    Raises:
        UnsupportedError: an operator has no rule; its name is said.
    """
    members = Members(builder, count)
    known: dict[Any, _Value] = {param: (value, batched) for param, (value, batched) in values.items()}
    for block in function.body.blocks:
        for binding in block.bindings:
            if not hasattr(binding, "value") or isinstance(binding, relax.MatchCast):
                raise UnsupportedError("ensemble: a match_cast has no rule for members; give the model fixed extents")
            known[binding.var] = _bound(members, binding.value, known)
    result = _looked_up(function.body.body, known)
    fields = result if isinstance(result, list) else [result]
    found = []
    for field in fields:
        if isinstance(field, list):
            raise UnsupportedError("ensemble: the model returns a tuple in a tuple; return tensors")
        found.append(members.everywhere(*field))
    return found


_Value = Union["tuple[Any, bool]", "list[_Value]"]
"""An expression and whether it is batched, or a tuple's fields."""


def _looked_up(expr: Any, known: Mapping[Any, _Value]) -> _Value:
    if isinstance(expr, relax.Tuple):
        return [_looked_up(field, known) for field in expr.fields]
    if isinstance(expr, relax.TupleGetItem):
        whole = _looked_up(expr.tuple_value, known)
        return whole[expr.index] if isinstance(whole, list) else (relax.TupleGetItem(whole[0], expr.index), whole[1])
    return known.get(expr, (expr, False)) if isinstance(expr, relax.Var) else (expr, False)


def _bound(members: Members, value: Any, known: Mapping[Any, _Value]) -> _Value:
    """What a binding's value is for all members."""
    if not isinstance(value, tvm.ir.Call):
        found = _looked_up(value, known)
        if isinstance(found, tuple) and isinstance(found[0], relax.TupleGetItem):
            return members.emit(found[0]), found[1]
        return found
    arguments, batched = [], []
    for arg in value.args:
        found = _looked_up(arg, known)
        if isinstance(found, list):
            found = _tuple(members, found)
        arguments.append(found[0])
        batched.append(found[1])
    if not any(batched):
        return members.call(value, arguments), False
    name = str(value.op.name) if isinstance(value.op, tvm.ir.Op) else f"a call of {value.op}"
    rule = RULES.get(name)
    if rule is None:
        raise UnsupportedError(f"ensemble: {name} has no rule for members; replace it in the model")
    result = rule(members, value, arguments, batched)
    if isinstance(result, relax.Tuple):
        return [(field, True) for field in result.fields]
    return result, True


def _tuple(members: Members, fields: list[_Value]) -> tuple[Any, bool]:
    """A literal tuple of tensors: batched, all of it, if one of them is."""
    flat = [field for field in fields if isinstance(field, tuple)]
    batched = any(flag for _, flag in flat)
    if batched:
        return relax.Tuple([members.everywhere(value, flag) for value, flag in flat]), True
    return relax.Tuple([value for value, _ in flat]), False


def _changed(attrs: Any, changes: Mapping[str, Any]) -> Any:
    """The attributes with some replaced."""
    if not changes:
        return attrs
    info = type(attrs).__tvm_ffi_type_info__
    fields = {field.name: getattr(attrs, field.name) for field in info.fields}
    return tvm.ir.make_node(str(info.type_key), **{**fields, **changes})


# ------------------------------------------------------------------------------------------------- rules


def elementwise(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Operands broadcast against each other; members in front."""
    tensors = [isinstance(arg.ty, relax.TensorType) for arg in args]
    flags = list(zip(args, batched, tensors, strict=True))
    ndim = max(m.own_ndim(arg, b) for arg, b, tensor in flags if tensor)
    return m.call(call, [m.aligned(arg, b, ndim) if tensor else arg for arg, b, tensor in flags])


def convolution(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """conv{r}d and conv{r}d_transpose by the batching table."""
    name, attrs = str(call.op.name).removeprefix(PREFIX), call.attrs
    rank = len(attrs.strides)
    dims = [0 if b else None for b in batched]
    geometry: dict[str, Any] = {
        "strides": tuple(int(s) for s in attrs.strides),
        "padding": pairs_of(attrs.padding, rank),
        "dilation": tuple(int(d) for d in attrs.dilation),
        "groups": int(attrs.groups),
        "data_layout": str(attrs.data_layout),
        "kernel_layout": str(attrs.kernel_layout),
        "out_dtype": spec_of(call, "result", name).dtype,
    }
    out_layout = str(attrs.out_layout) or str(attrs.data_layout)
    if name in TRANSPOSED:
        levels = [dict(zip(BACKWARD_DATA.operands, dims, strict=True))]
        extra = [int(e) for e in attrs.output_padding]
        own = transposed_arguments(
            m.builder, rank, levels, *args, output_padding=extra, out_layout=out_layout, **geometry
        )
        return vmap_call(m.builder, OpEntry(BACKWARD_DATA, rank), levels, args, **own)
    levels = [dict(zip(FORWARD.operands, dims, strict=True))]
    return vmap_call(m.builder, OpEntry(FORWARD, rank), levels, args, grad_layout=out_layout, **geometry)


def pool(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Pools and resampling: the members become part of the batch."""
    layout = str(call.attrs.layout)
    out_layout = str(getattr(call.attrs, "out_layout", "")) or layout
    value = m.rearrange(args[0], f"k {_spelt(layout, 'n')} -> {_spelt(layout, '(k n)')}")
    found = m.call(call, [value, *args[1:]])
    return m.rearrange(found, f"{_spelt(out_layout, '(k n)')} -> k {_spelt(out_layout, 'n')}")


def _spelt(layout: str, batch: str) -> str:
    """A layout as one side of a pattern."""
    return " ".join(batch if letter == "N" else letter.lower() for letter in layout)


def channel_norm(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """batch_norm, group_norm, instance_norm, prelu: the members become part of the channels."""
    data, *rest = (m.everywhere(arg, b) for arg, b in zip(args, batched, strict=True))
    ndim = m.own_ndim(data, True)
    attrs, name = call.attrs, str(call.op.name)
    channel = int(attrs.channel_axis if hasattr(attrs, "channel_axis") else attrs.axis) % ndim
    if name == PRELU:  # one slope may be that of all channels
        wide = relax.ShapeExpr([m.count, m.shape(data)[channel + 1]])
        rest = [m.emit(relax.op.broadcast_to(slopes, wide)) for slopes in rest]
    names = [f"a{i}" for i in range(ndim)]
    folded = [*names[:channel], f"(k {names[channel]})", *names[channel + 1 :]]
    value = m.rearrange(data, f"k {' '.join(names)} -> {' '.join(folded)}")
    vectors = [m.rearrange(vector, "k c -> (k c)") for vector in rest]
    changes = {"num_groups": int(attrs.num_groups) * m.count} if name == "relax.nn.group_norm" else {}
    found = m.call(call, [value, *vectors], **changes)
    if name != BATCH_NORM:
        return m.rearrange(found, f"{' '.join(folded)} -> k {' '.join(names)}")
    fields = [m.emit(relax.TupleGetItem(found, index)) for index in range(3)]
    result = m.rearrange(fields[0], f"{' '.join(folded)} -> k {' '.join(names)}")
    return relax.Tuple([result, *(m.rearrange(field, "(k c) -> k c") for field in fields[1:])])


def layer_norm(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """layer_norm and rms_norm: scale and shift of one (1 and 0), then those of the members."""
    data, *own = (m.everywhere(arg, b) for arg, b in zip(args, batched, strict=True))
    ndim = m.own_ndim(data, True)
    over = sorted(int(a) % ndim for a in call.attrs.axes)
    dtype = spec_of(data, "data", str(call.op.name)).dtype
    extents = m.shape(own[0])[1:]
    neutral = [m.emit(make(relax.ShapeExpr(list(extents)), dtype)) for make in (relax.op.ones, relax.op.zeros)]
    result = m.call(call, [data, *neutral[: len(own)]], axes=[place + 1 for place in over])
    shape = [m.count, *(extents[over.index(place)] if place in over else 1 for place in range(ndim))]
    for combine, vector in zip((relax.op.multiply, relax.op.add), own, strict=False):
        result = m.emit(combine(result, m.reshape(vector, shape)))
    return result


def along_axes(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Operators with an axis or axes counted from the front, one more now."""
    ndim, given = m.own_ndim(args[0], True), call.attrs.axis
    if given is None:
        moved: Any = list(range(1, ndim + 1))
    elif isinstance(given, (int, tvm.tirx.IntImm)):
        moved = int(given) % ndim + 1
    else:
        moved = [int(a) % ndim + 1 for a in given]
    return m.call(call, args, axis=moved)


def expand_dims(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """New axes, counted in the result."""
    ndim = m.own_ndim(args[0], True) + len(call.attrs.axis)
    return m.emit(relax.op.expand_dims(args[0], [int(a) % ndim + 1 for a in call.attrs.axis]))


def reshape(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """The members stay in front; also flatten, squeeze, whose result's shape is known from one member."""
    return m.reshape(args[0], [m.count, *_one_shape(m, call)])


def permute_dims(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """The members stay in front."""
    ndim, order = m.own_ndim(args[0], True), call.attrs.axes
    moved = list(reversed(range(ndim))) if order is None else [int(a) % ndim for a in order]
    return m.emit(relax.op.permute_dims(args[0], [0, *(place + 1 for place in moved)]))


def broadcast_to(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """To one member's shape, for all of them."""
    shape = list(_one_shape(m, call))
    value = m.aligned(args[0], True, len(shape))
    return m.emit(relax.op.broadcast_to(value, relax.ShapeExpr([m.count, *shape])))


def matmul(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """A product for each member: members are one more axis of the batch."""
    ndims = [m.own_ndim(arg, b) for arg, b in zip(args, batched, strict=True)]
    if min(ndims) < 2:
        raise UnsupportedError("ensemble: relax.matmul of a vector has no rule for members; give it a second axis")
    operands = [m.aligned(arg, b, max(ndims)) for arg, b in zip(args, batched, strict=True)]
    return m.call(call, operands)


def concat(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Tensors put together along an axis, all of them batched."""
    ndim, along = m.own_ndim(args[0].fields[0], True), call.attrs.axis
    return m.emit(relax.op.concat(list(args[0].fields), (0 if along is None else int(along)) % ndim + 1))


def stack(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Tensors put together along a new axis, all of them batched."""
    ndim, along = m.own_ndim(args[0].fields[0], True) + 1, call.attrs.axis
    return m.emit(relax.op.stack(list(args[0].fields), (0 if along is None else int(along)) % ndim + 1))


def strided_slice(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Parts along the axes that are named."""
    ndim, inbound = m.own_ndim(args[0], True), bool(call.attrs.assume_inbound)
    axes = [int(axis.value) % ndim + 1 for axis in args[1].fields]
    return m.emit(relax.op.strided_slice(args[0], axes, *args[2:], assume_inbound=inbound))


def tile(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Copies along the last axes, or along new ones behind the members."""
    return m.call(call, [m.aligned(args[0], True, max(m.own_ndim(args[0], True), len(call.attrs.repeats)))])


def repeat(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """Copies of each element along an axis, or of all elements in a line."""
    if call.attrs.axis is not None:
        return along_axes(m, call, args, batched)
    return m.call(call, [m.reshape(args[0], [m.count, math.prod(m.shape(args[0])[1:])])], axis=1)


def pad(m: Members, call: Any, args: list[Any], batched: list[bool]) -> Any:
    """A border around each member's tensor."""
    return m.call(call, args, pad_width=[0, 0, *(int(w) for w in call.attrs.pad_width)])


def _one_shape(m: Members, call: Any) -> tuple[Any, ...]:
    """The shape of one member's result, as the original program has it."""
    shape = spec_of(call, "result", str(call.op.name)).shape
    assert shape is not None  # models have known shapes
    return shape


BATCH_NORM, PRELU = "relax.nn.batch_norm", "relax.nn.prelu"


RULES: dict[str, Rule] = {
    **{f"relax.{name}": elementwise for name in (*axis.ELEMENTWISE, *axis.UNARY, "tril", "triu")},
    **{f"relax.nn.conv{rank}d{kind}": convolution for rank in SPATIAL for kind in ("", "_transpose")},
    **{f"relax.{name}": pool for name in (*axis.POOLS, "image.resize2d")},
    **{f"relax.{name}": along_axes for name in ("sum", "mean", "max", "min", "prod", "variance", "std")},
    **{f"relax.{name}": along_axes for name in ("nn.softmax", "nn.log_softmax", "split", "flip")},
    **dict.fromkeys(("relax.reshape", "relax.flatten", "relax.nn.batch_flatten", "relax.squeeze"), reshape),
    **dict.fromkeys((BATCH_NORM, "relax.nn.group_norm", "relax.nn.instance_norm", PRELU), channel_norm),
    **dict.fromkeys(("relax.nn.layer_norm", "relax.nn.rms_norm"), layer_norm),
    "relax.expand_dims": expand_dims,
    "relax.permute_dims": permute_dims,
    "relax.broadcast_to": broadcast_to,
    "relax.matmul": matmul,
    "relax.concat": concat,
    "relax.stack": stack,
    "relax.strided_slice": strided_slice,
    "relax.tile": tile,
    "relax.repeat": repeat,
    "relax.nn.pad": pad,
}
"""Rules by operator."""
