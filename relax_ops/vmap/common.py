# SPDX-License-Identifier: Apache-2.0
"""Rules about the mapped axis that several operators share: where it is in the result, and the call for all indices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax

from relax_ops.expressions import ndim_of
from relax_ops.vmap.emitter import Vmap
from relax_ops.vmap.mapped_axis import Axes, Unknown

# ------------------------------------------------------------------ where the mapped axis is in the result


def broadcast_axis(call: relax.Call, axes: Axes) -> int | str:
    """Operands broadcast against each other: axes are counted from the end."""
    ndim = ndim_of(call)
    found = {ndim - ndim_of(arg) + axis for arg, axis in zip(call.args, axes, strict=True) if axis is not None}
    return found.pop() if len(found) == 1 else "its operands have the samples along different axes"


def same_axis(_call: relax.Call, axes: Axes) -> int | str:
    """One tensor, and others along the same axes if at all; the value has its shape."""
    found = {axis for axis in axes if axis is not None}
    return found.pop() if len(found) == 1 else "its operands have the samples along different axes"


def along_axis(call: relax.Call, axes: Axes) -> int | str:
    """An operator along one axis that keeps the shape."""
    if call.attrs.axis is None:
        return "it runs over all elements"
    axis = axes.first
    return "it runs along the samples" if int(call.attrs.axis) % ndim_of(call) == axis else axis


def window_axis(call: relax.Call, axes: Axes) -> int | str:
    """Pools, their gradients, and resampling: the samples are N of the layout, in every operand that has them."""
    batch = str(call.attrs.layout).find("N")
    out = str(getattr(call.attrs, "out_layout", "") or call.attrs.layout).find("N")
    if any(axis not in (None, batch) for axis in axes):
        return Unknown("the samples are not its batch")
    return out


# ------------------------------------------------------------------------------ the call for all indices


def elementwise(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """Operands broadcast against each other; the mapped axis in front."""
    tensors = [isinstance(arg.ty, relax.TensorType) for arg in args]
    flags = list(zip(args, mapped, tensors, strict=True))
    ndim = max(m.own_ndim(arg, own) for arg, own, tensor in flags if tensor)
    return m.call(call, [m.aligned(arg, own, ndim) if tensor else arg for arg, own, tensor in flags])


def shifted_axes(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """Operators with an axis or axes counted from the front, one more now."""
    ndim, given = m.own_ndim(args[0], True), call.attrs.axis
    if given is None:
        moved: Any = list(range(1, ndim + 1))
    elif isinstance(given, (int, tvm.tirx.IntImm)):
        moved = int(given) % ndim + 1
    else:
        moved = [int(a) % ndim + 1 for a in given]
    return m.call(call, args, axis=moved)


def along_one_axis(m: Vmap, call: relax.Call, args: list[relax.Expr], mapped: list[bool]) -> relax.Expr:
    """Operators of tensors of as many axes with one axis that the call names; all of them mapped."""
    tensors = [isinstance(arg.ty, relax.TensorType) for arg in args]
    ndim = next(m.own_ndim(arg, own) for arg, own, tensor in zip(args, mapped, tensors, strict=True) if tensor)
    everywhere = [
        m.everywhere(arg, own) if tensor else arg for arg, own, tensor in zip(args, mapped, tensors, strict=True)
    ]
    return m.call(call, everywhere, axis=int(call.attrs.axis) % ndim + 1)


def window(m: Vmap, call: relax.Call, args: list[relax.Expr], _mapped: list[bool]) -> relax.Expr:
    """Pools and resampling: the mapped axis becomes part of the batch."""
    layout = str(call.attrs.layout)
    out_layout = str(getattr(call.attrs, "out_layout", "")) or layout
    value = m.rearrange(args[0], f"k {_spelt(layout, 'n')} -> {_spelt(layout, '(k n)')}")
    found = m.emit(m.call(call, [value, *args[1:]]))
    return m.rearrange(found, f"{_spelt(out_layout, '(k n)')} -> k {_spelt(out_layout, 'n')}")


def _spelt(layout: str, batch: str) -> str:
    """A layout as one side of a pattern."""
    return " ".join(batch if letter == "N" else letter.lower() for letter in layout)


def channelwise(
    m: Vmap, call: relax.Call, data: relax.Expr, vectors: Sequence[relax.Expr], channel: int, **changes: Any
) -> relax.Var:
    """The value of a call whose channels are those of all indices, bound; `separate_channels` undoes that.

    Args:
        data: mapped.
        vectors: mapped, one number a channel.
        channel: the axis of the channels in the data of one index.
        changes: attributes of the call that change.
    """
    apart, joined = _channel_patterns(m.own_ndim(data, True), channel)
    value = m.rearrange(data, f"k {apart} -> {joined}")
    folded = [m.rearrange(vector, "k c -> (k c)") for vector in vectors]
    return m.emit(m.call(call, [value, *folded], **changes))


def separate_channels(m: Vmap, value: relax.Expr, channel: int) -> relax.Expr:
    """The tensor whose channels are those of all indices, with the mapped axis in front."""
    apart, joined = _channel_patterns(ndim_of(value), channel)
    return m.rearrange(value, f"{joined} -> k {apart}")


def _channel_patterns(ndim: int, channel: int) -> tuple[str, str]:
    names = [f"a{i}" for i in range(ndim)]
    return " ".join(names), " ".join([*names[:channel], f"(k {names[channel]})", *names[channel + 1 :]])
