# SPDX-License-Identifier: Apache-2.0
"""FLegalize of max pools and their gradients: a CPU kernel where one covers the call, else tensor expressions.

TVM lowers the gradient of a 2-D pool to a loop over all windows for each element; the kernel takes 30 times less. Its
own pools lose NaN, and give the lowest finite number for windows of -inf; they serve packed layouts and integers only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax

from relax_ops import pooling
from relax_ops.compat import SBlock, SBlockRealize
from relax_ops.gradients.common import FLOATS
from relax_ops.ir import constant_extents, shape_values
from tvm_convgrad.kernels.loops import MAX_INDEX
from tvm_convgrad.kernels.max_pool import MaxPool, Triple, max_pool_backward_kernel, max_pool_kernel
from tvm_convgrad.kernels.max_pool_channels import channels_last_backward_kernel, channels_last_kernel
from tvm_convgrad.kernels.target import machine_of

_LETTERS = {1: "W", 2: "HW", 3: "DHW"}
FORWARD = {f"relax.nn.max_pool{rank}d": rank for rank in _LETTERS}
BACKWARD = ("relax.grad.max_pool2d_backward", pooling.MAX)


def _layouts(rank: int) -> tuple[str, str]:
    """Channels first and channels last."""
    return "NC" + _LETTERS[rank], "N" + _LETTERS[rank] + "C"


def _pool_of(call: Any, data: Any, result: Any) -> MaxPool | None:
    """The pool of a call, or None where there is no kernel for it."""
    attrs, rank = call.attrs, len(call.attrs.pool_size)
    shape, results, dtype = constant_extents(data), constant_extents(result), str(data.ty.dtype)
    layout = str(attrs.layout)
    plain = layout in _layouts(rank) and layout == str(getattr(attrs, "out_layout", "") or layout)
    if shape is None or results is None or not plain or dtype not in ("float32", "float64"):
        return None
    if any(int(dilation) != 1 for dilation in attrs.dilation) or math.prod(shape) > MAX_INDEX:
        return None

    def triple(values: Any, fill: int) -> Triple:
        filled = [fill] * (3 - rank) + [int(value) for value in values]
        return filled[0], filled[1], filled[2]

    first = layout.index("C") % (rank + 1)  # of the spatial axes, less one
    pool = MaxPool(
        planes=shape[0] * shape[layout.index("C")],
        extents=triple(shape[1 + first : 1 + first + rank], 1),
        results=triple(results[1 + first : 1 + first + rank], 1),
        kernel=triple(attrs.pool_size, 1),
        strides=triple(attrs.strides, 1),
        low=triple(list(attrs.padding)[:rank], 0),
        dtype=dtype,
    )
    return None if pool.refusal else pool


def _is_plain(call: Any, data: Any) -> bool:
    """Whether the tensor expressions of relax_ops.pooling cover the call: floats in a layout that is not packed."""
    attrs, rank = call.attrs, len(call.attrs.pool_size)
    layout = str(attrs.layout)
    same = layout == str(getattr(attrs, "out_layout", "") or layout)
    known = all(each.ty.shape is not None and shape_values(each.ty.shape) is not None for each in (*call.args, call))
    return same and known and sorted(layout) == sorted("NC" + _LETTERS[rank]) and str(data.ty.dtype) in FLOATS


def _legalization(stock: Callable[[Any, Any], Any], is_forward: bool) -> Callable[[Any, Any], Any]:
    fallback = pooling.legalize_max_pool if is_forward else pooling.legalize

    def legalize(block_builder: Any, call: Any) -> Any:
        data, result = (call.args[0], call) if is_forward else (call.args[1], call.args[0])
        machine = machine_of(tvm.target.Target.current(allow_none=True))
        pool = _pool_of(call, data, result) if machine is not None else None
        if pool is None or machine is None:
            return fallback(block_builder, call) if _is_plain(call, data) else stock(block_builder, call)
        name = "max_pool" if is_forward else "max_pool_backward"
        shapes = [shape for argument in (*call.args, call) if (shape := constant_extents(argument)) is not None]
        if str(call.attrs.layout).endswith("C"):
            make_last = channels_last_kernel if is_forward else channels_last_backward_kernel
            function = make_last(pool, shapes, machine.lanes(pool.dtype), "")
        else:
            make = max_pool_kernel if is_forward else max_pool_backward_kernel
            function = make(pool, shapes, "")
        function = _in_root_block(function)
        variable = block_builder.add_func(function, name)
        return relax.op.call_tir(variable, list(call.args), call.ty)

    legalize.__doc__ = "FLegalize of a max pool, or of its gradient."
    return legalize


def _in_root_block(function: Any) -> Any:
    """The function with its body in a block: TVM's search for reshapes fails on functions of one operand without."""
    block = SBlock([], [], [], "root", function.body)
    return function.with_body(SBlockRealize([], tvm.tirx.IntImm("bool", 1), block))


def legalizations() -> dict[str, Callable[[Any, Any], Any]]:
    """Legalization of each operator; those that are there already serve what the kernels do not."""
    found = {}
    for name in (*FORWARD, *BACKWARD):
        stock = tvm.ir.Op.get(name).get_attr("FLegalize")
        found[name] = _legalization(stock, name in FORWARD)
    return found
