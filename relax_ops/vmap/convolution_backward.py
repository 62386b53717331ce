# SPDX-License-Identifier: Apache-2.0
"""All gradients of a (transposed) convolution under vmap: dX, dW and the bias gradient, each by its own rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import relax

from legalize.batching import Level
from legalize.builder import Extent
from relax_ops.backward import bias_gradient
from relax_ops.builder import RelaxBuilder
from relax_ops.ir import AnalyzerProver, dtype_of, spec_of
from relax_ops.vmap.convolution import vmap_call
from tvm_convgrad.core.arguments import Ints, Padding
from tvm_convgrad.core.backward import OPERANDS, BackwardCall, default_kernel_layout, family_kernel_layout, roles_of
from tvm_convgrad.core.backward import backward_call as checked_call
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, DIRECTIONS, FORWARD, OpEntry
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL, data_layout_of, flat_padding
from tvm_convgrad.core.type_relation import TensorSpec


def backward_call(
    block_builder: relax.BlockBuilder,
    rank: int,
    transposed: bool,
    levels: Sequence[Sequence[int | None]],
    operands: Sequence[relax.Expr],
    *,
    output_mask: Sequence[bool] = (True, True, True),
    data_layout: str | None = None,
    kernel_layout: str | None = None,
    grad_layout: str | None = None,
    strides: Ints = 1,
    padding: Padding = 0,
    dilation: Ints = 1,
    groups: int = 1,
    output_padding: Ints = 0,
    **attributes: Any,
) -> tuple[Any, Any, Any]:
    """(dX, dW, dbias) under vmap, None where `output_mask` is false.

    Each is one call of the family with the batch axes of the operands that it needs; what no batched operand reaches is
    computed once and broadcast.

    Args:
        block_builder: with a block open.
        rank: number of spatial axes.
        transposed: whether the gradients are those of a transposed convolution.
        levels: batch axes of grad, data and weight, outermost first.
        operands: grad, data, weight.
        data_layout, grad_layout: of X and of Y; None is NC… and `data_layout`.
        kernel_layout: None is OI…, or IO… of a transposed convolution, which calls its data's channels I.
        output_padding: of a transposed convolution; less than the stride or the dilation of its axis.
        attributes: out_dtype.
    """
    data_layout = data_layout or data_layout_of(rank)
    grad_layout = grad_layout or data_layout
    given = {name: block_builder.normalize(value) for name, value in zip(OPERANDS, operands, strict=True)}
    axes = {name: [level[i] for level in levels] for i, name in enumerate(OPERANDS)}
    checked = checked_call(
        {
            name: TensorSpec(tuple(_one_shape(value, axes[name], name)), rank + 2, str(dtype_of(value.ty)))
            for name, value in given.items()
        },
        AnalyzerProver(),
        stride=strides,
        padding=padding,
        dilation=dilation,
        transposed=transposed,
        output_padding=output_padding,
        groups=groups,
        output_mask=output_mask,
        grad_layout=grad_layout,
        data_layout=data_layout,
        kernel_layout=kernel_layout,
    )
    whole = given["grad"]
    given["grad"] = _cropped(block_builder, checked, given["grad"], grad_layout, axes["grad"])
    attributes |= {"strides": checked.strides, "padding": flat_padding(checked.padding)}
    attributes |= {"dilation": checked.dilation, "groups": checked.groups}
    roles = roles_of(transposed)
    layouts = {
        "grad_layout": data_layout if transposed else grad_layout,
        "data_layout": grad_layout if transposed else data_layout,
        "kernel_layout": family_kernel_layout(kernel_layout or default_kernel_layout(rank, transposed), transposed),
    }
    values = {roles[name]: value for name, value in given.items()}
    dims = {roles[name]: dim for name, dim in axes.items()}
    shapes = {name: _one_shape(values[name], dims[name], name) for name in OPERANDS}
    batch = _batch(values, dims)
    direction = BACKWARD_DATA if transposed else FORWARD
    results: list[Any] = []
    for wanted, (gradient, needed) in zip(output_mask, direction.gradients, strict=False):
        found = DIRECTIONS[gradient]
        needs = tuple(direction.result if name == "result" else name for name in needed)
        if not wanted:
            results.append(None)
            continue
        own: dict[str, Any] = {}
        if found is BACKWARD_WEIGHT:
            own["kernel_size"] = [int(shapes["weight"][layouts["kernel_layout"].index(axis)]) for axis in SPATIAL[rank]]
        elif found is BACKWARD_DATA:
            own["data_shape"] = shapes["data"]
        reached = [number for number in range(len(levels)) if any(dims[name][number] is not None for name in needs)]
        used: list[Level] = [{name: dims[name][number] for name in needs} for number in reached]
        tensors = [values[name] for name in needs]
        result = vmap_call(block_builder, OpEntry(found, rank), used, tensors, **own, **layouts, **attributes)
        results.append(_broadcast(block_builder, result, reached, batch))
    bias = None
    if output_mask[2]:
        name = roles["grad"]
        bias = bias_gradient(block_builder, whole, grad_layout, str(dtype_of(whole.ty)), dims[name])
        reached = [number for number, dim in enumerate(dims[name]) if dim is not None]
        bias = _broadcast(block_builder, bias, reached, batch)
    return results[0], results[1], bias


def _cropped(
    block_builder: relax.BlockBuilder, call: BackwardCall, grad: relax.Expr, layout: str, dims: Sequence[int | None]
) -> relax.Expr:
    """grad, with its batch axes, without the elements that the transposed convolution wrote no product to."""
    cropped = {SPATIAL[len(call.crop)][i]: crop for i, crop in enumerate(call.crop) if crop}
    if not cropped:
        return grad
    shape = list(spec_of(grad, "grad", "convolution").shape or ())
    own = list(range(len(shape)))
    for dim in dims:
        if dim is not None:
            del own[dim]
    places = [own[layout.index(letter)] for letter in cropped]
    ends = [shape[place] - crop for place, crop in zip(places, cropped.values(), strict=True)]
    sliced = relax.op.strided_slice(grad, axes=places, begin=[0] * len(places), end=ends, assume_inbound=True)
    return block_builder.emit(sliced)


def _one_shape(value: relax.Expr, dims: Sequence[int | None], name: str) -> list[Any]:
    shape = spec_of(value, name, "convolution").shape
    if shape is None:
        raise UnsupportedError(f"the shape of {name} is not known at compile time; give it by R.match_cast")
    extents = list(shape)
    for dim in dims:
        if dim is not None:
            del extents[dim]
    return extents


def _batch(values: dict[str, Any], dims: dict[str, list[int | None]]) -> list[Any]:
    """The number of entries of each level, from the first operand that has it."""
    found: dict[int, Any] = {}
    for name in OPERANDS:
        shape = list(spec_of(values[name], name, "convolution").shape or ())
        for number, dim in enumerate(dims[name]):
            if dim is not None:
                found.setdefault(number, shape.pop(dim))
    return [found[number] for number in sorted(found)]


def _broadcast(
    block_builder: relax.BlockBuilder, result: Any, reached: Sequence[int], batch: Sequence[Extent]
) -> relax.Expr:
    """The result with all of the batch axes in front, of which it has those of the levels `reached`."""
    missing = [number for number in range(len(batch)) if number not in reached]
    if not missing:
        return result
    shape = RelaxBuilder(block_builder).shape(result)
    own = shape[len(reached) :]
    expanded = block_builder.emit(relax.op.expand_dims(result, missing))
    return block_builder.emit(relax.op.broadcast_to(expanded, relax.ShapeExpr([*batch, *own])))
