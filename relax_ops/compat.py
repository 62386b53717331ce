# SPDX-License-Identifier: Apache-2.0
"""What apache-tvm 0.26 and 0.27 name differently, in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax, s_tir, tirx

arithmetic: Any = tvm.sym if hasattr(tvm, "sym") else tvm.arith
"""The module of the arithmetic analyzer: tvm.sym since 0.27."""

FUSES_FORMULAS = hasattr(tvm, "sym")
"""Whether FuseTIR fuses operators whose extents are formulas, such as h - 2: TVM 0.26 raises an internal error."""

Constant: Any = tvm.ir.GenericConst if hasattr(tvm.ir, "GenericConst") else relax.Constant
"""The class of constant tensors."""

TensorLoad: Any = tvm.ir.TensorLoad if hasattr(tvm.ir, "TensorLoad") else tirx.BufferLoad
"""The class of an element read from a buffer."""

SBlockRealize: Any = s_tir.SBlockRealize if hasattr(s_tir, "SBlockRealize") else tirx.SBlockRealize
"""The class of a scheduled block's place in a loop nest."""

SBlock: Any = s_tir.SBlock if hasattr(s_tir, "SBlock") else tirx.SBlock
"""The class of a scheduled block."""

SHRINKS_BUFFERS = ("s_tir.CompactBufferAllocation", "tir.CompactBufferAllocation")
"""The names of the pass that shrinks buffers to what is used of them.

Schedules need it, whose buffers have the size of whole tensors. Kernels that are written with the sizes that they use
do not, and it is a third to a half of all passes that compile them.
"""


def array_of(constant: Any) -> np.ndarray[Any, Any]:
    """What a constant tensor holds, an attribute that is called value since 0.27."""
    return (constant.value if hasattr(constant, "value") else constant.data).numpy()


def buffer_of(region: Any) -> Any:
    """The buffer of a BufferRegion, an attribute that is called source since 0.27."""
    return region.source if hasattr(region, "source") else region.buffer


def starts_threads(function: tirx.PrimFunc) -> bool:
    """Whether a function starts the threads of a GPU itself, as some of TVM's operators do."""
    found: list[bool] = []

    def note(node: Any) -> None:
        if isinstance(node, tirx.AttrStmt) and node.attr_key == "thread_extent":
            found.append(True)

    if hasattr(tirx, "stmt_functor"):  # TVM 0.26
        tirx.stmt_functor.post_order_visit(function.body, note)
    else:
        tvm_ffi.structural_walk(function.body, [(tirx.AttrStmt, note)], order="post")
    return bool(found)
