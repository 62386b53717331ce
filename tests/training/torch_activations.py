# SPDX-License-Identifier: Apache-2.0
"""Activations and bounds of one tensor, for `torch_operators`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.torch_topics import Function, dead, whole

_LABELS = torch.tensor([[3, 0, -1, 2, 5, -1], [1, 4, 1, 2, -1, 0]]).repeat(1, 4)
"""Labels of two samples, of which those in front of the first -1 count; one occurs twice."""


def _probabilities(x: Tensor) -> Tensor:
    """Probabilities, some of which are 0 and 1."""
    return torch.where(x > 0.5, x * 0 + 1, torch.where(x < -1, x * 0, torch.sigmoid(x)))


def _multiples(x: Tensor) -> Tensor:
    """Whole multiples of a power of two, whose quotients by 7 float32 rounds, with the gradient of x."""
    return torch.round(x.detach() * 4) * 2**21 + (x - x.detach())


ACTIVATIONS: dict[str, dict[str, Function]] = {
    "activations": {
        "elu": lambda x: F.elu(x * 3),
        "elu_large": lambda x: F.elu(x * 100),
        "elu_alpha": lambda x: F.elu(x * 100, 0.7),
        "celu": lambda x: F.celu(x * 100, 1.3),
        "selu": lambda x: F.selu(x * 100),
        "softplus": lambda x: F.softplus(x * 100),
        "mish": lambda x: F.mish(x * 50),
        "silu": lambda x: F.silu(x),
        "gelu": lambda x: F.gelu(x),
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "hardswish": lambda x: F.hardswish(x * 4),
        "hardsigmoid": lambda x: F.hardsigmoid(x * 4),
        "hardtanh": lambda x: F.hardtanh(x * 2),
        "relu6": lambda x: F.relu6(x * 8),
        "relu6_on_its_borders": lambda x: F.relu6(whole(x) * 3),
        "hardtanh_on_its_borders": lambda x: F.hardtanh(whole(x), -1.0, 2.0),
        "clamp_on_its_borders": lambda x: whole(x).clamp(-1, 2),
        "binary_cross_entropy": lambda x: F.binary_cross_entropy(
            _probabilities(x), torch.sigmoid(x.detach().flip(0)), weight=x.detach().abs(), reduction="none"
        ),
        "binary_cross_entropy_mean": lambda x: F.binary_cross_entropy(_probabilities(x), (x > 0).to(x.dtype)) * x,
        "multilabel_margin": lambda x: (
            F.multilabel_margin_loss(x[:, :, 0].flatten(1), _LABELS, reduction="none")[:, None] * x[:, 0, 0]
        ),
        "multilabel_margin_of_one": lambda x: F.multilabel_margin_loss(x[0, 0, 0, 0] * 2, _LABELS[0, 0] * 0) + x,
        "multilabel_margin_sum": lambda x: F.multilabel_margin_loss(x[0, 0, 0], _LABELS[0, :6], reduction="sum") * x,
        "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "glu": lambda x: F.glu(x, 1),
        "logsigmoid": lambda x: F.logsigmoid(x * 50),
        "tanhshrink": lambda x: F.tanhshrink(x),
        "softshrink": lambda x: F.softshrink(x),
        "hardshrink": lambda x: F.hardshrink(x),
        "softsign": lambda x: F.softsign(x),
        "threshold": lambda x: F.threshold(x, 0.1, 0.5),
        "clamp": lambda x: x.clamp(-0.5, 0.7),
        "clamp_min": lambda x: x.clamp_min(0.3),
        "clamp_tensor": lambda x: x.clamp(max=torch.full((6,), 0.2)),
        "abs": lambda x: x.abs(),
        "sqrt": lambda x: (x.abs() + 0.1).sqrt(),
        "rsqrt": lambda x: (x * x + 0.1).rsqrt(),
        "pow": lambda x: x**3 + (x * x + 0.5) ** 0.7,
        "pow_negative": lambda x: (x * x + 0.5) ** -1.5,
        "exp2": lambda x: torch.exp2(x),
        "expm1": lambda x: torch.expm1(x),
        "log1p": lambda x: torch.log1p(x.abs()),
        "log2": lambda x: torch.log2(x.abs() + 0.2) + torch.log10(x.abs() + 0.2),
        "reciprocal": lambda x: 1 / (x * x + 1) + (x * x + 2).reciprocal(),
        "erf": lambda x: torch.erf(x) + torch.erfc(x * 2),
        "atan2": lambda x: torch.atan2(x, x * x + 1),
        "asinh": lambda x: torch.asinh(x) + torch.atanh(x * 0.3) + torch.acosh(x * x + 1.5),
        "trigonometry": lambda x: x.sin() + x.cos() * 2 + x.sinh() + x.cosh() * 2 + x.atan(),
        "lerp": lambda x: torch.lerp(x, x * x, 0.3),
        "addcmul": lambda x: torch.addcmul(x, x, x.sin(), value=0.5),
        "addcdiv": lambda x: torch.addcdiv(x, x, x * x + 1, value=0.5),
        "floor_divide": lambda x: x * (torch.arange(6) // 2) + x * (7.0 // torch.arange(1, 7)),
        "true_divide_trunc": lambda x: (
            x * torch.div(torch.arange(6), 4, rounding_mode="trunc") + torch.div(x, 0.3, rounding_mode="floor") * x
        ),
        "remainder": lambda x: torch.remainder(x, 0.7) + torch.fmod(x, 0.7),
        "remainder_of_large": lambda x: torch.remainder(_multiples(x), 7.0) + torch.fmod(_multiples(x), -7.0),
        "remainder_by_infinity": lambda x: torch.remainder(x, torch.tensor(math.inf)).clamp(max=3.0),
        "remainder_of_divisor": lambda x: torch.remainder(
            _multiples(x).detach(), x.detach().sign() * 7 + x - x.detach()
        ),
        "floor_divide_of_large": lambda x: x * torch.div(_multiples(x), 7.0, rounding_mode="floor").remainder(4.0),
        "add_to_itself": lambda x: torch.add(x, x, alpha=-3) + torch.sub(x, x, alpha=0.5),
        "lgamma": lambda x: torch.lgamma(x.abs() * 5 + 0.1) + torch.lgamma(torch.tanh(x) * 0.3 - 1.5),
        "digamma": lambda x: torch.digamma(x.abs() * 5 + 0.1) + torch.digamma(torch.tanh(x) * 0.3 - 1.5),
        "polygamma": lambda x: torch.polygamma(1, x.abs() + 0.3) + torch.polygamma(2, torch.tanh(x) * 0.3 - 1.5),
        "round": lambda x: x - x.round() + x.floor() * 0.5 + x.ceil() * x,
        "sign": lambda x: x * x.sign() + x.trunc() * x,
        "maximum": lambda x: torch.maximum(x, x.flip(3)) + torch.minimum(x, x.flip(2)),
        "rsub": lambda x: 1.5 - x,
        "logaddexp": lambda x: torch.logaddexp(x, x * 2),
        "sigmoid_gate": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)),
        "nan_to_num": lambda x: torch.nan_to_num(x),
        "double_and_back": lambda x: (x.double() * 2).float(),
        "bool_arithmetic": lambda x: x * (x > 0) + x * (x < 1).float() - x * (~(x > 0.5)),
        "copysign": lambda x: torch.copysign(x * x, x),
        "hypot": lambda x: torch.hypot(x, x + 3),
        "sinc_at_zero": lambda x: torch.sinc(dead(x)),
        "heaviside": lambda x: x * torch.heaviside(x.detach(), torch.tensor(0.5, dtype=x.dtype)),
        "square": lambda x: x.square() + torch.sinc(x + 0.25),
    },
}
