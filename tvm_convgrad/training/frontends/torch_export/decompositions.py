# SPDX-License-Identifier: Apache-2.0
"""Operators of PyTorch written out as others that the translator has, for torch.export's `run_decompositions`.

Each is a function of the operator's arguments, traced by PyTorch. Where PyTorch sends a gradient to one of several
equal elements (max, min, sort, topk, the median), so do these: they gather at the places.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.frontends.torch_export.complex_tensors import of_real_tensors
from tvm_convgrad.training.frontends.torch_export.operators import (
    bessel,
    fake_quantize,
    gamma,
    linalg,
    ordering,
    orthogonal,
)
from tvm_convgrad.training.frontends.torch_export.operators import pool_places as pools
from tvm_convgrad.training.frontends.torch_export.operators.attention import attention, safe_softmax
from tvm_convgrad.training.frontends.torch_export.operators.bags import embedding_bag
from tvm_convgrad.training.frontends.torch_export.operators.deformable import deform_conv2d
from tvm_convgrad.training.frontends.torch_export.operators.erfinv import inverse_error
from tvm_convgrad.training.frontends.torch_export.operators.grid import affine_grid, grid_sampler
from tvm_convgrad.training.frontends.torch_export.operators.losses import binary_cross_entropy, multilabel_margin
from tvm_convgrad.training.frontends.torch_export.operators.resize import RESIZES
from tvm_convgrad.training.frontends.torch_export.operators.sliding_blocks import col2im, im2col
from tvm_convgrad.training.frontends.torch_export.operators.stft import istft, stft
from tvm_convgrad.training.frontends.torch_export.view_copies import view_copies

if TYPE_CHECKING:  # an optional package
    import torch
    from torch import Tensor


def decompositions() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions without those of dropout, which would become random numbers, and with these."""
    import torch  # optional

    aten = torch.ops.aten
    table = dict(torch.export.default_decompositions())
    # PyTorch writes celu and softplus with an exp that overflows in the branch that is not taken, and resizes with
    # other weights than those of its kernels.
    resizes = [getattr(aten, name) for name in RESIZES]
    for packet in (aten.dropout, aten.native_dropout, aten.celu, aten.softplus, aten.erfc, *resizes):
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    own: dict[Any, Callable[..., Any]] = {
        aten.max.dim: lambda x, dim, keepdim=False: _extremum(x, aten.argmax, math.inf, dim, keepdim),
        aten.min.dim: lambda x, dim, keepdim=False: _extremum(x, aten.argmin, -math.inf, dim, keepdim),
        aten.empty.memory_format: _empty,
        aten.empty_permuted.default: _empty,
        aten.topk.default: lambda x, k, dim=-1, largest=True, sorted=True: (
            NotImplemented if sorted else aten.topk.default(x, k, dim, largest, True)
        ),
        aten.__lshift__.Scalar: lambda x, places: x * 2**places,
        aten.cholesky_solve.default: linalg.cholesky_solve,
        # PyTorch's own are of clamps, which have a gradient on their bounds.
        aten.hardsigmoid.default: lambda x: aten.hardtanh(x + 3, 0.0, 6.0) / 6,
        aten.hardswish.default: lambda x: x * aten.hardtanh(x + 3, 0.0, 6.0) / 6,
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
        aten.addmv.default: lambda x, matrix, vector, *, beta=1, alpha=1: x * beta + (matrix @ vector) * alpha,
        aten.addbmm.default: lambda x, left, right, *, beta=1, alpha=1: x * beta + (left @ right).sum(0) * alpha,
        aten.dist.default: lambda x, y, p=2.0: _norm(x - y, p),
        aten.scaled_dot_product_attention.default: attention,
        aten._safe_softmax.default: safe_softmax,
        aten.instance_norm.default: _instance_norm,
        aten.ldexp.Tensor: lambda x, power: x * torch.pow(2.0, power),
        aten.grid_sampler_2d.default: grid_sampler,
        aten.grid_sampler_3d.default: grid_sampler,
        aten.im2col.default: im2col,
        aten.col2im.default: col2im,
        aten.fractional_max_pool2d.default: pools.fractional_max,
        aten.fractional_max_pool3d.default: pools.fractional_max,
        aten.max_unpool2d.default: pools.max_unpool,
        aten.max_unpool3d.default: pools.max_unpool,
        aten.affine_grid_generator.default: affine_grid,
        aten.lgamma.default: gamma.lgamma,
        aten.digamma.default: gamma.digamma,
        aten.polygamma.default: gamma.polygamma,
        aten.mode.default: ordering.mode,
        aten.linalg_inv.default: lambda x: linalg.inverse(x)[0],
        aten.linalg_solve.default: lambda x, y, *, left=True: linalg.solve(x, y, left=left)[0],
        aten.linalg_cholesky.default: lambda x, *, upper=False: linalg.cholesky(x, upper=upper)[0],
        aten.cholesky.default: lambda x, upper=False: linalg.cholesky(x, upper=upper)[0],
        aten.cholesky_inverse.default: linalg.cholesky_inverse,
        aten.linalg_inv_ex.default: linalg.inverse,
        aten._linalg_solve_ex.default: linalg.solve,
        aten._linalg_det.default: linalg.determinant,
        aten._linalg_slogdet.default: linalg.log_determinant,
        aten.linalg_cholesky_ex.default: linalg.cholesky,
        aten.linalg_solve_triangular.default: linalg.solve_triangular,
        aten.triangular_solve.default: linalg.old_solve_triangular,
        aten.linalg_matrix_exp.default: orthogonal.matrix_exp,
        aten.linalg_householder_product.default: orthogonal.householder_product,
        aten.linalg_qr.default: orthogonal.qr,
        aten.var_mean.correction: lambda x, dim=None, *, correction=None, keepdim=False: (
            aten.var.correction(x, dim, correction=correction, keepdim=keepdim),
            aten.mean.dim(x, dim, keepdim),
        ),
        aten.split_with_sizes.default: _parts,
        aten.split.Tensor: _equal_parts,
        aten.narrow_copy.default: lambda x, dim, start, length: x.narrow(dim, start, length),
        aten.fmin.default: lambda x, y: torch.where((x <= y) | torch.isnan(y), x, y),
        aten.fmax.default: lambda x, y: torch.where((x >= y) | torch.isnan(y), x, y),
        aten.masked_select.default: lambda x, mask: (
            NotImplemented
            if x.shape == mask.shape
            else aten.masked_select.default(*(each.clone() for each in torch.broadcast_tensors(x, mask)))
        ),
        aten.put.default: lambda x, index, source, accumulate=False: aten.index_put.default(
            x.flatten(), [index.flatten()], source.flatten(), accumulate
        ).reshape(x.shape),
        aten.prod.dim_int: _product,
        aten.prod.default: lambda x, *, dtype=None: _product(x.flatten(), 0, dtype=dtype),
        aten.index_fill.int_Tensor: _index_fill,
        aten.cumprod.default: _cumulative_product,
        aten.diagonal.default: _diagonal,
        aten.diagonal_scatter.default: _diagonal_scatter,
        aten._pdist_forward.default: _distances,
        aten.angle.default: lambda x: torch.where(torch.isnan(x), x, torch.where(x < 0, math.pi, 0.0).to(x.dtype)),
        aten.unfold.default: _unfold,
        aten.adaptive_max_pool2d.default: pools.adaptive_max,
        aten.adaptive_max_pool3d.default: pools.adaptive_max,
        aten._cdist_forward.default: lambda x, y, p, _mode: _norm(x.unsqueeze(-2) - y.unsqueeze(-3), p, [-1]),
        aten._euclidean_dist.default: _euclidean_distances,
        aten.binary_cross_entropy.default: binary_cross_entropy,
        aten.multilabel_margin_loss_forward.default: multilabel_margin,
        aten.fake_quantize_per_tensor_affine_cachemask.default: fake_quantize.per_tensor,
        aten._fake_quantize_per_tensor_affine_cachemask_tensor_qparams.default: fake_quantize.per_tensor_of_tensors,
        aten.fake_quantize_per_channel_affine_cachemask.default: fake_quantize.per_channel,
        aten._fused_moving_avg_obs_fq_helper_functional.default: fake_quantize.observed,
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
        aten.hypot.default: lambda x, y: torch.sqrt(x * x + y * y),
        aten.mish.default: lambda x: x * torch.tanh(torch.nn.functional.softplus(x)),
        aten.logaddexp.default: ordering.logaddexp,
        aten.copysign.Tensor: _signed,
        aten.copysign.Scalar: lambda x, y: x.abs() * math.copysign(1.0, y),
        aten._neg_view.default: torch.neg,
        aten.avg_pool2d.default: pools.average_pool,
        aten.avg_pool3d.default: pools.average_pool,
        aten.embedding_bag.padding_idx: embedding_bag,
        aten.embedding_bag.default: embedding_bag,
        aten._embedding_bag.default: embedding_bag,
        aten._embedding_bag_forward_only.default: embedding_bag,
        aten.i0.default: bessel.i0,
        aten.special_i0e.default: bessel.i0e,
        aten.special_i1.default: bessel.i1,
        aten.special_i1e.default: bessel.i1e,
        aten.nanmedian.dim: ordering.nanmedian,
        aten.nanmedian.default: ordering.nanmedian_of_all,
        aten.erfinv.default: inverse_error,
        aten.stft.default: stft,
        aten.arange.start_step: _downwards,
        aten.fft_fftfreq.default: _frequencies,
        aten.fft_rfftfreq.default: lambda n, d=1.0, *, dtype=None, **_: (
            torch.arange(n // 2 + 1, dtype=dtype or torch.get_default_dtype()) / (n * d)
        ),
    }
    if hasattr(torch.ops.torchvision, "deform_conv2d"):
        own[torch.ops.torchvision.deform_conv2d.default] = deform_conv2d
    return (
        table
        | {overload: of_real_tensors(function) for overload, function in own.items()}
        | view_copies()
        | {aten.istft.default: istft}
    )


def _downwards(
    start: float, end: float, step: float = 1, *, dtype: torch.dtype | None = None, **_: object
) -> Tensor | Any:
    """Numbers from `start` down to `end`; TVM counts one or two too many where the step is negative."""
    import torch

    if step > 0:
        return NotImplemented
    whole = not any(isinstance(number, float) for number in (start, end, step))
    count = (start - end - step - 1) // -step if whole else math.ceil((end - start) / step)
    numbers = torch.arange(count) * step + start
    return numbers.to(dtype or (torch.int64 if whole else torch.get_default_dtype()))


def _frequencies(n: int, d: float = 1.0, *, dtype: torch.dtype | None = None, **_: object) -> Tensor:
    """The frequencies of a transform of n elements d apart, the negative ones last."""
    import torch

    numbers = torch.arange(n, dtype=torch.int64)
    signed = (numbers + n // 2) % n - n // 2
    return signed.to(dtype or torch.get_default_dtype()) / (n * d)


def _extremum(
    x: Tensor, place: Callable[[Tensor, int, bool], Tensor], beyond: float, dim: int, keepdim: bool
) -> tuple[Tensor, Tensor]:
    """The extremum along an axis and its place, which is that of a NaN if there is one: TVM's comparisons pass it over.

    `beyond` is the infinity that no number is beyond.
    """
    import torch

    ordered = torch.where(torch.isnan(x), beyond, x) if x.is_floating_point() else x
    places = place(ordered, dim, True)
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
    if p < 0:  # a zero among the elements makes the norm 0
        sizes = x.abs()
        none = (x == 0).to(x.dtype).sum(axes, True) > 0
        inside = torch.where(none, torch.ones_like(sizes), sizes)
        total = torch.pow(torch.pow(inside, p).sum(axes, True), 1.0 / p)
        total = torch.where(none, torch.zeros_like(total), total)
        return total if keepdim else total.squeeze(axes)
    powers = x * x if p == 2 else _of_nonzero(lambda size: torch.pow(size, p), x.abs())
    root = torch.sqrt if p == 2 else lambda total: torch.pow(total, 1.0 / p)
    return _of_nonzero(root, powers.sum(axes, keepdim))


def _signed(x: Tensor, y: Tensor) -> Tensor:
    """x with the sign of y, which zeros have, too: the angle of (-1, y) is -pi for y = -0.0."""
    import torch

    return torch.where(torch.atan2(y, torch.full_like(y, -1.0)) < 0, -x.abs(), x.abs())


def _instance_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    """A group norm whose groups are the channels, which predicts by running statistics, if it has them.

    PyTorch's own form has a batch of one with samples x channels for its channels, a product of symbols, and is not
    decomposed where it writes statistics. TVM's converter takes 1e-5 for eps, whatever it is.
    """
    import torch

    if not use_input_stats:
        return NotImplemented
    result = torch.group_norm(x, x.shape[1], weight, bias, eps, cudnn_enabled)
    if running_mean is None or running_var is None:
        return result
    shape, axes = [1, -1] + [1] * (x.ndim - 2), list(range(2, x.ndim))
    by_mode = torch.ops.convgrad.by_mode.default
    predicted = (x - running_mean.view(shape)) / torch.sqrt(running_var.view(shape) + eps)
    predicted = predicted if weight is None else predicted * weight.view(shape)
    predicted = predicted if bias is None else predicted + bias.view(shape)
    for running, found in ((running_mean, x.mean(axes)), (running_var, x.var(axes, correction=1))):
        running.copy_(by_mode(running * (1 - momentum) + found.mean(0) * momentum, running))
    return by_mode(result, predicted)


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


def _euclidean_distances(x: Tensor, y: Tensor) -> Tensor:
    """Distances of rows by a product of matrices, as `torch.cdist` of many; the slope is 0 where one is 0."""
    squares = (x * x).sum(-1, keepdim=True) + (y * y).sum(-1).unsqueeze(-2)
    return _of_nonzero(lambda square: square.sqrt(), (squares - 2.0 * (x @ y.mT)).clamp_min(0.0))


def _refuse_free_extent(name: str, x: Tensor, dim: int) -> None:
    if not isinstance(x.shape[dim], int):
        raise UnsupportedError(
            f"aten.{name} along an axis of a free extent is not imported, as it is written out; export with it fixed"
        )


def _product(x: Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Tensor:
    """Products of pairs, then of pairs of those: right at zeros, where the quotient of product and factor is not."""
    _refuse_free_extent("prod", x, dim)
    x = x if dtype is None else x.to(dtype)
    parts = list(x.split(1, dim))
    while len(parts) > 1:
        rest = parts[len(parts) // 2 * 2 :]
        parts = [left * right for left, right in zip(parts[0::2], parts[1::2], strict=False)] + rest
    return parts[0] if keepdim else parts[0].squeeze(dim)


def _parts(x: Tensor, sizes: Sequence[int], dim: int = 0) -> Any:
    """Slices where TVM's split has one part, which is not a tuple, or an empty one; else what there is."""
    if len(sizes) > 1 and all(sizes):
        return NotImplemented
    starts = accumulate(sizes, initial=0)
    return [x.narrow(dim, start, size) for start, size in zip(starts, sizes, strict=False)]


def _equal_parts(x: Tensor, size: int, dim: int = 0) -> Any:
    """The same of parts of one size, of which the last may be smaller."""
    extent = x.shape[dim]
    return _parts(x, [extent], dim) if isinstance(extent, int) and size >= extent else NotImplemented


def _cumulative_product(x: Tensor, dim: int, *, dtype: torch.dtype | None = None) -> Tensor:
    import torch

    _refuse_free_extent("cumprod", x, dim)
    parts = list((x if dtype is None else x.to(dtype)).split(1, dim))
    for number in range(1, len(parts)):
        parts[number] = parts[number - 1] * parts[number]
    return torch.cat(parts, dim)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Every (width + 1)th element of the flattened last two axes; by indices, if the width is not known."""
    import torch

    x = x.movedim((dim1, dim2), (-2, -1))
    height, width = x.shape[-2:]
    count = _lesser(height + min(offset, 0), width - max(offset, 0))
    if not isinstance(width, int) or not isinstance(count, int):
        places = torch.arange(count)
        return x[..., places - min(offset, 0), places + max(offset, 0)]
    begin = max(offset, 0) - min(offset, 0) * width
    return x.flatten(-2)[..., begin : begin + (count - 1) * (width + 1) + 1 : width + 1]


def _lesser(down: int, across: int) -> int:
    """The lesser one of two numbers of places, for any free extents; `min` would choose by those of the export."""
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    if statically_known_true(down <= across):
        return down
    if statically_known_true(across <= down):
        return across
    raise UnsupportedError(
        f"a diagonal of the lesser one of {down} and {across} places, free extents, is not imported; export with fixed "
        "ones, or with ranges that do not overlap, torch.export.Dim(name, min=..., max=...)"
    )


def _diagonal_scatter(x: Tensor, values: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """x with other values on a diagonal: each row's value in all of its columns, taken where the diagonal is."""
    import torch

    matrices = x.movedim((dim1, dim2), (-2, -1))
    height, width = matrices.shape[-2:]
    places = torch.arange(height)[:, None] + offset == torch.arange(width)
    of_rows = (torch.arange(height) + min(offset, 0)).clamp(0, values.shape[-1] - 1)
    wide = values.index_select(-1, of_rows)[..., None]
    return torch.where(places, wide, matrices).movedim((-2, -1), (dim1, dim2))


def _index_fill(x: Tensor, dim: int, places: Tensor, value: Tensor) -> Tensor:
    """A value at places of an axis; a place that is named twice counts once in the value's gradient."""
    import torch

    extent = x.shape[dim]
    is_filled = (torch.arange(extent)[:, None] == places.flatten() % extent).sum(1) > 0
    return torch.where(is_filled.reshape([-1] + [1] * (x.ndim - 1 - dim % x.ndim)), value, x)


def _distances(x: Tensor, p: float = 2.0) -> Tensor:
    """Distances of all pairs of rows, the first row's first."""
    import torch

    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1)
    return _norm(x.index_select(0, first) - x.index_select(0, second), p, [-1])


def _unfold(x: Tensor, dim: int, size: int, step: int) -> Tensor:
    import torch

    if x.ndim == 0:
        return x.reshape(1).narrow(0, 0, size)
    dim %= x.ndim
    count = (x.shape[dim] - size) // step + 1
    places = torch.arange(count)[:, None] * step + torch.arange(size)
    return x.index_select(dim, places.flatten()).unflatten(dim, (count, size)).movedim(dim + 1, -1)


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
