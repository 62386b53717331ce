# SPDX-License-Identifier: Apache-2.0
"""Between Relax and the core: types to TensorSpec, calls to ConvAttributes and ConvProblem, extents and proofs."""

from __future__ import annotations

import re
from collections.abc import Sequence

import tvm
from tvm import relax

from relax_ops.compat import arithmetic
from tvm_convgrad.core.arguments import problem_of_call, problem_of_stock_call, stored_attributes
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BY_NAME, OpEntry
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, Extent, Size
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.type_relation import ConvAttributes, TensorSpec

PREFIX = "relax.nn."
TRANSPOSED = tuple(f"conv{rank}d_transpose" for rank in SPATIAL)
"""The stock transposed convolutions, without prefix."""
_PART = "tvm_convgrad.part"
_CONSTANT = re.compile(r"T\.int\d+\((-?\d+)\)")


class AnalyzerProver:
    """The catalogue's Prover on TVM's arithmetic analyzer."""

    def __init__(self) -> None:
        self._analyzer = arithmetic.Analyzer()

    def equal(self, a: Size, b: Size) -> bool | None:
        """Whether two extents are equal: proven, disproven, or None."""
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        if self._analyzer.can_prove_equal(a, b):
            return True
        if self._analyzer.can_prove(tvm.tirx.NE(_expr(a), _expr(b))):
            return False
        return None

    def show(self, extent: Size) -> str:
        """An extent simplified, as text: `h - 2`."""
        return str(extent) if isinstance(extent, int) else _text(self._analyzer.simplify(extent))


def extent_of(value: Size) -> Size:
    """An int where the extent is a constant, else the IR expression."""
    if isinstance(value, int):
        return value
    if isinstance(value, tvm.tirx.IntImm):
        return int(value.value)
    return value


def extents_of(shape: relax.ShapeExpr | Sequence[Size]) -> tuple[Size, ...]:
    """Extents of a ShapeExpr, a shape's values, or any sequence of them."""
    values = shape.values if hasattr(shape, "values") and not isinstance(shape, dict) else shape
    return tuple(extent_of(v) for v in values)


def dtype_of(value: relax.TensorType) -> str | None:
    """The element type of a tensor type, None if it is not known."""
    dtype = value.dtype
    text = "" if dtype is None else str(getattr(dtype, "dtype", dtype))
    return None if text in ("", "void") else text


def spec_of(expr: relax.Expr, name: str, op: str) -> TensorSpec:
    """The TensorSpec of a Relax expression.

    Raises:
        DTypeError: it is not a tensor.
    """
    ty = expr.ty
    if not isinstance(ty, relax.TensorType):
        raise DTypeError(f"{op}: {name} must be a tensor, but is {ty}")
    ndim = None if ty.ndim < 0 else int(ty.ndim)
    shape = None if ty.shape is None else shape_values(ty.shape)
    return TensorSpec(shape, ndim, dtype_of(ty))


def shape_values(shape: relax.Expr) -> tuple[Size, ...] | None:
    """Extents of a shape expression: those written in it, or those of its type; None if they are not known."""
    if isinstance(shape, relax.ShapeExpr):
        return extents_of(shape.values)
    ty = shape.ty
    return None if not isinstance(ty, relax.ShapeType) or ty.values is None else extents_of(ty.values)


def constant_extents(expr: relax.Expr) -> tuple[int, ...] | None:
    """The shape of a tensor expression; None if it is not known, an extent is symbolic, or it is not a tensor."""
    return constant_shape(expr.ty)


def constant_shape(type_: relax.Type) -> tuple[int, ...] | None:
    """The same of a type."""
    shape = getattr(type_, "shape", None)
    if not isinstance(shape, relax.ShapeExpr):
        return None
    extents = extents_of(shape)
    return extents if all(isinstance(extent, int) for extent in extents) else None


def entry_of(call: relax.Call) -> OpEntry:
    """The catalogue's entry of a call to one of the family's operators or to a stock convolution."""
    return BY_NAME[str(call.op.name).removeprefix(PREFIX)]


def pairs_of(flat: Sequence[int], rank: int) -> tuple[tuple[int, int], ...]:
    """TVM's flat padding (all lows, then all highs) as (low, high) pairs."""
    ints = [int(p) for p in flat]
    return tuple(zip(ints[:rank], ints[rank:], strict=True))


