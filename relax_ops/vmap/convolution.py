# SPDX-License-Identifier: Apache-2.0
"""vmap of the family on Relax expressions: legalize.batching with the calls and proofs of this IR."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tvm import relax

from legalize.batching import Level, UnbatchedCall, vmap
from legalize.builder import Extent
from relax_ops.builder import RelaxBuilder
from relax_ops.ir import AnalyzerProver, extents_of, spec_of
from relax_ops.ops import make_call
from relax_ops.program import forward_call
from relax_ops.vmap.unfolded import product_call
from tvm_convgrad.core.arguments import make_attributes
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, FORWARD, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.transposed import transposed_call
from tvm_convgrad.core.type_relation import ConvAttributes, TensorSpec, result_dtype


def vmap_call(
    block_builder: relax.BlockBuilder,
    entry: OpEntry,
    levels: Sequence[Level],
    operands: Sequence[relax.Expr],
    *,
    data_shape: Any = None,
    grad_layout: str | None = None,
    data_layout: str | None = None,
    **attributes: Any,
) -> Any:
    """Emit a call of the family under vmap.

    Args:
        block_builder: with a block open.
        entry: the operator.
        levels: outermost first.
        operands: Relax tensors of known shape, batch axes included.
        data_shape: dgrad only, of one result, without batch axes.
        grad_layout, data_layout, attributes: those of the operator, batch axes excluded.

    Raises:
        ProblemError, DTypeError: the convolutions do not exist, or the operands disagree about the batch.
        UnsupportedError: a shape is not known at compile time.
    """
    builder, prover = RelaxBuilder(block_builder), AnalyzerProver()
    values = dict(zip(entry.direction.operands, map(block_builder.normalize, operands), strict=True))
    specs = [
        _unbatched(value, name, entry, [level[name] for level in levels], builder) for name, value in values.items()
    ]
    shapes = dict(zip(values, (spec.shape for spec in specs), strict=True))
    if entry.direction is BACKWARD_DATA:
        if data_shape is None:
            raise ProblemError(
                f"{entry.name}: data_shape is missing; it is the shape of one result, without batch axes"
            )
        data_shape = extents_of(data_shape)
        shapes["data"] = data_shape
    if entry.direction is FORWARD and grad_layout is None:
        grad_layout = data_layout
    made = make_attributes(
        entry,
        data_shape=lambda: shapes["data"],
        weight_shape=lambda: shapes["weight"],
        grad_layout=grad_layout,
        data_layout=data_layout,
        **attributes,
    )
    _check_one(entry, made, specs, data_shape)
    dtype = result_dtype(made, specs)
    assert dtype is not None  # both operands' types are known

    def call(unbatched: UnbatchedCall) -> Any:
        own = replace(made, groups=unbatched.groups)
        if unbatched.carried:
            return product_call(block_builder, entry.direction, own, unbatched, dtype)
        return block_builder.emit(_call(block_builder, entry, own, unbatched.operands, unbatched.data_shape, dtype))

    return vmap(
        builder,
        entry.direction,
        levels,
        values,
        {name: made.layout(name) for name in ("grad", "data", "weight")},
        made.groups,
        data_shape,
        call,
        prover.equal,
    )


def transposed_arguments(
    block_builder: relax.BlockBuilder,
    rank: int,
    levels: Sequence[Level],
    data: relax.Expr,
    weight: relax.Expr,
    **attributes: Any,
) -> dict[str, Any]:
    """The arguments of dgrad, `data_shape` included, that make it a transposed convolution of data by weight.

    Args:
        levels: batch axes of "grad" (the data) and "weight".
        data, weight: with their batch axes.
        attributes: those of core.transposed.transposed_call, which states the errors, too.
    """
    entry, builder = OpEntry(BACKWARD_DATA, rank), RelaxBuilder(block_builder)

    def shapes() -> tuple[Sequence[Extent], Sequence[Extent]]:
        first, second = (
            _unbatched(block_builder.normalize(v), name, entry, [level[name] for level in levels], builder).shape or ()
            for name, v in (("grad", data), ("weight", weight))
        )
        return first, second

    call = transposed_call(rank, shapes, **attributes)
    return vars(call) | {"data_shape": list(call.data_shape)}


def _unbatched(
    value: relax.Expr, name: str, entry: OpEntry, dims: Sequence[int | None], builder: RelaxBuilder
) -> TensorSpec:
    """The type of an operand without its batch axes.

    Raises:
        UnsupportedError, ProblemError: its shape is not known, or does not have a batch axis where it should.
    """
    spec = spec_of(value, name, entry.name)
    if spec.shape is None or spec.dtype is None:
        raise UnsupportedError(f"{entry.name}: the shape or dtype of {name} is not known; give it by R.match_cast")
    shape = list(spec.shape)
    wanted = entry.rank + 2 + sum(dim is not None for dim in dims)
    if len(shape) != wanted:
        raise ProblemError(
            f"{entry.name}: {name} has {len(shape)} axes; with the batch axes {list(dims)} it has {wanted}"
        )
    for dim in dims:
        if dim is not None:
            del shape[dim]
    return TensorSpec(tuple(shape), entry.rank + 2, spec.dtype)


def _check_one(entry: OpEntry, made: ConvAttributes, specs: Sequence[TensorSpec], data_shape: Any) -> None:
    """Infer the type of one of the calls, so that errors name its own extents."""
    if entry.direction is FORWARD:
        shapes = [tuple(e if isinstance(e, int) else str(e) for e in spec.shape or ()) for spec in specs]
        geometry: Mapping[str, Any] = {
            name: getattr(made, name) for name in ("strides", "padding", "dilation", "groups")
        }
        layouts = {name: getattr(made, name) for name in ("data_layout", "kernel_layout", "grad_layout")}
        ConvProblem.from_shapes(shapes[0], [int(e) for e in shapes[1]], **geometry, **layouts)
        return
    stand_ins = [relax.Var("operand", relax.TensorType(list(spec.shape or ()), spec.dtype)) for spec in specs]
    fresh = relax.BlockBuilder()
    fresh.normalize(_call(fresh, entry, made, stand_ins, data_shape, made.out_dtype))


def _call(
    block_builder: relax.BlockBuilder,
    entry: OpEntry,
    made: ConvAttributes,
    operands: Sequence[relax.Expr],
    data_shape: Any,
    dtype: str | None,
) -> Any:
    geometry: dict[str, Any] = {
        "strides": made.strides,
        "padding": made.padding,
        "dilation": made.dilation,
        "groups": made.groups,
        "grad_layout": made.grad_layout,
        "data_layout": made.data_layout,
        "kernel_layout": made.kernel_layout,
        "out_dtype": dtype,
    }
    if entry.direction is FORWARD:
        return forward_call(block_builder, *operands, **geometry)
    own = {"kernel_size": made.kernel_size} if entry.direction is BACKWARD_WEIGHT else {"data_shape": list(data_shape)}
    first, second = operands
    return make_call(entry, first, second, **own, **geometry)
