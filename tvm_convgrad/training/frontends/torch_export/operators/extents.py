# SPDX-License-Identifier: Apache-2.0
"""Numbers computed from a free extent (x.shape[0] - 1, x.numel(), 1 / len(x)) as scalar tensors.

torch.export keeps them as integers and floats of Python, which only a run of the program knows. Where a tensor is
multiplied by one, divided by it or compared with it, a scalar tensor takes its place, computed by operators of tensors
from the extents themselves. In float32 it is exact below 2**24.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from tvm import relax

from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.frontends.torch_export.operators.indexing import extent_of
from tvm_convgrad.training.frontends.torch_export.places import name_of, place_of, type_name

if TYPE_CHECKING:  # optional packages
    import torch
    from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

EXTENT = "extent.default"
"""The operator that gives the extent of an axis as a tensor, as the importer calls it."""

_OF_TENSORS = {"Scalar": "Tensor", "Tensor_Scalar": "Tensor_Tensor"}
"""By overload of an operator whose operand is a number: that whose operand is a tensor."""


def extent(node: torch.fx.Node, importer: ExportedProgramImporter) -> relax.Expr:
    """The extent of an axis as a tensor of one element."""
    x, axis = importer.retrieve_args(node)
    return extent_of(importer, x, axis, type_name(node.meta["val"].dtype))


def with_extents_as_tensors(program: torch.export.ExportedProgram, source: str) -> None:
    """Change a program so that no tensor meets a number that is computed from a free extent.

    Raises:
        ModelError: a number is computed by more than arithmetic.
    """
    import torch

    _declare_extent()
    made: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node] = {}
    for node in list(program.graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        with program.graph.inserting_before(node):
            try:
                _replace_operands(node, made)
            except UnsupportedError as error:
                raise ModelError(f"{source}: {error}.") from error
    if made:
        program.graph.eliminate_dead_code()


def _replace_operands(node: torch.fx.Node, made: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node]) -> None:
    """Give an operator scalar tensors in place of its numbers."""
    import torch

    aten, schema = torch.ops.aten, node.target._schema.arguments
    if name_of(node) == "scalar_tensor.default" and _is_number(node.args[0]):
        node.replace_all_uses_with(_tensor(node, node.args[0], node.meta["val"].dtype, made))
        return
    of_tensors = _OF_TENSORS.get(node.target._overloadname)
    overload = getattr(node.target.overloadpacket, of_tensors, None) if of_tensors else None
    for place, value in enumerate(node.args):
        kind = str(schema[place].type)
        if not _is_number(value) or not (kind == "Tensor" or (kind == "number" and overload is not None)):
            continue
        node.update_arg(place, _tensor(node, value, _type_beside(node, value), made))
        if kind == "number":
            node.target = overload
    alpha = node.kwargs.get("alpha")
    if alpha is not None and _is_number(alpha):
        factor = _tensor(node, alpha, node.meta["val"].dtype, made)
        scaled = _call(node, aten.mul.Tensor, (node.args[1], factor), node.args[1].meta["val"])
        node.update_arg(1, scaled)
        node.kwargs = {name: value for name, value in node.kwargs.items() if name != "alpha"}


def _is_number(value: Any) -> bool:
    """Whether an operand is a number of Python that is not known before the program runs."""
    import torch

    return isinstance(value, torch.fx.Node) and isinstance(value.meta.get("val"), torch.SymInt | torch.SymFloat)


def _type_beside(node: torch.fx.Node, number: torch.fx.Node) -> torch.dtype:
    """The type that a number takes beside the tensors of an operator."""
    import torch

    tensors = [each.meta["val"] for each in node.all_input_nodes if isinstance(each.meta.get("val"), torch.Tensor)]
    found = [node.meta["val"].dtype, *(tensor.dtype for tensor in tensors)]
    floats = [dtype for dtype in found if dtype.is_floating_point]
    if floats:
        return floats[0]
    return torch.float32 if isinstance(number.meta["val"], torch.SymFloat) else torch.int64


def _tensor(
    node: torch.fx.Node, value: Any, dtype: torch.dtype, made: dict[tuple[torch.fx.Node, torch.dtype], torch.fx.Node]
) -> torch.fx.Node:
    """A number as a scalar tensor, made in front of the first node that needs it.

    Raises:
        UnsupportedError: it is computed by more than arithmetic.
    """
    import torch

    aten = torch.ops.aten
    if not isinstance(value, torch.fx.Node):
        return _call(node, aten.full.default, ([], value), None, dtype)
    if (value, dtype) not in made:
        with node.graph.inserting_before(value.next):
            if name_of(value) == "sym_size.int":
                found = _call(value, torch.ops.convgrad.extent.default, value.args, None, dtype)
            else:
                made_by = _arithmetic().get(value.target)
                if made_by is None:
                    raise UnsupportedError(
                        f"a number is computed from the batch by {getattr(value.target, '__name__', value.target)}"
                        f"{place_of(value)}; compute it by tensors, of torch.ones_like(x).sum(), or export the model "
                        "without dynamic shapes"
                    )
                parts = [_tensor(node, part, dtype, made) for part in value.args]
                found = parts[0] if made_by is _SAME else _call(node, made_by, tuple(parts), None, dtype)
        made[value, dtype] = found
    return made[value, dtype]


_SAME = "the number itself"


def _arithmetic() -> dict[Any, Any]:
    """By function of numbers: the operator that does the same with tensors."""
    import torch

    aten = torch.ops.aten
    return {
        operator.add: aten.add.Tensor,
        operator.sub: aten.sub.Tensor,
        operator.mul: aten.mul.Tensor,
        operator.truediv: aten.div.Tensor,
        operator.floordiv: aten.floor_divide.default,
        operator.mod: aten.remainder.Tensor,
        operator.pow: aten.pow.Tensor_Tensor,
        operator.neg: aten.neg.default,
        torch.sym_max: aten.maximum.default,
        torch.sym_min: aten.minimum.default,
        torch.sym_float: _SAME,
    }


def _call(
    node: torch.fx.Node,
    target: Callable[..., Any],
    arguments: tuple[Any, ...],
    like: torch.Tensor | None,
    dtype: torch.dtype | None = None,
) -> torch.fx.Node:
    """A call at the graph's place of insertion, with the result of `like`, or of a scalar of a type."""
    import torch

    keywords = {"dtype": dtype} if target in (torch.ops.aten.full.default, torch.ops.convgrad.extent.default) else {}
    made = node.graph.call_function(target, arguments, keywords)
    fake = next(each.meta["val"] for each in node.graph.nodes if isinstance(each.meta.get("val"), torch.Tensor))
    value = like if like is not None else fake.new_empty((), dtype=dtype)
    made.meta = {**{name: each for name, each in node.meta.items() if name != "unbacked_bindings"}, "val": value}
    return made


def _declare_extent() -> None:
    import torch

    if not hasattr(torch.ops.convgrad, "extent"):
        torch.library.define("convgrad::extent", "(Tensor x, int axis, *, ScalarType dtype) -> Tensor")
        torch.library.impl(
            "convgrad::extent",
            "CompositeExplicitAutograd",
            lambda x, axis, *, dtype: torch.tensor(x.shape[axis], dtype=dtype),
        )
        torch.library.register_fake("convgrad::extent", lambda x, axis, *, dtype: x.new_empty((), dtype=dtype))


__all__ = ["EXTENT", "extent", "with_extents_as_tensors"]