def attributes_of(call: relax.Call) -> ConvAttributes:
    """The checked attributes of a call to one of the six operators.

    Raises:
        ProblemError, DTypeError: an attribute breaks a rule.
    """
    entry, attrs = entry_of(call), call.attrs
    if len(attrs.padding) != 2 * entry.rank:
        raise ProblemError(f"{entry.name}: padding needs {2 * entry.rank} entries, but has {len(attrs.padding)}")
    return stored_attributes(entry, **{name: getattr(attrs, name) for name in entry.attributes})


def problem_of(call: relax.Call) -> ConvProblem:
    """The ConvProblem of a well-typed call to one of the six operators or to a stock convolution.

    Symbolic extents become their text.

    Raises:
        UnsupportedError: a shape or type is not known.
    """
    entry = entry_of(call)
    shapes: dict[str, tuple[Size, ...]] = {}
    dtypes: dict[str, str] = {}
    for name, operand in zip(entry.direction.operands, call.args, strict=False):
        spec = spec_of(operand, name, entry.name)
        if spec.shape is None or spec.dtype is None:
            raise UnsupportedError(
                f"{entry.name}: the shape or dtype of {name} is not known at compile time ({operand.ty}); "
                f"give it by R.match_cast"
            )
        shapes[name], dtypes[name] = spec.shape, spec.dtype
    if entry.direction.name == "forward":
        shapes["data"] = tuple(map(_name, shapes["data"]))
        dtypes["grad"] = dtype_of(call.ty) or dtypes["data"]
        return problem_of_stock_call(entry.name, entry.rank, call.attrs, shapes, dtypes)
    attributes = attributes_of(call)
    if entry.direction.name == "backward_data":
        values = shape_values(call.args[2])
        if values is None:
            raise UnsupportedError(f"{entry.name}: data_shape is not known at compile time; give it by R.match_cast")
        shapes["data"] = values
    return problem_of_call(entry.direction, attributes, shapes, dtypes, _name)


def transposed_problem_of(call: relax.Call) -> ConvProblem:
    """The problem whose dgrad a stock transposed convolution is: its result is X, its data dY, its weight W.

    Raises:
        UnsupportedError: a shape or type is not known, or the result is larger than any X with that dY.
        ProblemError, DTypeError: no such convolution.
    """
    attrs, name = call.attrs, str(call.op.name).removeprefix(PREFIX)
    result, data, weight = (
        spec_of(value, what, name)
        for value, what in ((call, "result"), (call.args[0], "data"), (call.args[1], "weight"))
    )
    if None in (result.shape, result.dtype, data.shape, data.dtype, weight.shape, weight.dtype):
        raise UnsupportedError(f"{name}: a shape or dtype is not known at compile time; give it by R.match_cast")
    shapes = {"data": tuple(map(_name, result.shape or ())), "weight": weight.shape or (), "grad": data.shape or ()}
    dtypes = {"data": str(result.dtype), "weight": str(weight.dtype), "grad": str(data.dtype)}
    return problem_of_stock_call(name, len(attrs.strides), attrs, shapes, dtypes, transposed=True)


def direction_of(operator: str) -> str:
    """The direction that an operator computes, by its name without `relax.nn.`: a transposed convolution is dgrad."""
    return BACKWARD_DATA.name if operator in TRANSPOSED else BY_NAME[operator].direction.name


def part(call: relax.Call) -> relax.Call:
    """The call marked as a part of a composition: its legalization is TVM's own, and it is in no record."""
    return relax.Call(call.op, call.args, call.attrs, call.ty_args, tvm.ir.Span(tvm.ir.SourceName(_PART), 0, 0, 0, 0))


def is_part(call: relax.Call) -> bool:
    """Whether `part` has marked the call. The mark is its span, which passes carry along."""
    return call.span is not None and str(call.span.source_name.name) == _PART


def _name(extent: Size) -> Extent:
    return extent if isinstance(extent, int) else _text(extent)


def _text(extent: Size) -> str:
    """An IR expression without the types that TVM prints around its constants."""
    return _CONSTANT.sub(r"\1", str(extent))


def _expr(extent: Size) -> tvm.ir.PrimExpr:
    return tvm.tirx.IntImm("int64", extent) if isinstance(extent, int) else extent
