# SPDX-License-Identifier: Apache-2.0
"""Functions of one tensor that compute with complex numbers, for `torch_operators`: transforms and arithmetic."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.training.torch_topics import Function, row, volume

fft = torch.fft


def _pair(x: Tensor) -> Tensor:
    """Complex numbers, (samples, 2, 6, 6)."""
    return torch.complex(x[:, :2], x[:, 2:])


def _real(z: Tensor) -> Tensor:
    return torch.view_as_real(z)


def _apart(x: Tensor) -> Tensor:
    """Complex numbers off the axes and 0."""
    return torch.complex(x[:, :2] * x[:, :2] + 0.5, x[:, 2:] * x[:, 2:] + 0.3)


def _holes(x: Tensor) -> Tensor:
    """Complex numbers, of which a third is 0."""
    return _pair(x * (torch.arange(6) % 3 > 0))


def _spectral(x: Tensor) -> Tensor:
    """FNO's layer: low frequencies multiplied by complex weights, the others 0."""
    spectrum = fft.rfft2(x)
    weight = torch.complex(x[0, :, :3, :3].unsqueeze(1) * 0.5, x[1, :, 3:, 3:].unsqueeze(0) * 0.5)
    found = torch.zeros_like(spectrum)
    found[:, :, :3, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], weight)
    found[:, :, -2:, :3] = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, -2:, :3], weight[:, :, 1:])
    return fft.irfft2(found, s=x.shape[-2:])


def _gated(x: Tensor) -> Tensor:
    """GFNet's filter."""
    weight = torch.view_as_complex(torch.stack([x[0, :, :, :4], x[1, :, :, 2:]], -1))
    return fft.irfft2(fft.rfft2(x, norm="ortho") * weight, s=(6, 6), norm="ortho")


def _signal(x: Tensor) -> Tensor:
    """(samples, 144)."""
    return x.flatten(1)


def _again(x: Tensor, size: int, hop: int, width: int, **given: bool) -> Tensor:
    """A signal from the squares of its spectra."""
    window = torch.arange(1.0, width + 1, dtype=x.dtype).sin() ** 2 + 0.2
    z = torch.stft(_signal(x), size, hop, width, window, return_complex=True, **given)
    return torch.istft(z * z.abs(), size, hop, width, window, **given)


