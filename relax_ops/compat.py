# SPDX-License-Identifier: Apache-2.0
"""What apache-tvm 0.26 and 0.27 name differently, in one place."""

from __future__ import annotations

from collections.abc import Callable
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

TirCall: Any = tirx.Call if hasattr(tirx, "Call") else tvm.ir.Call
"""The class of a call in a TIR function."""

SBlockRealize: Any = s_tir.SBlockRealize if hasattr(s_tir, "SBlockRealize") else tirx.SBlockRealize
"""The class of a scheduled block's place in a loop nest."""

SBlock: Any = s_tir.SBlock if hasattr(s_tir, "SBlock") else tirx.SBlock
"""The class of a scheduled block."""

NARROWS_INDICES = ("tirx.NarrowDataType", "tir.NarrowDataType")
"""The names of the pass that makes 32-bit indices of 64-bit ones."""

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


def nodes_of(function: tirx.PrimFunc, *kinds: type) -> list[Any]:
    """The nodes of these classes in a function's body, each occurrence, inner ones first."""
    return nodes_within(function.body, *kinds)


def nodes_within(part: Any, *kinds: type) -> list[Any]:
    """The nodes of these classes in a statement or an expression, as `nodes_of` gives them."""
    found: list[Any] = []
    if hasattr(tirx, "stmt_functor"):  # TVM 0.26
        tirx.stmt_functor.post_order_visit(part, lambda node: found.append(node) if isinstance(node, kinds) else None)
    else:
        tvm_ffi.structural_walk(part, [(kinds, found.append)], order="post")
    return found


def replaced(statement: tirx.Stmt, kinds: tuple[type, ...], replace: Callable[[Any], Any]) -> tirx.Stmt:
    """A statement in which each node of these classes is what `replace` gives for it; inner ones first."""
    if hasattr(tirx, "stmt_functor"):  # TVM 0.26
        names = [f"tirx.{kind.__name__}" for kind in kinds]
        return tirx.stmt_functor.ir_transform(statement, None, replace, names)
    return tvm_ffi.structural_map(statement, [(kinds, replace)], order="post")


def starts_threads(function: tirx.PrimFunc) -> bool:
    """Whether a function starts the threads of a GPU itself, as some of TVM's operators do."""
    return any(node.attr_key == "thread_extent" for node in nodes_of(function, tirx.AttrStmt))
