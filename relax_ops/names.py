# SPDX-License-Identifier: Apache-2.0
"""Variables in place of symbolic extents that are formulas, inside a composition."""

from __future__ import annotations

from typing import Any

import tvm
import tvm_ffi
from tvm import relax

from relax_ops.ir import dtype_of, spec_of


class Names:
    """Variables in place of extents that are formulas, such as `h - 2`, bound by match_casts.

    TVM's RewriteDataflowReshape raises an internal error when it meets a transpose of a tensor of shape
    (2, 4, h - 2, 4); of one of shape (2, 4, y, 4) it does not.
    """

    def __init__(self, block_builder: Any) -> None:
        self._bb = block_builder
        self._known: list[tuple[Any, Any]] = []

    def tensor(self, value: Any) -> Any:
        """`value`, cast to a shape of ints and variables."""
        shape = spec_of(value, "operand", "legalization").shape
        assert shape is not None  # problem_of has made sure
        named = self._named(shape)
        return value if named is shape else self._bb.match_cast(value, relax.TensorType(named, dtype_of(value.ty)))

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        """`shape` as ints and variables."""
        named = self._named(shape)
        if named is not shape:
            self._bb.match_cast(relax.ShapeExpr(list(shape)), relax.ShapeType(list(named)))
        return named

    def _named(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        if all(isinstance(extent, (int, tvm.tirx.Var)) for extent in shape):
            return shape
        return tuple(e if isinstance(e, (int, tvm.tirx.Var)) else self._name(e) for e in shape)

    def _name(self, formula: Any) -> Any:
        for known, variable in self._known:
            if tvm_ffi.structural_equal(known, formula):
                return variable
        variable = tvm.tirx.Var(f"extent{len(self._known)}", "int64")
        self._known.append((formula, variable))
        return variable
