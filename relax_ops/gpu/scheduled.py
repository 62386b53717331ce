# SPDX-License-Identifier: Apache-2.0
"""Functions for GPUs whose schedule is fixed where they are made: one thread for each element of the result.

TVM's GPU pipeline fuses a function with those around it, and schedules a reduction across threads. With a combiner of
our own, such as a maximum that keeps NaN, it cannot, and finds out too late; and a window of 9 places gets a block.
"""

from __future__ import annotations

import tvm
from tvm import relax, tirx
from tvm.s_tir import dlight

from tvm_convgrad.codegen.hardware import is_gpu

THREADS = 256
"""Threads of a block in kernels that are written here."""

_OPAQUE = 8  # TVM's kOpaque: nothing is fused with it


def lowers_for_gpu() -> bool:
    """Whether the target of the lowering that is under way is a GPU."""
    return is_gpu(tvm.target.Target.current(allow_none=True))


def one_thread_each(block_builder: relax.BlockBuilder, call: relax.Call) -> relax.Call:
    """The call of a TIR function, which for a GPU is scheduled here; for a CPU the call as it is.

    Args:
        block_builder: its module has the function.
        call: what `block_builder.call_te` gives.
    """
    if not lowers_for_gpu():
        return call
    target = tvm.target.Target.current()
    function = block_builder.get()[call.args[0]]
    return scheduled(block_builder, call, dlight.gpu.Fallback().apply(function, target, False).mod["main"])


def scheduled(block_builder: relax.BlockBuilder, call: relax.Call, function: tirx.PrimFunc | None = None) -> relax.Call:
    """The call of a TIR function that TVM's pipeline neither fuses nor schedules.

    Args:
        block_builder, call: as for `one_thread_each`.
        function: in place of the one that is called.
    """
    variable = call.args[0]
    function = block_builder.get()[variable] if function is None else function
    fixed = function.with_attr("op_pattern", _OPAQUE).with_attr("tirx.is_scheduled", True)
    block_builder.update_func(variable, fixed)
    return call


__all__ = ["THREADS", "lowers_for_gpu", "one_thread_each", "scheduled"]
