# SPDX-License-Identifier: Apache-2.0
"""Calls of libraries that write a sum in the place of a summand: TIR functions around them, called in place.

The library is given the summand's tensor twice, as an operand and as the result. TVM's own way of calling a library,
call_dps_packed, always allocates the result; that call_tir_inplace overwrites an operand, its passes and ours know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import tvm
from tvm import relax, te, tirx
from tvm.relax.expr_functor import PyExprMutator, mutator

_OPAQUE = 8
"""TVM's kOpaque: FuseOps takes calls in place for others, and must not fuse them."""


def can_overwrite(target: tvm.target.Target) -> bool:
    """Whether a library's calls in programs for a target can be in place: the functions run where the program does, on
    the host, and hand tensors of a GPU on."""
    return target.kind.name in ("llvm", "cuda")


def overwriting(module: tvm.IRModule, places: Mapping[str, Sequence[int]]) -> tvm.IRModule:
    """The module with its calls of some of the libraries' functions in place.

    Args:
        module: of Relax functions, its partitions compiled.
        places: by symbol, for each result the number of the argument that it overwrites, -1 where it is a new tensor.
    """
    if not places:
        return module
    rewriter = _InPlace(module, places)
    for variable, function in module.functions_items():
        if isinstance(function, relax.Function):
            rewriter.builder_.update_func(variable, rewriter.visit_expr(function))
    return rewriter.builder_.get()


@mutator
class _InPlace(PyExprMutator):
    def __init__(self, module: tvm.IRModule, places: Mapping[str, Sequence[int]]) -> None:
        super().__init__(module)
        self._places = places

    def visit_call_(self, call: relax.Call) -> relax.Expr:
        """A call in the place of a call of one of the symbols."""
        if not isinstance(call.op, tvm.ir.Op) or str(call.op.name) != "relax.call_dps_packed":
            return super().visit_call_(call)
        symbol = str(call.args[0].global_symbol)
        if symbol not in self._places:
            return super().visit_call_(call)
        operands = [self.visit_expr(operand) for operand in call.args[1].fields]
        (given,) = call.ty_args
        results = list(given.fields) if isinstance(given, relax.TupleType) else [given]
        variable = self.builder_.add_func(
            _calling(symbol, [each.ty for each in operands], results), f"{symbol}_in_place"
        )
        places = self._places[symbol]
        overwritten = [operands[place] for place in places if place >= 0]
        numbers = [len(operands) + number if place >= 0 else -1 for number, place in enumerate(places)]
        return relax.op.call_tir_inplace(variable, [*operands, *overwritten], numbers, results)


def _calling(symbol: str, operands: Sequence[relax.TensorType], results: Sequence[relax.TensorType]) -> tirx.PrimFunc:
    """The TIR function of operands and results that passes them on to a symbol.

    It is linked to it: what generated code looks up by name is not found in the library that it is a part of.
    """
    own: dict[str, tirx.Var] = {}  # a variable for each extent that is known at run time only

    def extents(tensor: relax.TensorType) -> list[tirx.PrimExpr]:
        return [
            extent
            if isinstance(extent, tirx.IntImm)
            else own.setdefault(str(extent), tirx.Var(f"n{len(own)}", "int64"))
            for extent in tensor.shape.values
        ]

    given = [te.placeholder(extents(each), str(each.dtype), f"p{number}") for number, each in enumerate(operands)]
    made = te.extern(
        [extents(each) for each in results],
        given,
        lambda taken, stored: tirx.call_cpacked(f"__tvm_ffi_{symbol}", *taken, *stored),
        name="result",
        dtype=[str(each.dtype) for each in results],
    )
    stored = [made] if isinstance(made, te.Tensor) else list(made)
    function = te.create_prim_func([*given, *stored])
    attributes = {"op_pattern": _OPAQUE, "tirx.noalias": False, "tirx.is_scheduled": True}
    return function.without_attr("global_symbol").with_attr(attributes)


__all__ = ["can_overwrite", "overwriting"]
