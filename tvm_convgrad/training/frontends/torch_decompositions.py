# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch written out as others that the translator has, for torch.export's `run_decompositions`.

Each is a function of the operator's arguments, traced by PyTorch. Where PyTorch sends a gradient to one of several
equal elements (max, min, sort, topk, the median), so do these: they gather at the places.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.frontends import torch_ordering as ordering
from tvm_convgrad.training.frontends.torch_grid import grid_sampler_3d
from tvm_convgrad.training.frontends.torch_places import name_of, place_of

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions without those of dropout, which would become random numbers, and with these."""
    import torch  # optional

    aten = torch.ops.aten
    table = dict(torch.export.default_decompositions())
    # PyTorch writes celu and softplus with an exp that overflows in the branch that is not taken.
    for packet in (aten.dropout, aten.native_dropout, aten.celu, aten.softplus):
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    table |= torch._decomp.get_decompositions([aten.grid_sampler_2d])
    return table | {
        aten.max.dim: lambda x, dim, keepdim=False: _extremum(x, aten.argmax(x, dim, True), dim, keepdim),
        aten.min.dim: lambda x, dim, keepdim=False: _extremum(x, aten.argmin(x, dim, True), dim, keepdim),
        aten.empty.memory_format: _empty,
        aten.empty_permuted.default: _empty,
        aten.kthvalue.default: ordering.kthvalue,
        aten.sort.stable: lambda x, *, stable=True, dim=-1, descending=False: aten.sort.default(x, dim, descending),
        aten.median.dim: ordering.median,
        aten.median.default: ordering.median_of_all,
        aten.cummax.default: lambda x, dim: ordering.cumulative_extremum(x, dim, True),
        aten.cummin.default: lambda x, dim: ordering.cumulative_extremum(x, dim, False),
        aten.logcumsumexp.default: ordering.logcumsumexp,
        aten.bucketize.Tensor: ordering.bucketize,
        aten.searchsorted.Tensor: ordering.searchsorted,
        aten.heaviside.default: ordering.heaviside,
        aten.masked_scatter.default: ordering.masked_scatter,
        aten.ldexp.Tensor: lambda x, power: x * torch.pow(2.0, power),
        aten.grid_sampler_3d.default: grid_sampler_3d,
        aten.var_mean.correction: lambda x, dim=None, *, correction=None, keepdim=False: (
            aten.var.correction(x, dim, correction=correction, keepdim=keepdim),
            aten.mean.dim(x, dim, keepdim),
        ),
        aten.prod.dim_int: _product,
        aten.cumprod.default: _cumulative_product,
        aten.diagonal.default: _diagonal,
        aten.unfold.default: _unfold,
        aten.adaptive_max_pool2d.default: lambda x, size: _adaptive_max(x, size),
        aten.adaptive_max_pool3d.default: lambda x, size: _adaptive_max(x, size),
        aten._cdist_forward.default: lambda x, y, p, _mode: _norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, [-1]),
        aten.linalg_vector_norm.default: _norm,
        aten.std.correction: _deviation,
        aten.std_mean.correction: lambda x, dim=None, *, correction=None, keepdim=False: (
            _deviation(x, dim, correction=correction, keepdim=keepdim),
            aten.mean.dim(x, dim, keepdim),
        ),
        aten._trilinear.default: _trilinear,
        aten.sinc.default: lambda x: torch.where(
            x == 0, torch.ones_like(x), _of_nonzero(lambda angle: torch.sin(angle) / angle, x * math.pi)
        ),
        aten.exp2.default: lambda x: torch.exp(x * math.log(2.0)),
        aten.erfc.default: lambda x: 1.0 - torch.erf(x),
        aten.hypot.default: lambda x, y: torch.sqrt(x * x + y * y),
        aten.mish.default: lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),
        aten.logaddexp.default: lambda x, y: torch.maximum(x, y) + torch.log1p(torch.exp(-(x - y).abs())),
        aten.copysign.Tensor: lambda x, y: torch.where(y < 0, -x.abs(), x.abs()),
    }


def with_used_places(program: torch.export.ExportedProgram, source: str) -> torch.export.ExportedProgram:
    """The program with each max pool whose places are used (max_unpool) as an operator that computes them.

    Raises:
        ModelError: an adaptive pool's places are used.
    """
    import torch

    if not hasattr(torch.ops.convgrad, "max_pool_with_places"):
        ints = "int[] kernel, int[] stride=[], int[] padding=[0], int[] dilation=[1], bool ceil_mode=False"
        torch.library.define("convgrad::max_pool_with_places", f"(Tensor x, {ints}) -> (Tensor, Tensor)")
        torch.library.impl("convgrad::max_pool_with_places", "CompositeImplicitAutograd", _max_pool_with_places)
    program = copy.deepcopy(program)
    for node in program.graph.nodes:
        used = any(name_of(user) == "getitem" and user.args[1] == 1 and user.users for user in node.users)
        if node.op != "call_function" or "max_pool" not in name_of(node) or not used:
            continue
        if "adaptive" in name_of(node):
            raise ModelError(
                f"{source} uses the places of an adaptive max pool (aten.{name_of(node)}{place_of(node)}), which is "
                "not imported; use a max pool with fixed windows (return_indices=True), or an upsampling."
            )
        node.target = torch.ops.convgrad.max_pool_with_places.default
    return program


def _max_pool_with_places(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Tensor, Tensor]:
    """The largest element of each window, and its place in the flattened image, from one slice for each tap."""
    import torch

    rank = x.ndim - 2
    taps, pads, dilations = ([*given] * (rank // len(given)) for given in (kernel, padding, dilation))
    steps = [*stride] * (rank // len(stride)) if stride else taps
    extents = x.shape[2:]
    counts, ends = [], []
    for extent, tap, step, pad, dilated in zip(extents, taps, steps, pads, dilations, strict=True):
        free = extent + 2 * pad - dilated * (tap - 1) - 1
        count = (-(-free // step) if ceil_mode else free // step) + 1
        count -= ceil_mode and (count - 1) * step >= extent + pad  # the last window begins inside
        counts.append(count)
        ends.append(max((count - 1) * step + dilated * (tap - 1) + 1 - extent - pad, 0))
    widths = [width for pair in zip(reversed(pads), reversed(ends), strict=True) for width in pair]
    places = torch.arange(math.prod(extents)).reshape(1, 1, *extents)
    whole, numbers = (torch.nn.functional.pad(each, widths, value=low) for each, low in ((x, -math.inf), (places, 0)))
    windows = [
        (
            ...,
            *(
                slice(at * dilated, at * dilated + (count - 1) * step + 1, step)
                for at, dilated, count, step in zip(tap, dilations, counts, steps, strict=True)
            ),
        )
        for tap in product(*(range(count) for count in taps))
    ]
    values, numbers = (torch.stack([tensor[window] for window in windows]) for tensor in (whole, numbers))
    found = values.argmax(0, keepdim=True)
    return values.gather(0, found)[0], numbers.expand(values.shape).gather(0, found)[0]


def _extremum(x: Tensor, places: Tensor, dim: int, keepdim: bool) -> tuple[Tensor, Tensor]:
    values = x.gather(dim, places)
    return (values, places) if keepdim else (values.squeeze(dim), places.squeeze(dim))


def _empty(size: Sequence[int], *_: object, dtype: torch.dtype | None = None, **__: object) -> Tensor:
    """A tensor of any values: TVM's importer has those of fixed shapes only."""
    import torch

    return torch.ops.aten.full.default(size, 0.0, dtype=dtype)


