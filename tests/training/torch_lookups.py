# SPDX-License-Identifier: Apache-2.0
"""Functions of one tensor that look up, select and pool, and special functions, for `torch_operators`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.torch_topics import Function, row, volume

_BAGS = torch.tensor([[3, 0, 3], [1, 2, 3], [5, 5, 4], [0, 1, 4]])


def _table(x: Tensor) -> Tensor:
    """Six rows of 24."""
    return row(x)[0] + row(x)[1].flip(0)


def _holes(x: Tensor) -> Tensor:
    """x with NaN at some places, two of each five."""
    places = (torch.arange(144) * 2 % 5 < 2).view(4, 6, 6)
    return torch.where(places, math.nan, x)


def _adaptive(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Adaptive max pooling put back at the places of the largest elements."""
    pool = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}[len(size)]
    values, places = pool(x, size, return_indices=True)
    extents = x.shape[x.ndim - len(size) :]
    flat = torch.zeros_like(x).flatten(x.ndim - len(size))
    start = flat.scatter_add(-1, places.flatten(x.ndim - len(size)), values.flatten(x.ndim - len(size)) * 2)
    return start.unflatten(-1, extents) + places.to(x.dtype).mean() * 0.1 * x


def _whole(x: Tensor) -> Tensor:
    """x rounded, with the gradient of x: many elements tie, with zeros and with each other."""
    return torch.round(x.detach()) + x - x.detach()


def _masked_rows(x: Tensor) -> Tensor:
    """Scores with rows to which the least number is added, which leaves nothing else of them, and a row of -inf."""
    rows = torch.arange(6)[:, None]
    scores = x + torch.where(rows < 2, torch.finfo(torch.float32).min, 0.0).to(x.dtype)
    return torch.where(rows == 3, -math.inf, scores)


def _copies(x: Tensor) -> Tensor:
    """Results of the operators that copy what others view."""
    found = [
        torch.view_copy(x, (8, 36)),
        torch.permute_copy(x, (1, 0, 3, 2)),
        torch.expand_copy(x[:, :1], (2, 3, 6, 6)),
        torch.unsqueeze_copy(x[0], 1),
        torch.squeeze_copy(x[:1]),
        torch.t_copy(x[0, 1]),
        torch.transpose_copy(x, 0, 2),
        torch.select_copy(x, 1, 2),
        torch.slice_copy(x, 2, 1, 5, 2),
        torch.split_copy(x, 4, 2)[1],
        torch.split_with_sizes_copy(x, (1, 3), 1)[1],
        torch.unbind_copy(x, 3)[4],
        torch.diagonal_copy(x, 1, 2, 3),
        torch.unfold_copy(x, 3, 2, 2),
        torch.as_strided_copy(x, (2, 3), (3, 7), 4),
        torch.alias_copy(x) * torch.detach_copy(x.detach()),
        torch.view_as_real_copy(torch.view_as_complex(x.unflatten(3, (3, 2)).contiguous())),
    ]
    return torch.cat([(each * (number + 1)).flatten() for number, each in enumerate(found)]).repeat(2)


