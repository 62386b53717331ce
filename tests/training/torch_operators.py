# SPDX-License-Identifier: Apache-2.0
"""Single operators as PyTorch users write them: functions of one tensor, by topic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.torch_activations import ACTIVATIONS
from tests.training.torch_deformable import DEFORMABLE
from tests.training.torch_lookups import LOOKUPS
from tests.training.torch_spectra import SPECTRA
from tests.training.torch_topics import SHAPE, Function, dead, row, volume, whole


def _filled(x: Tensor) -> Tensor:
    y = x * 1
    y[:, 0] = 0.5
    return y


def _added_in_place(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:3] += x[:, :2]
    return y


def _index_put(x: Tensor) -> Tensor:
    y = x * 1
    y[:, torch.tensor([0, 3]), torch.tensor([2, 1])] = x[:, :2, 3] * 2
    return y


def _masked_put(x: Tensor) -> Tensor:
    y = x * 2
    y[x > 0.5] = 0.25
    y.index_put_((x < -0.5,), torch.tensor(1.0), accumulate=True)
    return y


def _squares(x: Tensor) -> Tensor:
    """Matrices of 4 rows, none of them singular; the largest elements of their columns are off the diagonal."""
    return x[:, :, :4, :4] * 0.2 + torch.eye(4).roll(1, 0) * 2


def _first() -> Tensor:
    return torch.tensor([0])


def _drawn(x: Tensor) -> Tensor:
    """Numbers from 0 to 1: (samples, channels, 3)."""
    return (torch.arange(24).reshape(2, 4, 3) * 0.37 % 1).to(x.dtype)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(2) for part in parts], 2)


def _reduced_at(x: Tensor, reduction: str, include_self: bool) -> Tensor:
    """Three columns, of which two have values reduced into them."""
    places = torch.arange(6).expand(2, 4, 6, 6) % 2
    return x[..., :3].scatter_reduce(3, places, x.flip(2), reduction, include_self=include_self)


def _index_reduced(x: Tensor, reduction: str, include_self: bool) -> Tensor:
    places = torch.tensor([0, 2, 0, 0, 2, 2])
    return x[:, :, :3].index_reduce(2, places, x.flip(3), reduction, include_self=include_self)


def _flow(x: Tensor, reach: float) -> Tensor:
    """Places of a volume, (samples, 2, 3, 4, 3), off the borders of its cells."""
    return torch.tanh(x[:, :, :3, :6].reshape(-1, 2, 3, 4, 3)) * reach


def _no_grad(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.mean() * 3
    return x * scale


def _windows(x: Tensor) -> Tensor:
    """Swin's partition into windows of 3x3."""
    n, c, h, w = x.shape
    return x.view(n, c, h // 3, 3, w // 3, 3).permute(0, 2, 4, 3, 5, 1).reshape(-1, 9, c).mean(1).view(n, -1)


def _grid(x: Tensor) -> Tensor:
    """A grid in [-1.2, 1.2] that depends on x, off the borders of pixels."""
    return torch.tanh(row(x)[:, :5, :4].reshape(-1, 5, 2, 2) * 0.7) * 1.2


def _spikes(x: Tensor) -> Tensor:
    """Neurons that are reset when they fire: whether a step does decides what the next ones see."""
    charge, seen = torch.zeros_like(x[:, 0]), []
    for given in [*x.unbind(1)] * 3:
        charge = charge * 0.9 + given
        charge = torch.where(charge > 0.3, charge - 0.3, charge)
        seen.append(charge)
    return torch.stack(seen, 1)


TOPICS: dict[str, dict[str, Function]] = {
    "selection": {
        "running_choice": lambda x: reduce(lambda most, row: torch.where(row > most, row, most * 0.9), x.unbind(2) * 4),
        "hard_reset": lambda x: _spikes(x),
        "select_first": lambda x: x[:, 0],
        "select_last": lambda x: x[:, :, -1],
        "select_middle": lambda x: x[:, :, 2, 1],
        "unbind": lambda x: torch.stack([part * (k + 1) for k, part in enumerate(x.unbind(1))], 2),
        "chunk": lambda x: x.chunk(2, 1)[0] * x.chunk(2, 1)[1],
        "split_uneven": lambda x: x.split([1, 3], 1)[1],
        "split_whole": lambda x: x.split([4], 1)[0] * x.split(9, 1)[0] * x.chunk(1, 2)[0],
        "split_empty": lambda x: x.split([0, 4], 1)[1] * x.split([4, 0], 1)[0],
        "fmin": lambda x: torch.fmin(x, x * x) * torch.fmax(x, torch.full_like(x, math.nan)),
        "narrow_copy": lambda x: torch.narrow_copy(x, 1, 1, 2),
        "slice_step": lambda x: x[:, :, 1::2, ::3],
        "slice_negative": lambda x: x[..., -4:-1],
        "narrow": lambda x: x.narrow(2, 1, 3),
        "index_select": lambda x: x.index_select(1, torch.tensor([2, 0, 2])),
        "index_list": lambda x: x[:, [3, 1, 1]],
        "index_two": lambda x: x[:, :, torch.tensor([0, 5]), torch.tensor([2, 3])],
        "index_table": lambda x: x[:, :, torch.tensor([[0, 5], [1, 1]])],
        "index_negative": lambda x: x[:, :, [-1, 2, -6]],
        "index_apart": lambda x: x[:, torch.tensor([0, 3]), :, torch.tensor([2, -3])],
        "index_put": _index_put,
        "detach": lambda x: x * x.detach() + x.detach() ** 2,
        "no_grad": _no_grad,
        "numbers_downwards": lambda x: x * torch.arange(12, 0, -2) + torch.arange(2.9, 0, -0.5),
        "gather": lambda x: x.gather(3, torch.arange(12).view(1, 1, 6, 2).expand(2, 4, 6, 2) % 6),
        "take_along_dim": lambda x: x.take_along_dim(x.detach().argsort(-1), -1) * torch.arange(1.0, 7.0),
        "diagonal": lambda x: x.diagonal(0, 2, 3),
        "diagonal_scatter": lambda x: x.diagonal_scatter(x[:, 0, :, :4] * 2, -1, 3, 1),
        "fill_diagonal": lambda x: (x[:, 0, 0] @ x[:, 0, 0].mT).fill_diagonal_(2.0),
        "clamp_by_tensors": lambda x: x[:, :1].clamp(x[0] - 0.5, torch.zeros(6)) * x[0, 0].clamp_min(x[0, 0] + 0),
        "masked_select": lambda x: x * (x * x).masked_select(x > 0.3).sum(),
        "masked_select_of_rows": lambda x: x * (x * x).masked_select(torch.arange(6)[:, None] % 2 > 0).sum(),
        "put": lambda x: x.put(torch.tensor([[3, -1], [9, 40]]), x[0, 0, :2, :2], accumulate=True),
        "put_in_place": lambda x: (x * 1).put_(torch.tensor([3, 70, 9]), x[0, 0, 0, :3]),
        "scalar_operators": lambda x: (
            x * (x.mean().permute(()) + x.sum().unfold(0, 1, 1) + x[0, 0, 0, 0].index_fill(0, _first(), x[0, 0, 0, 1]))
        ),
        "index_fill": lambda x: x.index_fill(-2, torch.tensor([1, 4, 1]), x[0, 0, 0, 0]),
        "triangle": lambda x: x[(..., *torch.triu_indices(6, 5, 1))] * x[(..., *torch.tril_indices(4, 6))],
        "angle": lambda x: x * x.angle(),
        "masked_fill": lambda x: x.masked_fill(x > 0.5, -1.0),
        "where": lambda x: torch.where(x > 0, x * x, 0.1 * x),
        "fill_slice": _filled,
        "add_in_place": _added_in_place,
        "masked_put": _masked_put,
        "masked_scatter": lambda x: x.masked_scatter(x > 0.3, x.flip(3) * 2),
        "as_strided": lambda x: x.as_strided((2, 3, 5), (144, 7, 2), 3),
        "as_strided_of_columns": lambda x: x.mT.as_strided((4, 3, 6), (36, 1, 6)),
        "squeeze_of_some": lambda x: x[:, :1].squeeze((0, 1, 2)),
        "one_hot_product": lambda x: x * F.one_hot(torch.tensor([0, 2, 4, 1, 3, 5]), 6),
    },
    "joining": {
        "cat_one": lambda x: torch.cat([x], 1),
        "cat": lambda x: torch.cat([x, x * 2, x[:, :1]], 1),
        "cat_negative": lambda x: torch.cat([x, x[..., :2]], -1),
        "stack": lambda x: torch.stack([x, x.relu()], 1),
        "repeat": lambda x: x.repeat(1, 2, 1, 3),
        "repeat_interleave": lambda x: x.repeat_interleave(2, 3),
        "expand": lambda x: x[:, :1].expand(-1, 5, -1, -1),
        "tile": lambda x: x.tile(2, 1),
        "roll": lambda x: x.roll((1, -2), (2, 3)),
        "flip": lambda x: x.flip(2, 3),
        "rot90": lambda x: x.rot90(1, (2, 3)),
        "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
        "pixel_unshuffle": lambda x: F.pixel_unshuffle(x, 2),
        "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
        "unfold_image": lambda x: F.unfold(x, 3, padding=1, stride=2),
        "fold": lambda x: F.fold(F.unfold(x, 2, stride=2) * 1.5, (6, 6), 2, stride=2),
        "fold_overlapping": lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 6), 3, padding=1),
        "fold_uneven": lambda x: F.fold(x.flatten(2).repeat(1, 6, 1)[:, :, :9], (7, 6), (2, 3), (3, 1), (1, 2), (2, 3)),
        "scatter_of_more": lambda x: x.scatter(
            1, torch.tensor([[[[3, 0]], [[1, 2]]]]).expand(1, 2, 1, 2), x.detach() * 2
        ),
        "fold_one_image": lambda x: F.fold(F.unfold(x[1], 3, (1, 2), (1, 2)), (6, 6), 3, (1, 2), (1, 2)),
        "unfold_tensor": lambda x: x.unfold(3, 3, 2),
        "windows": _windows,
        "movedim": lambda x: x.movedim(1, -1).contiguous(),
        "tril": lambda x: x.tril(),
        "outer_sum": lambda x: x.mean(3)[:, :, :, None] + x.mean(2)[:, :, None, :],
        "einsum": lambda x: torch.einsum("nchw,nkhw->nck", x, x),
        "bmm": lambda x: torch.bmm(row(x), row(x).transpose(1, 2)),
        "baddbmm": lambda x: torch.baddbmm(x.mean((1, 2))[:, :, None], row(x), row(x).mT, beta=0.5, alpha=2.0),
        "block_diagonal": lambda x: torch.block_diag(x[0, 0], x[1, 0, :2], x[0, 1, :, :3]),
        "cat_of_none": lambda x: torch.cat([x[:, :0], x, x[:, :0], x[:, 1:]], 1),
        "tensordot": lambda x: x * torch.tensordot(x[:, :2, :1, 0], x[:, :1, :2, 0], ([0, 1], [2, 0])),
        "scatter_sum_alone": lambda x: _reduced_at(x, "sum", False),
        "scatter_mean": lambda x: _reduced_at(x, "mean", True),
        "scatter_mean_alone": lambda x: _reduced_at(x, "mean", False),
        "scatter_product": lambda x: _reduced_at(x, "prod", True),
        "scatter_product_of_zeros": lambda x: _reduced_at(dead(x), "prod", True),
        "scatter_product_alone": lambda x: _reduced_at(x, "prod", False),
        "scatter_max": lambda x: _reduced_at(x, "amax", True),
        "scatter_max_of_ties": lambda x: _reduced_at(torch.round(x.detach()) + x - x.detach(), "amax", True),
        "scatter_min_alone": lambda x: _reduced_at(x, "amin", False),
        "index_reduce_max": lambda x: _index_reduced(x, "amax", True),
        "index_reduce_mean_alone": lambda x: _index_reduced(x, "mean", False),
        "index_reduce_product": lambda x: _index_reduced(x, "prod", True),
        "scatter_add": lambda x: torch.zeros(2, 4, 6, 3).scatter_add(3, torch.arange(6).expand(2, 4, 6, 6) % 3, x),
    },
    "reductions": {
        "prod_of_all": lambda x: x * x[0, 0, :2, :3].prod(),
        "amax": lambda x: x.amax((2, 3)),
        "amin": lambda x: x.amin(1, keepdim=True),
        "max_dim": lambda x: x.max(1)[0],
        "max_keepdim": lambda x: x.max(dim=2, keepdim=True).values,
        "min_dim": lambda x: x.min(-1)[0],
        "max_all": lambda x: x * x.max(),
        "topk": lambda x: x.topk(3, dim=1)[0],
        "topk_in_any_order": lambda x: x.topk(3, dim=2, sorted=False).values.sort(2).values,
        "topk_smallest": lambda x: x.flatten(1).topk(5, largest=False).values,
        "sort": lambda x: x.sort(-1)[0] * torch.arange(1.0, 7.0),
        "kthvalue": lambda x: x.kthvalue(2, -1).values,
        "median": lambda x: x.median(2).values,
        "median_of_all": lambda x: x * x.median(),
        "median_ties": lambda x: x * (torch.round(x.detach()) + (x - x.detach())).median(),
        "cummax": lambda x: x.cummax(3).values * torch.arange(1.0, 7.0),
        "cummin": lambda x: x.cummin(2).values,
        "logcumsumexp": lambda x: x.logcumsumexp(3),
        "logcumsumexp_of_nothing": lambda x: F.pad(x, (2, 0), value=-math.inf).logcumsumexp(3)[..., 2:],
        "median_of_infinities": lambda x: x * F.pad(x, (10, 0), value=math.inf).median().clamp(max=2.0),
        "bucketize": lambda x: x * torch.bucketize(x, torch.tensor([-0.5, 0.0, 0.4]), right=True),
        "searchsorted": lambda x: x * torch.searchsorted(x.sort(-1).values, x.flip(3)),
        "sum": lambda x: x.sum((1, 2)),
        "mean": lambda x: x.mean((-2, -1), keepdim=True),
        "var": lambda x: x.var((2, 3)),
        "std": lambda x: x.std(1, unbiased=False),
        "std_mean": lambda x: torch.std_mean(x, (2, 3))[0],
        "norm": lambda x: x.norm(dim=1),
        "norm_l1": lambda x: x.norm(p=1, dim=(2, 3)),
        "normalize": lambda x: F.normalize(x, dim=1),
        "vector_norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf"), dim=1),
        "norm_at_zero": lambda x: dead(x).norm(dim=1),
        "norm_cubic_at_zero": lambda x: dead(x).norm(p=3, dim=(2, 3)),
        "norm_root_at_zero": lambda x: dead(x).norm(p=0.5, dim=1),
        "norm_inverse_at_zero": lambda x: dead(x).norm(p=-1, dim=1),
        "norm_inverse": lambda x: (x * x + 0.5).norm(p=-2, dim=(2, 3)),
        "normalize_at_zero": lambda x: F.normalize(dead(x), dim=1),
        "deviation_at_zero": lambda x: dead(x).std(1) + torch.std_mean(dead(x), 1)[0],
        "pairwise_self": lambda x: torch.cdist(row(x), row(x)),
        "logsumexp": lambda x: x.logsumexp(1),
        "cumsum": lambda x: x.cumsum(2),
        "cumprod": lambda x: x.cumprod(3),
        "prod": lambda x: x.prod(3),
        "softmax": lambda x: x.softmax(1),
        "log_softmax": lambda x: x.log_softmax(-1),
        "softmin": lambda x: F.softmin(x, 1),
        "cosine_similarity": lambda x: F.cosine_similarity(x[:, :2], x[:, 2:], 1),
        "pairwise_of_many_rows": lambda x: torch.cdist(whole(x).view(2, 36, 4), whole(x).view(2, 36, 4)),
        "pairwise": lambda x: torch.cdist(row(x), row(x)[:, :3] + 3.0),
        "any_mask": lambda x: x * (x > 1).any(1, keepdim=True),
        "mode": lambda x: (torch.round(x.detach()) + x - x.detach()).mode(3).values,
        "amax_of_infinities": lambda x: torch.tanh(torch.where(torch.arange(6) < 2, -math.inf, x).amax(2)),
        "amin_of_infinities": lambda x: torch.tanh(torch.where(torch.arange(6) < 2, math.inf, x).amin(2)),
        "number_along_axis": lambda x: x * (x.mean().cumsum(0) + x.mean().prod(0) + x.std().log_softmax(0)),
        "number_ordered": lambda x: (
            x * (x.mean().max(0)[0] + x.mean().sort(0)[0] + x.mean().gather(0, torch.tensor(0)))
        ),
        "aminmax": lambda x: x.aminmax(dim=1)[1],
    },
    "pools": {
        "adaptive_max_1": lambda x: F.adaptive_max_pool2d(x, 1),
        "adaptive_max_uneven": lambda x: F.adaptive_max_pool2d(x, (4, 5)),
        "adaptive_max_ties": lambda x: F.adaptive_max_pool2d(torch.round(x.detach()) + x - x.detach(), (4, 3)),
        "adaptive_max_1d": lambda x: F.adaptive_max_pool1d(row(x), 4),
        "adaptive_max_3d": lambda x: F.adaptive_max_pool3d(volume(x), (1, 2, 3)),
        "adaptive_avg_uneven": lambda x: F.adaptive_avg_pool2d(x, (4, 5)),
        "adaptive_avg_larger": lambda x: F.adaptive_avg_pool2d(x, 8),
        "adaptive_avg_1d": lambda x: F.adaptive_avg_pool1d(row(x), 5),
        "adaptive_avg_3d": lambda x: F.adaptive_avg_pool3d(volume(x), (1, 2, 4)),
        "max_ceil": lambda x: F.max_pool2d(x, 3, 2, ceil_mode=True),
        "max_own_strides": lambda x: F.max_pool2d(x[:, :, 1:, 1:], 2, ceil_mode=True),
        "max_last_window_in_padding": lambda x: F.max_pool2d(x[:, :, 1:, 1:], 2, padding=1, ceil_mode=True),
        "max_3d_own_strides": lambda x: F.max_pool3d(volume(x), (1, 2, 2), padding=(0, 1, 1)),
        "max_1d_own_strides": lambda x: F.max_pool1d(row(x)[:, :, 1:], 4, ceil_mode=True),
        "max_dilated": lambda x: F.max_pool2d(x, 2, 1, dilation=2),
        "max_1d": lambda x: F.max_pool1d(row(x), 2),
        "max_3d": lambda x: F.max_pool3d(volume(x), (1, 2, 2)),
        "avg_ceil": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, count_include_pad=False),
        "avg_include_pad": lambda x: F.avg_pool2d(x, 3, 2, 1),
        "avg_divisor": lambda x: F.avg_pool2d(x, 2, divisor_override=3),
        "avg_divisor_padded": lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False, divisor_override=4),
        "avg_1d": lambda x: F.avg_pool1d(row(x), 3, 2, 1),
        "avg_3d": lambda x: F.avg_pool3d(volume(x), 2, 1),
        "avg_no_batch": lambda x: F.avg_pool2d(x[0], 2),
        "avg_divisor_no_batch": lambda x: F.avg_pool2d(x[0], 2, divisor_override=3),
        "avg_1d_no_batch": lambda x: F.avg_pool1d(row(x)[0], 2),
        "avg_3d_no_batch": lambda x: F.avg_pool3d(volume(x)[0], (1, 3, 2)),
        "adaptive_avg_no_batch": lambda x: F.adaptive_avg_pool2d(x[0], (2, 4)),
        "adaptive_avg_1d_no_batch": lambda x: F.adaptive_avg_pool1d(row(x)[0], 5),
        "max_unpool_no_batch": lambda x: F.max_unpool2d(*F.max_pool2d(x[0], 2, return_indices=True), 2),
        "lp_pool": lambda x: F.lp_pool2d(x, 2.0, 2),
        "max_unpool": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
        "max_places": lambda x: F.max_pool2d(x, 3, 2, 1, 1, True, return_indices=True)[0],
        "fractional_pool": lambda x: F.fractional_max_pool2d(x, (2, 3), (4, 3), _random_samples=_drawn(x)[..., :2]),
        "fractional_pool_once": lambda x: F.fractional_max_pool2d(
            x[0], 4, (1, 2), _random_samples=_drawn(x)[:1, :, :2]
        ),
        "fractional_pool_places": lambda x: torch.mul(
            *F.fractional_max_pool2d(x, 2, 3, return_indices=True, _random_samples=_drawn(x)[..., :2])
        ),
        "fractional_pool_3d": lambda x: F.fractional_max_pool3d(
            volume(x), (1, 1, 3), (1, 2, 3), _random_samples=_drawn(x)
        ),
        "max_unpool_1d": lambda x: F.max_unpool1d(
            *F.max_pool1d(row(x), 3, 3, return_indices=True), 3, output_size=(row(x).shape[-1],)
        ),
    },
    "resizing": {
        "nearest": lambda x: F.interpolate(x, scale_factor=2),
        "nearest_exact": lambda x: F.interpolate(x, (9, 5), mode="nearest-exact"),
        "nearest_odd": lambda x: F.interpolate(x, (9, 4)),
        "nearest_1d": lambda x: F.interpolate(row(x), scale_factor=2),
        "nearest_3d": lambda x: F.interpolate(volume(x), scale_factor=2),
        "bilinear": lambda x: F.interpolate(x, (9, 4), mode="bilinear"),
        "bilinear_aligned": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=True),
        "linear": lambda x: F.interpolate(row(x), scale_factor=2.0, mode="linear"),
        "trilinear": lambda x: F.interpolate(volume(x), scale_factor=2, mode="trilinear"),
        "bicubic": lambda x: F.interpolate(x, (9, 9), mode="bicubic"),
        "bicubic_aligned": lambda x: F.interpolate(x, (9, 9), mode="bicubic", align_corners=True),
        "area": lambda x: F.interpolate(x, (3, 3), mode="area"),
        "bicubic_antialias": lambda x: F.interpolate(x, (4, 9), mode="bicubic", antialias=True),
        "nearest_factor": lambda x: F.interpolate(x, scale_factor=1.7),
        "nearest_factor_of_multiple": lambda x: F.interpolate(x[..., :4, :4], scale_factor=(3.1, 2.2)),
        "nearest_factor_1d": lambda x: F.interpolate(x[:, :, 0], scale_factor=1.7),
        "nearest_factor_3d": lambda x: F.interpolate(volume(x), scale_factor=(1.6, 1.4, 0.7)),
        "nearest_exact_factor": lambda x: F.interpolate(x[..., :4], scale_factor=(1.7, 1.2), mode="nearest-exact"),
        "nearest_exact_factor_1d": lambda x: F.interpolate(x[:, :, 0], scale_factor=0.7, mode="nearest-exact"),
        "nearest_exact_factor_3d": lambda x: F.interpolate(volume(x), scale_factor=1.6, mode="nearest-exact"),
        "linear_factor": lambda x: F.interpolate(x[:, :, 0, :5], scale_factor=0.7, mode="linear"),
        "bilinear_factor": lambda x: F.interpolate(x[..., :5], scale_factor=(1.1, 0.5), mode="bilinear"),
        "bilinear_factor_of_odd": lambda x: F.interpolate(x[..., :5, :3], scale_factor=1.5, mode="bilinear"),
        "bilinear_factor_aligned": lambda x: F.interpolate(x, scale_factor=1.3, mode="bilinear", align_corners=True),
        "bilinear_factor_recomputed": lambda x: F.interpolate(
            x[..., :5], scale_factor=1.5, mode="bilinear", recompute_scale_factor=True
        ),
        "trilinear_factor": lambda x: F.interpolate(volume(x), scale_factor=(1.5, 1.6, 0.6), mode="trilinear"),
        "bicubic_factor": lambda x: F.interpolate(x, scale_factor=(1.1, 1.9), mode="bicubic"),
        "bilinear_antialias_factor": lambda x: F.interpolate(
            x[..., :5], scale_factor=(0.7, 0.45), mode="bilinear", antialias=True
        ),
        "bicubic_antialias_factor": lambda x: F.interpolate(
            x[..., :5], scale_factor=(1.3, 0.45), mode="bicubic", antialias=True
        ),
        "bilinear_antialias": lambda x: F.interpolate(x, (3, 4), mode="bilinear", antialias=True),
        "reflect": lambda x: F.pad(x, (2, 1, 1, 2), mode="reflect"),
        "replicate": lambda x: F.pad(x, (2, 1, 1, 2), mode="replicate"),
        "circular": lambda x: F.pad(x, (2, 1, 1, 2), mode="circular"),
        "constant": lambda x: F.pad(x, (2, 1, 0, 2), value=0.5),
        "crop": lambda x: F.pad(x, (-1, -1, -2, 0)),
        "reflect_1d": lambda x: F.pad(row(x), (3, 2), mode="reflect"),
        "replicate_3d": lambda x: F.pad(volume(x), (1, 1, 1, 1, 1, 1), mode="replicate"),
        "grid_sample": lambda x: F.grid_sample(x, _grid(x), align_corners=False),
        "grid_sample_aligned": lambda x: F.grid_sample(x, _grid(x), align_corners=True),
        "grid_sample_border": lambda x: F.grid_sample(x, _grid(x), padding_mode="border", align_corners=False),
        "grid_sample_nearest": lambda x: F.grid_sample(x, _grid(x).detach(), mode="nearest", align_corners=False),
        "grid_volume": lambda x: F.grid_sample(volume(x), _flow(x, 1.1), align_corners=False),
        "grid_volume_border": lambda x: F.grid_sample(
            volume(x), _flow(x, 1.7), padding_mode="border", align_corners=True
        ),
        "grid_volume_reflection": lambda x: F.grid_sample(
            volume(x), _flow(x, 2.3), padding_mode="reflection", align_corners=False
        ),
        "affine_grid_of_a_column": lambda x: F.affine_grid(x[:, 0, :2, :3], (2, 4, 5, 1), align_corners=True),
        "affine_grid_of_a_volume": lambda x: F.affine_grid(x[:, 0, :3, :4], (2, 4, 2, 5, 3), align_corners=False),
        "affine_grid": lambda x: F.grid_sample(
            x, F.affine_grid(x[:, 0, :2, :3] * 0.4, (2, 4, 5, 5), align_corners=False), align_corners=False
        ),
    },
    "matrices": {
        "inverse": lambda x: torch.linalg.inv(_squares(x)),
        "solve": lambda x: torch.linalg.solve(_squares(x), x[:, :, :4, 4:]),
        "solve_of_vectors": lambda x: torch.linalg.solve(_squares(x), x[:, :, 4, :4]),
        "solve_from_the_right": lambda x: torch.linalg.solve(_squares(x), x[:, :, 4:, :4], left=False),
        "solve_triangular": lambda x: torch.linalg.solve_triangular(
            x[:, :, :4, :4] * 0.3 + 2 * torch.eye(4), x[:, :, :4, 4:], upper=True
        ),
        "solve_triangular_from_the_right": lambda x: torch.linalg.solve_triangular(
            x[:, :, :4, :4] * 0.3 + 2 * torch.eye(4), x[:, :, 4:, :4], upper=False, left=False
        ),
        "determinant": lambda x: torch.linalg.det(_squares(x)),
        "determinant_of_two": lambda x: torch.linalg.det(x[:, :, :2, :2]),
        "determinant_of_three": lambda x: torch.linalg.det(x[:, :, :3, :3]),
        "log_determinant": lambda x: torch.linalg.slogdet(_squares(x))[1],
        "cholesky": lambda x: torch.linalg.cholesky(_squares(x) @ _squares(x).mT),
        "exponential": lambda x: torch.linalg.matrix_exp(x * 0.3),
        "exponential_of_large_ones": lambda x: torch.linalg.matrix_exp((x - x.mT) * 9),
        "reflections": lambda x: torch.linalg.householder_product(x[:, :, :, :5] * 0.7, x[:, :, 5, :3]),
        "qr_tall": lambda x: _joined(torch.linalg.qr(x[:, :, :, :3])),
        "qr_wide": lambda x: _joined(torch.linalg.qr(x[:, :, :4])),
        "qr_complete": lambda x: _joined(torch.linalg.qr(x[:, :, :4, :5], mode="complete")),
        "qr_upper": lambda x: x * torch.linalg.qr(x, mode="r")[1].detach(),
        "solve_triangular_of_units": lambda x: torch.linalg.solve_triangular(
            x * 0.3, x, upper=False, unitriangular=True
        ),
        "cholesky_old": lambda x: torch.cholesky(_squares(x) @ _squares(x).mT),
        "cholesky_inverse": lambda x: torch.cholesky_inverse(_squares(x).tril() + torch.eye(4)),
        "cholesky_inverse_upper": lambda x: torch.cholesky_inverse(_squares(x).triu() + torch.eye(4), upper=True),
        "triangular_solve": lambda x: torch.triangular_solve(x[:, :, :4, 4:], _squares(x) + torch.eye(4))[0],
        "triangular_solve_transposed": lambda x: torch.triangular_solve(
            x[:, :, :4, 4:], _squares(x) + torch.eye(4), transpose=True, unitriangular=True
        )[0],
        "cholesky_solve": lambda x: torch.cholesky_solve(x[:, :, :4, 4:], _squares(x).tril() + torch.eye(4)),
        "cholesky_solve_upper": lambda x: torch.cholesky_solve(
            x[:, :, :4, 4:], (_squares(x) + torch.eye(4)).triu(), upper=True
        ),
        "cholesky_upper": lambda x: torch.linalg.cholesky(_squares(x) @ _squares(x).mT, upper=True),
    },
    "layers": {
        "pairwise_distances": lambda x: F.pdist(x.flatten(2)[0]) * F.pdist(row(x)[:, 0].repeat(2, 1)[:4], 1.0),
        "layer_norm_statistics": lambda x: torch.cat(
            [each.flatten(1) for each in torch.native_layer_norm(x, (6, 6), x[0, 0], None, 0.1)], 1
        ),
        "group_norm_statistics": lambda x: torch.cat(
            [
                each.flatten(1)
                for each in torch.native_group_norm(x, x[1, :, 2, 3] * 1, x[0, :, 1, 1] * 1, 2, 4, 36, 2, 0.1)
            ],
            1,
        ),
        "layer_norm": lambda x: F.layer_norm(x, (6,)),
        "layer_norm_2d": lambda x: F.layer_norm(x.permute(0, 2, 3, 1), (4,), eps=0.3).permute(0, 3, 1, 2),
        "group_norm": lambda x: F.group_norm(x, 2, eps=0.2),
        "group_norm_far_from_zero": lambda x: F.group_norm(whole(x) + 1000, 2) * torch.arange(1.0, 7.0),
        "instance_norm": lambda x: F.instance_norm(x),
        "instance_norm_far_from_zero": lambda x: F.instance_norm(whole(x) - 3000) * torch.arange(1.0, 7.0),
        "instance_norm_1d": lambda x: F.instance_norm(row(x), eps=0.1),
        "rms_norm": lambda x: F.rms_norm(x, (6,), eps=0.2),
        "rms_norm_of_all": lambda x: F.rms_norm(x, SHAPE),
        "local_response_norm": lambda x: F.local_response_norm(x, 3, 0.5, 0.6, 2.0),
        "local_response_norm_even": lambda x: F.local_response_norm(x, 2),
        "batch_norm_no_stats": lambda x: F.batch_norm(x, None, None, training=True, eps=0.2),
        "weight_standard": lambda x: F.conv2d(
            torch.arange(200.0).view(2, 4, 5, 5).sin(),
            F.batch_norm(x[:, :, :3, :3].reshape(1, 2, -1), None, None, training=True, eps=1e-3).reshape(2, 4, 3, 3),
        ),
        "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
        "attention_causal": lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True),
        "attention_causal_of_last": lambda x: F.scaled_dot_product_attention(
            x[:, :, :3], x, x, is_causal=True, scale=0.3
        ),
        "attention_causal_of_more": lambda x: F.scaled_dot_product_attention(
            x, x[:, :, :2], x[:, :, :2], is_causal=True
        ),
        "attention_of_grouped_heads": lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:], enable_gqa=True),
        "expand_to_itself": lambda x: (x.expand(x.shape) * 2).expand(-1, -1, 6, -1).exp().mean(1).expand(2, 6, -1),
        "attention_mask": lambda x: F.scaled_dot_product_attention(x, x, x, attn_mask=x.mean(1, keepdim=True)),
        "attention_bool": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6, dtype=torch.bool).tril()),
        "conv_1d": lambda x: F.conv1d(row(x), row(x).reshape(-1, 6, 3)[:4], padding=1),
        "conv_transpose_1d": lambda x: F.conv_transpose1d(row(x), row(x).reshape(6, -1, 3)[:, :4], stride=2),
        "conv_transpose_2d": lambda x: F.conv_transpose2d(
            x, x.reshape(4, -1, 3, 3)[:, :2], stride=2, padding=1, output_padding=1
        ),
        "conv_transpose_3d": lambda x: F.conv_transpose3d(
            volume(x), x.reshape(4, -1, 2, 2, 2)[:, :2], stride=2, padding=(0, 1, 1), output_padding=(1, 0, 1)
        ),
        "conv_transpose_3d_grouped": lambda x: F.conv_transpose3d(
            volume(x), x.reshape(4, -1, 1, 2, 3)[:, :3], x.mean((0, 2, 3)).repeat(2)[:6], dilation=(1, 2, 1), groups=2
        ),
        "conv_transpose_1d_output_padding_of_the_stride": lambda x: F.conv_transpose1d(
            row(x), row(x).reshape(6, -1, 3)[:, :4], row(x)[0, :4, 0], 1, 1, 2, dilation=3
        ),
        "conv_transpose_2d_output_padding_beyond_the_stride": lambda x: F.conv_transpose2d(
            x, x.reshape(4, -1, 3, 3)[:, :2], stride=(2, 1), padding=(1, 2), output_padding=(2, 1), dilation=3
        ),
        "conv_transpose_3d_output_padding_of_the_stride": lambda x: F.conv_transpose3d(
            volume(x), x.reshape(4, -1, 2, 2, 2)[:, :2], output_padding=(1, 0, 1), padding=(0, 1, 1), dilation=2
        ),
        "conv_same": lambda x: F.conv2d(x, x[:, :, :3, :4].reshape(2, 4, 3, 4), padding="same"),
        "bilinear": lambda x: F.bilinear(row(x), row(x), row(x)[0, :1, :, None] * row(x)[1, :2, None, :]),
        "linear_3d": lambda x: F.linear(row(x), row(x)[0]),
        "embedding_of_padding": lambda x: F.embedding(torch.tensor([[0, 2], [2, 5]]), row(x)[0], padding_idx=2),
        "attention_of_masked_rows": lambda x: F.scaled_dot_product_attention(
            row(x), row(x), row(x), attn_mask=torch.arange(6).view(6, 1) % 3 < torch.arange(6) - 2
        ),
        "linear_of_columns": lambda x: F.linear(row(x).mT, x[0, 0], x[0, 0, 0]),
        "embedding": lambda x: F.embedding(torch.tensor([[3, 0, 3], [1, 2, 3]]), x.permute(1, 0, 2, 3).flatten(1)),
        "cross_entropy_inside": lambda x: x * F.cross_entropy(x.mean((2, 3)), torch.tensor([1, 2])),
        "smooth_l1_inside": lambda x: x * F.smooth_l1_loss(x, x.flip(3), reduction="none"),
        "lstm": None,
        "lstm_two_layers": None,
        "gru": None,
        "rnn": None,
        "multihead": None,
        "transformer": None,
        "spectral": lambda x: x / torch.linalg.matrix_norm(x.flatten(2)[0]),
    },
    **ACTIVATIONS,
    **DEFORMABLE,
    **LOOKUPS,
    **SPECTRA,
}
