# SPDX-License-Identifier: Apache-2.0
"""Gradients that stock Relay has, where they raise or are wrong; elsewhere stock's own are called.

sum, mean                      an extent is Any: stock raises
take                           stock makes a loop, which Relay's graph executor cannot run; no matrix of indices
nn.max_pool2d, nn.avg_pool2d   dilation: stock ignores it and is silently wrong, so it is refused
"""

from __future__ import annotations

from collections.abc import Callable

import tvm
from tvm import relay

from relay_ops.gradients.contract import Rule, Rules, extents_of, known
from tvm_convgrad.core.errors import UnsupportedError


def _has_any(call: relay.Call) -> bool:
    return None in extents_of(call.args[0])


def _axes(call: relay.Call) -> list[int]:
    """The axes that are summed over."""
    rank = len(call.args[0].checked_type.shape)
    if call.attrs.axis is None:
        return list(range(rank))
    given = sorted(int(axis) % rank for axis in call.attrs.axis)
    return [axis for axis in range(rank) if axis not in given] if call.attrs.exclude else given


def _spread(call: relay.Call, output_grad: relay.Expr) -> relay.Expr:
    """The gradient of a sum: that of the result for each of its terms."""
    if not call.attrs.keepdims:
        for axis in _axes(call):
            output_grad = relay.expand_dims(output_grad, axis)
    return relay.broadcast_to_like(output_grad, call.args[0])


def _sum(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    return [_spread(call, output_grad)]


def _mean(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    data = call.args[0]
    dtype = data.checked_type.dtype
    count = relay.const(1, dtype)
    shape = relay.shape_of(data, "int64")
    for axis in _axes(call):
        count = count * relay.cast(relay.take(shape, relay.const(axis, "int64"), axis=0), dtype)
    return [_spread(call, output_grad / count)]


def _take(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    """Each element of the gradient is added to where its index points.

    Raises:
        UnsupportedError: batch_dims, or an extent of the data that is Any.
    """
    data, indices = call.args
    if int(call.attrs.batch_dims or 0):
        raise UnsupportedError("gradient of take: batch_dims is not served; use gather_nd, which has a gradient")
    extents = [known(extent, call, f"axis {axis} of the data") for axis, extent in enumerate(extents_of(data))]
    flat = call.attrs.axis is None
    axis = 0 if flat else int(call.attrs.axis) % len(extents)
    if flat:
        zeros, count = relay.reshape(relay.zeros_like(data), (-1,)), 1
        for extent in extents:
            count *= extent
    else:
        zeros, count = relay.zeros_like(data), extents[axis]
    dtype = indices.checked_type.dtype
    if str(call.attrs.mode) == "wrap":
        places = relay.floor_mod(indices, relay.const(count, dtype))
    else:
        places = relay.clip(indices, 0, count - 1)
    rank, added = 1 if flat else len(extents), len(indices.checked_type.shape)
    front = [axis, *(i for i in range(rank) if i != axis)]
    taken = [*range(axis, axis + added), *(i for i in range(rank - 1 + added) if not axis <= i < axis + added)]
    updates = relay.transpose(output_grad, taken) if taken else output_grad
    sums = relay.scatter_nd(relay.transpose(zeros, front), relay.expand_dims(places, 0), updates, mode="add")
    found = relay.transpose(sums, [front.index(i) for i in range(rank)])
    return [relay.reshape_like(found, data) if flat else found, relay.zeros_like(indices)]


def _dilated(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
    raise UnsupportedError(
        f"gradient of {call.op.name}: dilation={[int(d) for d in call.attrs.dilation]} is not served, as the gradient "
        "operators of Relay's pools have none; pool without dilation"
    )


def _has_dilation(call: relay.Call) -> bool:
    return any(int(step) != 1 for step in call.attrs.dilation or ())


def _or_stock(name: str, condition: Callable[[relay.Call], bool], rule: Rule) -> Rule:
    """`rule` where `condition` is true of a call, elsewhere stock's own."""
    stock = tvm.ir.Op.get(name).get_attr("FPrimalGradient")

    def chosen(call: relay.Call, output_grad: relay.Expr) -> list[relay.Expr]:
        return rule(call, output_grad) if condition(call) else list(stock(call, output_grad))

    return chosen


_CONDITIONS: dict[str, tuple[Callable[[relay.Call], bool], Rule]] = {
    "sum": (_has_any, _sum),
    "mean": (_has_any, _mean),
    "nn.max_pool2d": (_has_dilation, _dilated),
    "nn.avg_pool2d": (_has_dilation, _dilated),
}

RULES: Rules = {name: _or_stock(name, *chosen) for name, chosen in _CONDITIONS.items()} | {"take": _take}