LOOKUPS: dict[str, dict[str, Function]] = {
    "lookups": {
        "bags_sum": lambda x: x.mean(1).sum() * F.embedding_bag(_BAGS, _table(x), mode="sum")[:2],
        "bags_mean": lambda x: F.embedding_bag(_BAGS, _table(x), mode="mean"),
        "bags_max": lambda x: F.embedding_bag(_BAGS, _table(x), mode="max"),
        "bags_mean_of_padding": lambda x: F.embedding_bag(_BAGS, _table(x), mode="mean", padding_idx=3),
        "bags_max_of_padding": lambda x: F.embedding_bag(_BAGS % 2, _table(x), mode="max", padding_idx=-5),
        "bags_of_weights": lambda x: F.embedding_bag(
            _BAGS, _table(x), mode="sum", per_sample_weights=x[0, 0, :4, :3].contiguous()
        ),
        "bags_of_offsets": lambda x: F.embedding_bag(_BAGS.flatten(), _table(x), torch.tensor([0, 2, 2, 7])),
        "bags_of_offsets_sum": lambda x: F.embedding_bag(
            _BAGS.flatten(),
            _table(x),
            torch.tensor([0, 5, 5, 12]),
            mode="sum",
            include_last_offset=True,
            per_sample_weights=x[0, 1, :2].flatten() * 2,
        ).repeat(2, 1),
        "bags_of_offsets_max": lambda x: F.embedding_bag(
            _BAGS.flatten(), _table(x), torch.tensor([0, 2, 2, 7]), mode="max", padding_idx=1
        ),
        "bags_of_offsets_mean": lambda x: F.embedding_bag(
            _BAGS.flatten(), _table(x), torch.tensor([0, 2, 2, 7]), mode="mean", padding_idx=0
        ),
        "repeats": lambda x: x.repeat_interleave(torch.tensor([2, 0, 1, 3]), 1) * 2,
        "repeats_of_all": lambda x: x[:, 0, :2].repeat_interleave(torch.tensor([2, 1, 3, 0] * 6)).repeat(2),
        "repeats_of_one": lambda x: x.repeat_interleave(torch.tensor([3]), -1),
        "adaptive_places": lambda x: _adaptive(x, (4, 5)),
        "adaptive_places_of_ties": lambda x: _adaptive(torch.round(x.detach()) + x - x.detach(), (2, 4)),
        "adaptive_places_1d": lambda x: _adaptive(row(x), (5,)),
        "adaptive_places_3d": lambda x: _adaptive(volume(x), (1, 2, 4)),
        "adaptive_places_no_batch": lambda x: _adaptive(x[0], (1, 3)).repeat(2, 1, 1, 1),
        "adaptive_unpool": lambda x: F.max_unpool2d(*F.adaptive_max_pool2d(x, 3, return_indices=True), 2),
        "average_ceil_divisor": lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True, divisor_override=5),
        "average_ceil_divisor_uneven": lambda x: F.avg_pool2d(
            x[..., :5], (4, 2), (3, 2), (2, 0), True, False, divisor_override=7
        ),
        "average_ceil_divisor_3d": lambda x: F.avg_pool3d(volume(x), 2, ceil_mode=True, divisor_override=3),
        "average_ceil_divisor_no_batch": lambda x: F.avg_pool2d(x[0], 4, ceil_mode=True, divisor_override=3).repeat(
            2, 1, 1
        ),
        "nanmedian": lambda x: _holes(x).nanmedian(1).values,
        "nanmedian_even": lambda x: x.nanmedian(2, keepdim=True).values * x.median(1, keepdim=True).values,
        "nanmedian_of_all": lambda x: x * _holes(x).nanmedian(),
        "nanmedian_of_none": lambda x: torch.nan_to_num(
            torch.where(torch.arange(6) < 2, math.nan, _holes(x)).nanmedian(2).values, 0.5
        ),
        "nanmedian_of_infinity": lambda x: (
            torch.where(torch.arange(6) < 1, math.inf, _holes(x)).nanmedian(3).values.clamp(max=9.0)
        ),
        "nansum": lambda x: _holes(x).nansum(1) + _holes(x).nanmean((1, 2), keepdim=True)[:, 0],
        "nan_differs": lambda x: x * (_holes(x) != _holes(x) * 2) + x * 3 * (_holes(x) != 0) + x * (_holes(x) == 0.5),
        "nan_equals": lambda x: (lambda y: x * (y != y) + x * 2 * (y == y))(_holes(x)),
        "nan_equals_itself": lambda x: x * (_holes(x) == _holes(x)) + x * 2 * (_holes(x) != _holes(x)),
        "count_of_nonzero": lambda x: x * torch.count_nonzero(_holes(_whole(x)), 1)[:, None],
        "any_of_negative": lambda x: x * (-(x > 1).int()).any() + x * (-(x > 1).int()).any(1, keepdim=True),
        "any_of_numbers": lambda x: (
            x * ((x > 1) * -0.5).any((2, 3), True) + x * torch.where(x > 1, math.nan, 0.0).any(3, True)
        ),
        "all_of_negative": lambda x: x * (-(x < 1).int()).all(1, keepdim=True),
        "fmax_of_ties": lambda x: torch.fmax(_whole(x), torch.zeros_like(x)) + torch.fmin(x.sign(), _whole(x)),
        "copysign_of_zeros": lambda x: torch.copysign(_whole(x), torch.round(x * 0.4)) + torch.copysign(x, -0.0),
        "safe_softmax": lambda x: torch.ops.aten._safe_softmax(_masked_rows(x), -1),
        "cumsum_of_large": lambda x: x.cumsum(3) * torch.tensor([1e6, 1.0, 1.0, 1.0, 1.0, 1.0]),
        "copies": _copies,
    },
    "special_functions": {
        "i0": lambda x: torch.log(torch.special.i0(x * 4)) * 5,
        "i0_at_zero": lambda x: torch.special.i0(x * (torch.arange(6) % 2)),
        "i0_large": lambda x: torch.special.i0(x.sign().detach() * 9 + x).log(),
        "i0e": lambda x: torch.special.i0e(x * 6) * 3,
        "i1": lambda x: torch.special.i1(x * 4) * torch.exp(-4 * x.abs()),
        "i1_at_zero": lambda x: torch.special.i1(x * (torch.arange(6) % 2)),
        "i1e": lambda x: torch.special.i1e(x * 6) * 3,
        "erfinv": lambda x: torch.erfinv(torch.tanh(x)),
        "erfinv_sum": lambda x: x * torch.erfinv(x.clamp(-2, 2) / 3).sum(),
        "erfinv_near_one": lambda x: torch.erfinv(1 - torch.exp(-x.abs() - 3)),
        "log1p_near_zero": lambda x: torch.log1p(x * 1e-6) * 1e6,
        "expm1_near_zero": lambda x: torch.expm1(x * 1e-6) * 1e6 + F.elu(x * 1e-6) * 1e6,
        "erfc_of_large": lambda x: torch.erfc(3 + x.abs()).log(),
        "softplus_near_zero": lambda x: F.softplus(x - 18) * 1e7,
        "logsigmoid_near_zero": lambda x: F.logsigmoid(x.abs() + 17) * 1e7,
        "ndtr": lambda x: torch.special.ndtr(x) + torch.special.xlog1py(x, x * x) + torch.special.entr(x.abs()),
        "logit": lambda x: torch.logit(torch.sigmoid(x)) + torch.logit(x * 0.3 + 0.5, eps=0.1),
        "kaiser": lambda x: (
            torch.special.i0(12.0 * torch.sqrt(1 - torch.tanh(x) ** 2)) / torch.special.i0(torch.tensor(12.0))
        ),
    },
}
