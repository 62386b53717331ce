# SPDX-License-Identifier: Apache-2.0
"""vmap of convolutions and their gradients in Relax and Relay: `vmap_rule("conv2d_backward_weight", (0, 0))`.

Each rule computes the whole vmap by one unbatched call (table: tvm_convgrad.core.batch_rules); there is no fallback to
a loop. docs/BATCHING.md has the table and examples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tvm_convgrad.core.catalogue import BACKWARD_DATA, BACKWARD_WEIGHT, BY_NAME, FORWARD, OpEntry
from tvm_convgrad.core.errors import ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.graph_ir import checked_ir
from tvm_convgrad.op import Expr

if TYPE_CHECKING:
    from tvm import relax, relay

Dims = tuple["int | None", ...]


@dataclass(frozen=True)
class VmapRule:
    """An operator under one or more vmaps, as a function of Relax or Relay expressions. Created by `vmap_rule`.

    Attributes:
        op: the operator's name.
        levels: the batch axis of each operand, for each vmap, the outermost first; None means that it has none.
    """

    op: str
    levels: tuple[Dims, ...]

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands, in order."""
        return OPERANDS[self.op]

    def __call__(self, *arguments: relax.BlockBuilder | Expr, **attributes: Any) -> Any:
        """Emit the call that computes the operator under its vmaps.

        Args:
            arguments: in Relax, a BlockBuilder with an open dataflow block, then the operands: tensors of known shape,
                whose batch axes, N and spatial extents may be symbolic. In Relay, the operands: expressions of known
                type with static extents.
            attributes: the attributes of one unbatched call (see tvm_convgrad.op): shapes and layouts do not include
                batch axes. For `conv{r}d`: strides, padding, dilation, groups, data_layout, kernel_layout, grad_layout
                (or out_layout), out_dtype. For `conv{r}d_transpose`: those of relax.op.nn. For `…_backward`: those of
                the convolution, and `output_mask`, three bools.

        Returns:
            The result; its leading axes are the batch axes, the outermost vmap first. For `…_backward` a tuple (dX, dW,
            dbias), None where masked. A result that depends on no batched operand is broadcast.

        Raises:
            ProblemError: the convolution is not valid, or the operands' batch axes differ in extent.
            DTypeError: an element type is not float16, bfloat16, float32 or float64.
            UnsupportedError: a shape is unknown at compile time; or `…_backward` in Relay, where dX and dW have a rule
                each.
        """
        if self.op in _FORWARD and "out_layout" in attributes:  # Relax's name
            attributes["grad_layout"] = attributes.pop("out_layout")
        relay = checked_ir(self.op) == "Relay"
        operands: tuple[Any, ...] = arguments if relay else arguments[1:]
        if len(operands) != len(self.operands):
            raise ProblemError(
                f"{self.op}: {len(operands)} operands were given; it takes {len(self.operands)}: "
                f"{', '.join(self.operands)}"
            )
        if relay:
            checked_ir(self.op, *operands)
            return self._relay_call(operands, attributes)
        builder: Any = arguments[0]
        # Imported here as a TVM that has Relay has no Relax of the version that these modules need.
        if self._all_gradients:
            from relax_ops.vmap.convolution_backward import backward_call

            return backward_call(builder, self.rank, "transpose" in self.op, self.levels, operands, **attributes)
        from relax_ops.vmap.convolution import transposed_arguments, vmap_call

        if self.op in BY_NAME:
            entry = BY_NAME[self.op]
        else:
            entry = OpEntry(BACKWARD_DATA, self.rank)
            levels = self._named(entry.direction.operands)
            attributes = transposed_arguments(builder, self.rank, levels, *operands, **attributes)
        return vmap_call(builder, entry, self._named(entry.direction.operands), operands, **attributes)

    def _relay_call(self, operands: Sequence[relay.Expr], attributes: dict[str, Any]) -> relay.Expr:
        if self._all_gradients:
            raise UnsupportedError(
                f"{self.op}: it makes Relax expressions; in Relay take vmap_rule of conv{self.rank}d_backward_data and "
                f"conv{self.rank}d_backward_weight"
            )
        from relay_ops.vmap import transposed_arguments, vmap_call

        entry = BY_NAME.get(self.op, OpEntry(BACKWARD_DATA, self.rank))
        levels = self._named(entry.direction.operands)
        if self.op not in BY_NAME:
            attributes = transposed_arguments(self.rank, levels, *operands, **attributes)
        return vmap_call(entry, levels, operands, **attributes)

    @property
    def _all_gradients(self) -> bool:
        """Whether the operator gives dX, dW and the bias gradient at once."""
        return self.op.endswith(("d_backward", "transpose_backward"))

    @property
    def rank(self) -> int:
        """Number of spatial axes."""
        return int(self.op[len("conv")])

    def _named(self, names: Sequence[str]) -> list[dict[str, int | None]]:
        return [dict(zip(names, dims, strict=True)) for dims in self.levels]