SPECTRA: dict[str, dict[str, Function]] = {
    "transforms": {
        "fft": lambda x: _real(fft.fft(x)),
        "fft_of_complex": lambda x: _real(fft.fft(_pair(x), dim=2)),
        "fft_padded": lambda x: _real(fft.fft(x, n=9, norm="ortho")),
        "fft_cropped": lambda x: _real(fft.fft(_pair(x), n=5, dim=-2, norm="forward")),
        "ifft": lambda x: _real(fft.ifft(_pair(x))),
        "rfft": lambda x: _real(fft.rfft(x)),
        "rfft_odd": lambda x: _real(fft.rfft(row(x)[..., :23], dim=-1, norm="ortho")),
        "rfft_first_axis": lambda x: _real(fft.rfft(x, dim=1)),
        "rfft_of_one": lambda x: _real(fft.rfft(x[..., :1])),
        "irfft": lambda x: fft.irfft(_pair(x)),
        "irfft_odd": lambda x: fft.irfft(_pair(x), n=9, dim=2),
        "irfft_cropped": lambda x: fft.irfft(_pair(x), n=5, norm="ortho"),
        "hfft": lambda x: fft.hfft(_pair(x), n=8) + _real(fft.ihfft(x, n=14).resolve_conj()).flatten(-2)[:, :2, :, :8],
        "fft2": lambda x: fft.fft2(x).real,
        "fft2_imaginary": lambda x: fft.fft2(x).imag,
        "ifft2": lambda x: _real(fft.ifft2(_pair(x), norm="ortho")),
        "rfft2": lambda x: _real(fft.rfft2(x, dim=(1, 2))),
        "irfft2": lambda x: fft.irfft2(_pair(x), s=(5, 7)),
        "fftn": lambda x: _real(fft.fftn(volume(x), dim=(1, 3, 4))),
        "ifftn": lambda x: _real(fft.ifftn(_pair(x), dim=(3, 1))),
        "rfftn": lambda x: _real(fft.rfftn(volume(x)[..., :5], dim=(2, 3, 4))),
        "irfftn": lambda x: fft.irfftn(_pair(x), dim=(1, 2, 3), s=(2, 6, 10)),
        "fftshift": lambda x: _real(fft.ifftshift(fft.fftshift(fft.fft2(x), dim=(2,)) * (1 + 2j), dim=(3,))),
        "frequencies": lambda x: (
            x * fft.fftfreq(6, 0.1).to(x.dtype) + fft.rfftfreq(11, 0.5).to(x.dtype) * x + fft.fftfreq(5)[1:2] * x
        ),
        "convolution_by_spectra": lambda x: fft.irfft(fft.rfft(x, 12) * fft.rfft(x.flip(3), 12), 12),
        "spectral": _spectral,
        "gated": _gated,
        "fnet": lambda x: fft.fft(fft.fft(row(x), dim=-1), dim=-2).real,
        "stft": lambda x: _real(
            torch.stft(_signal(x), 16, 4, window=torch.hann_window(16, dtype=x.dtype), return_complex=True)
        ),
        "stft_of_one": lambda x: torch.stft(x[0, 0].flatten(), 9, 3, center=False, return_complex=True).abs(),
        "stft_narrow_window": lambda x: _real(
            torch.stft(
                _signal(x), 20, 6, 15, torch.hamming_window(15, dtype=x.dtype), normalized=True, return_complex=True
            )
        ),
        "stft_prime_hop": lambda x: _real(
            torch.stft(_signal(x), 36, 7, 33, torch.ones(33), pad_mode="constant", return_complex=True)
        ),
        "stft_whole": lambda x: _real(
            torch.stft(_signal(x), 10, 5, onesided=False, window=torch.ones(10), return_complex=True)
        ),
        "stft_gaps": lambda x: _real(
            torch.stft(_signal(x), 8, 12, window=torch.ones(8), center=False, return_complex=True)
        ),
        "power": lambda x: (
            torch.stft(_signal(x), 16, 8, window=torch.hann_window(16, dtype=x.dtype), return_complex=True).abs() ** 2
        ),
        "istft": lambda x: _again(x, 16, 4, 16),
        "istft_narrow_window": lambda x: _again(x, 18, 4, 13),
        "istft_prime_hop": lambda x: _again(x, 36, 7, 36, normalized=True),
        "istft_whole": lambda x: _again(x, 12, 4, 12, onesided=False),
    },
    "complex_numbers": {
        "abs": lambda x: _pair(x).abs(),
        "abs_at_zero": lambda x: _holes(x).abs(),
        "abs_of_small": lambda x: (_pair(x) * 1e-25).abs() * 1e25,
        "angle": lambda x: _pair(x).angle(),
        "angle_at_zero": lambda x: _holes(x).angle(),
        "sign": lambda x: _real(_pair(x).sgn()),
        "product": lambda x: _real(_pair(x) * _pair(x.flip(3))),
        "product_with_real": lambda x: _real(_pair(x) * x[:, :2]),
        "product_with_number": lambda x: _real(_pair(x) * (2 - 1j) * 0.5),
        "product_with_mask": lambda x: _real(_pair(x) * (x[:, :2] > 0)),
        "sums": lambda x: _real(_pair(x) + x[:, :1] - (1 + 2j) * _pair(x)[:, :, :1]) + _real(2 - _pair(x)),
        "sum_with_alpha": lambda x: _real(torch.add(_pair(x), _pair(x.flip(2)), alpha=-2)),
        "rotation_of_real": lambda x: _real(x * 1j + 1),
        "quotient": lambda x: _real(_pair(x) / _apart(x.flip(2))),
        "quotient_by_real": lambda x: _real(_pair(x) / (x[:, :2] ** 2 + 1) / 3.0),
        "quotient_of_real": lambda x: _real(x[:, :2] / _apart(x)) + _real(_apart(x).reciprocal()),
        "quotient_of_large": lambda x: _real(_pair(x) * 1e25 / (_apart(x.flip(2)) * 1e25)),
        "conjugate": lambda x: (
            _real((_pair(x).conj() * _pair(x.flip(2))).resolve_conj()) + _pair(x).mH.imag.unsqueeze(-1)
        ),
        "powers": lambda x: _real(_apart(x) ** 3 + _apart(x) ** 2) + _real(_apart(x) ** -1) + _real(_pair(x).square()),
        "functions": lambda x: _real(torch.exp(_pair(x)) + torch.log(_apart(x)) + torch.sqrt(_apart(x))),
        "polar": lambda x: _real(torch.polar(x[:, :2] ** 2, x[:, 2:])),
        "matmul": lambda x: _real(_pair(x) @ _pair(x.flip(3)).mH),
        "matmul_with_real": lambda x: _real(_pair(x) @ torch.complex(x[:, 2:], torch.zeros_like(x[:, 2:]))),
        "matrix_times_vector": lambda x: _real(_pair(x)[0, 0] @ _pair(x)[1, 0, 0]),
        "linear": lambda x: _real(F.linear(_pair(x), _pair(x)[0, 0], _pair(x)[1, 1, 2])),
        "einsum": lambda x: _real(torch.einsum("nchw,nkhw->nck", _pair(x), _pair(x.flip(1)))),
        "convolution": lambda x: _real(F.conv2d(_pair(x), _pair(x)[:1, :, :3, :2], _pair(x)[0, :1, 0, 0], padding=1)),
        "convolution_by_real": lambda x: _real(
            F.conv1d(_pair(x)[0], torch.complex(x[0, :2, :3], x[1, :2, :3]).mT[:, :, :2].mT.repeat(1, 3, 1))
        ),
        "sum": lambda x: _real(_pair(x).sum((1, 2))) + _real(_pair(x).mean(2)).mean(1),
        "variance": lambda x: _pair(x).var(2),
        "norm": lambda x: torch.linalg.vector_norm(_pair(x), dim=1) + _pair(x).norm(p=1, dim=2).unsqueeze(1).mean(2),
        "cat": lambda x: _real(torch.cat([_pair(x), x[:, :1].to(_pair(x).dtype), _pair(x).conj()], 1)),
        "stack": lambda x: _real(torch.stack([_pair(x), _pair(x) * 1j], 1)),
        "split": lambda x: _real(
            _pair(x).split([2, 4], 3)[1] * _pair(x).unbind(1)[1].chunk(2, 2)[0].sum(2)[:, None, :, None]
        ),
        "select": lambda x: _real(_pair(x)[:, 0, [1, 3, -1], 2:]),
        "gather": lambda x: _real(_pair(x).index_select(2, torch.tensor([0, 0, 5]))),
        "where": lambda x: _real(torch.where(x[:, :2] > 0, _pair(x), _pair(x).conj() * 2)),
        "masked_fill": lambda x: _real(_pair(x).masked_fill(x[:, :2] > 0, 2.0)),
        "index_put": lambda x: _real(_written(x)),
        "view": lambda x: _real(_pair(x).transpose(1, 2).reshape(2, -1, 3).expand(2, 24, 3).roll(1, 1).flip(2)),
        "pad": lambda x: _real(F.pad(_pair(x), (1, 0, 2, -1))),
        "detach": lambda x: _real(_pair(x) * _pair(x).detach()),
        "equal": lambda x: x[:, :2] * (_holes(x) == 0) + x[:, 2:] * (_holes(x) != 0),
        "parts": lambda x: _pair(x).real * _pair(x).imag,
        "double_precision": lambda x: _real(_pair(x).to(torch.complex128) * 3).to(x.dtype),
        "constants": lambda x: _real(_pair(x) * torch.full((6,), 1 - 2j) + torch.tensor([1j, 2, 3, 0, 1, 2])),
        "rotary": lambda x: _real(
            torch.view_as_complex(x.unflatten(3, (3, 2))) * torch.polar(torch.ones(6, 3), torch.arange(18.0).view(6, 3))
        ),
    },
}


def _written(x: Tensor) -> Tensor:
    z = _pair(x) * 1
    z[:, 0, 1:3] = 1j
    z[:, :, :, 4] += x[:, :2, :, 0]
    z[:, 1, torch.tensor([0, 5])] = z[:, 0, torch.tensor([3, 3])] * 2
    return z