def _norm(
    x: Tensor,
    p: float = 2.0,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """A p-norm whose gradient is 0 where the norm is, as PyTorch's."""
    import torch

    x = x if dtype is None else x.to(dtype)
    axes = list(range(x.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    if abs(p) == math.inf:
        return x.abs().amax(axes, keepdim) if p > 0 else x.abs().amin(axes, keepdim)
    if p == 0:
        return (x != 0).to(x.dtype).sum(axes, keepdim)
    if p == 1:
        return x.abs().sum(axes, keepdim)
    powers = x * x if p == 2 else _of_nonzero(lambda size: torch.pow(size, p), x.abs())
    root = torch.sqrt if p == 2 else lambda total: torch.pow(total, 1.0 / p)
    return _of_nonzero(root, powers.sum(axes, keepdim))


def _deviation(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """The root of the variance, with gradient 0 where all elements are equal, as PyTorch's."""
    import torch

    return _of_nonzero(torch.sqrt, torch.ops.aten.var.correction(x, dim, correction=correction, keepdim=keepdim))


def _of_nonzero(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """A function that is 0 at 0, where its slope may be infinite and is taken for 0."""
    import torch

    zero = x == 0
    return torch.where(zero, torch.zeros_like(x), function(torch.where(zero, torch.ones_like(x), x)))


def _product(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Products of pairs, then of pairs of those: right at zeros, where the quotient of product and factor is not."""
    x = x if dtype is None else x.to(dtype)
    parts = list(x.split(1, dim))
    while len(parts) > 1:
        rest = parts[len(parts) // 2 * 2 :]
        parts = [left * right for left, right in zip(parts[0::2], parts[1::2], strict=False)] + rest
    return parts[0] if keepdim else parts[0].squeeze(dim)


def _cumulative_product(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    import torch

    parts = list((x if dtype is None else x.to(dtype)).split(1, dim))
    for number in range(1, len(parts)):
        parts[number] = parts[number - 1] * parts[number]
    return torch.cat(parts, dim)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Every (width + 1)th element of the flattened last two axes."""
    x = x.movedim((dim1, dim2), (-2, -1))
    height, width = x.shape[-2:]
    count = min(height + min(offset, 0), width - max(offset, 0))
    begin = max(offset, 0) - min(offset, 0) * width
    return x.flatten(-2)[..., begin : begin + (count - 1) * (width + 1) + 1 : width + 1]


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    import torch

    dim %= x.ndim
    count = (x.shape[dim] - size) // step + 1
    places = torch.arange(count)[:, None] * step + torch.arange(size)
    return x.index_select(dim, places.flatten()).unflatten(dim, (count, size)).movedim(dim + 1, -1)


def _adaptive_max(x: Tensor, size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Max pools; the places are not computed (see `with_used_places`).

    Where the windows of an axis differ, one axis after the other, the last one first: so the first of equal elements,
    line by line, has the gradient, as in PyTorch.
    """
    import torch

    rank = len(size)
    pool = {2: torch.nn.functional.max_pool2d, 3: torch.nn.functional.max_pool3d}[rank]
    extents = x.shape[-rank:]
    if all(extent % wanted == 0 for extent, wanted in zip(extents, size, strict=True)):
        kernel = [extent // wanted for extent, wanted in zip(extents, size, strict=True)]
        x = pool(x, kernel) if max(kernel) > 1 else x
        return x, torch.zeros(x.shape, dtype=torch.int64)
    for axis in reversed(range(rank)):
        extent, wanted = extents[axis], size[axis]
        windows = [(extent * cell // wanted, -(-extent * (cell + 1) // wanted)) for cell in range(wanted)]
        if extent % wanted == 0:
            windows = [(0, extent)]
        parts = []
        for begin, end in windows:
            kernel = [1] * rank
            kernel[axis] = extent // wanted if extent % wanted == 0 else end - begin
            part = x.narrow(axis - rank, begin, end - begin)
            parts.append(pool(part, kernel) if kernel[axis] > 1 else part)
        x = torch.cat(parts, axis - rank)
    return x, torch.zeros(x.shape, dtype=torch.int64)


def _trilinear(
    x: Tensor,
    y: Tensor,
    z: Tensor,
    expand_x: Sequence[int],
    expand_y: Sequence[int],
    expand_z: Sequence[int],
    sums: Sequence[int],
    _unroll: int = 1,
) -> Tensor:
    """Product of three tensors with axes of one element put in, summed over some axes."""
    tensors = []
    for tensor, axes in ((x, expand_x), (y, expand_y), (z, expand_z)):
        wide = tensor
        for axis in sorted(axes):
            wide = wide.unsqueeze(axis)
        tensors.append(wide)
    return (tensors[0] * tensors[1] * tensors[2]).sum(list(sums))