def vmap_rule(op: str | VmapRule, in_dims: Sequence[int | None]) -> VmapRule:
    """The vmap rule of an operator: a function that emits one unbatched call for the whole batch.

    Args:
        op: "conv{1,2,3}d" (data, weight), "conv{1,2,3}d_backward_weight" (grad, data), "conv{1,2,3}d_backward_data"
            (grad, weight), "conv{1,2,3}d_transpose" (data, weight), "conv{1,2,3}d_backward" and
            "conv{1,2,3}d_transpose_backward" (grad, data, weight); or a rule, to add an outer vmap to it.
        in_dims: the position of the batch axis of each operand (negative positions count from the end), None for an
            operand without one. At least one operand must have one.

    Returns:
        The rule, to be called with a relax.BlockBuilder (not in Relay), the operands and the operator's attributes;
        see `VmapRule.__call__`.

    Raises:
        UnsupportedError: the operator is unknown.
        ProblemError: `in_dims` does not match the operator's operands.

    Example:
        >>> from tvm import relax
        >>> from tvm_convgrad.batching import vmap_rule
        >>> rule = vmap_rule("conv1d_backward_weight", (0, None))  # five dY, each (N, O, W), and one X
        >>> grad = relax.Var("grad", relax.TensorType((5, 2, 6, 4), "float32"))
        >>> data = relax.Var("data", relax.TensorType((2, 4, 7), "float32"))
        >>> builder = relax.BlockBuilder()
        >>> with builder.function("main", [grad, data]):
        ...     with builder.dataflow():
        ...         dw = builder.emit_output(rule(builder, grad, data, kernel_size=3, strides=2, padding=1))
        ...     _ = builder.emit_func_output(dw)
        >>> print(dw.ty)
        R.Tensor((5, 6, 4, 3), dtype="float32")
    """
    rule = op if isinstance(op, VmapRule) else VmapRule(op, ())
    if rule.op not in OPERANDS:
        raise UnsupportedError(f"vmap_rule: there is no operator {rule.op!r}; there are {', '.join(OPERANDS)}")
    names = rule.operands
    if len(in_dims) != len(names):
        raise ProblemError(
            f"vmap_rule: {rule.op} has {len(names)} operands, {', '.join(names)}; in_dims={tuple(in_dims)}"
        )
    if all(dim is None for dim in in_dims):
        raise ProblemError(f"vmap_rule: in_dims={tuple(in_dims)} batches no operand of {rule.op}; leave the vmap away")
    dims = []
    for position, (name, dim) in enumerate(zip(names, in_dims, strict=True)):
        axes = rule.rank + 3 + sum(level[position] is not None for level in rule.levels)
        if dim is not None and not -axes <= dim < axes:
            raise ProblemError(
                f"vmap_rule: {name} of {rule.op} has {axes} axes with this batch; there is no axis {dim}"
            )
        dims.append(None if dim is None else dim % axes)
    return VmapRule(rule.op, (tuple(dims), *rule.levels))


_FORWARD = frozenset(OpEntry(FORWARD, r).name for r in SPATIAL)

OPERANDS: dict[str, tuple[str, ...]] = {
    **{
        OpEntry(direction, r).name: direction.operands
        for r in SPATIAL
        for direction in (FORWARD, BACKWARD_WEIGHT, BACKWARD_DATA)
    },
    **{f"conv{r}d_transpose": ("data", "weight") for r in SPATIAL},
    **{f"conv{r}d{kind}": ("grad", "data", "weight") for r in SPATIAL for kind in ("_backward", "_transpose_backward")},
}
"""Operators that have rules, and the names of their operands."""
