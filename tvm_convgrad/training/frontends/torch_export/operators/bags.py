# SPDX-License-Identifier: Apache-2.0
"""embedding_bag: sums, means and maxima of rows of a table, in bags of one length or given by offsets."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.places import name_of

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor

    Results = tuple[Tensor, Tensor, Tensor, Tensor]

_SUM, _MEAN, _MAX = 0, 1, 2


def with_equal_bags(program: torch.export.ExportedProgram) -> None:
    """Change a program so that bags of a table of indices, whose offsets PyTorch counts, are rows of that table."""
    import torch

    if not hasattr(torch.ops.convgrad, "equal_bags"):
        torch.library.define(
            "convgrad::equal_bags",
            "(Tensor table, Tensor indices, int length, bool by_frequency, int mode, Tensor? weights, int? padding) "
            "-> (Tensor, Tensor, Tensor, Tensor)",
        )
        torch.library.impl("convgrad::equal_bags", "CompositeImplicitAutograd", equal_bags)
    for node in program.graph.nodes:
        length = _length_of_bags(node)
        if length:
            table, indices, _, by_frequency, mode, _, weights, _, padding = node.args
            node.target = torch.ops.convgrad.equal_bags.default
            node.args = (table, indices, length, by_frequency, mode, weights, padding)


def _length_of_bags(node: torch.fx.Node) -> int:
    """The length of a bag, if all have one, and the offsets are 0, length, 2·length, …; otherwise 0."""
    if node.op != "call_function" or name_of(node) != "embedding_bag.padding_idx" or len(node.args) != 9:
        return 0
    offsets = node.args[2]
    if name_of(offsets) != "arange.start_step" or offsets.args[0] != 0 or node.args[7]:
        return 0
    length, indices = offsets.args[2], node.args[1]
    if not isinstance(length, int) or name_of(indices) not in ("reshape.default", "view.default"):
        return 0
    table = indices.args[0].meta["val"]
    return length if table.ndim == 2 and table.shape[1] == length else 0


def equal_bags(
    table: Tensor,
    indices: Tensor,
    length: int,
    by_frequency: bool,
    mode: int,
    weights: Tensor | None,
    padding: int | None,
) -> Results:
    """Bags of `length` consecutive indices."""
    import torch

    _refuse_frequency(by_frequency)
    rows = torch.nn.functional.embedding(indices.view(-1, length), table)
    if weights is not None:
        rows = rows * weights.view(-1, length, 1)
    kept = None if padding is None else (indices.view(-1, length, 1) != padding % table.shape[0])
    if mode == _MAX:
        rows = rows if kept is None else torch.where(kept, rows, -math.inf)
        found = _finite(rows.max(1)[0])
    else:
        rows = rows if kept is None else torch.where(kept, rows, 0.0)
        found = rows.sum(1)
        if mode == _MEAN:
            found = found / (length if kept is None else kept.to(rows.dtype).sum(1).clamp(min=1))
    return found, indices, indices, indices


def embedding_bag(
    table: Tensor,
    indices: Tensor,
    offsets: Tensor,
    by_frequency: bool = False,
    mode: int = _SUM,
    sparse: bool = False,
    weights: Tensor | None = None,
    include_last: bool = False,
    padding: int | None = -1,
) -> Results:
    """Bags that begin at offsets: each row is added to, or compared with, what its bag has."""
    import torch

    _refuse_frequency(by_frequency)
    count, width = offsets.shape[0] - int(include_last), table.shape[1]
    rows = torch.nn.functional.embedding(indices, table)
    numbers = torch.arange(indices.shape[0]).to(offsets.dtype).unsqueeze(1)
    bags = ((offsets[:count] <= numbers).to(torch.int64).sum(1) - 1).unsqueeze(1)
    if weights is not None:
        rows = rows * weights.unsqueeze(1)
    nothing = torch.zeros(count, width, dtype=rows.dtype)
    kept = torch.ones(rows.shape[0], 1, dtype=torch.bool)
    if padding is not None and padding != -1:
        kept = (indices != padding % table.shape[0]).unsqueeze(1)
    if mode == _MAX:
        rows = torch.where(kept, rows, -math.inf)
        start = nothing - math.inf
        found = _finite(start.scatter_reduce(0, bags.expand(rows.shape), rows, "amax"))
    else:
        found = nothing.scatter_add(0, bags.expand(rows.shape), torch.where(kept, rows, 0.0))
        if mode == _MEAN:
            elements = nothing[:, :1].scatter_add(0, bags, kept.to(rows.dtype))
            found = found / elements.clamp(min=1)
    return found, bags, bags, bags


def _finite(x: Tensor) -> Tensor:
    """0 for bags without rows."""
    import torch

    return torch.where(x == -math.inf, 0.0, x)


def _refuse_frequency(by_frequency: bool) -> None:
    if by_frequency:
        raise UnsupportedError(
            "aten.embedding_bag with scale_grad_by_freq is not imported: its gradients are not those of its result; "
            "leave it out of the bag"
        )


__all__ = ["embedding_bag", "with_equal_bags"]
