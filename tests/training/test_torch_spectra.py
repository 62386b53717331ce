# SPDX-License-Identifier: Apache-2.0
"""Models of spectra and complex parameters: one step of SGD against PyTorch in float64; what is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from tests.training.harness import Runner  # noqa: E402
from tvm_convgrad.core.errors import ModelError  # noqa: E402
from tvm_convgrad.training.frontends.fourier_table import wave_table  # noqa: E402
from tvm_convgrad.training.frontends.torch_export.model import from_exported_program  # noqa: E402
from tvm_convgrad.training.step.build import build_step  # noqa: E402

nn, F = torch.nn, torch.nn.functional

UNIT = 2.0**-24


class Spectral(nn.Module):
    """FNO's spectral convolution, with complex weights, in one or two dimensions."""

    def __init__(self, channels: int, modes: tuple[int, ...]) -> None:
        super().__init__()
        self.modes = modes
        self.weight = nn.Parameter(0.1 * torch.randn(channels, channels, *modes, dtype=torch.complex64))
        self.negative = nn.Parameter(0.1 * torch.randn(channels, channels, *modes, dtype=torch.cfloat))
        self.skip = {1: nn.Conv1d, 2: nn.Conv2d}[len(modes)](channels, channels, 1)

    def forward(self, x):
        rank = len(self.modes)
        spectrum = torch.fft.rfftn(x, dim=list(range(2, 2 + rank)))
        found = torch.zeros(x.shape[0], *spectrum.shape[1:], dtype=spectrum.dtype)
        low = (..., *(slice(0, mode) for mode in self.modes))
        letters = "xyz"[:rank]
        equation = f"bi{letters},io{letters}->bo{letters}"
        mixed = torch.einsum(equation, spectrum[low], self.weight)
        found[low] = mixed if rank == 2 else mixed + mixed.conj() * self.negative.sum((0, 1))
        if rank == 2:
            high = (..., slice(-self.modes[0], None), slice(0, self.modes[1]))
            found[high] = torch.einsum(equation, spectrum[high], self.negative)
        return F.gelu(torch.fft.irfftn(found, s=x.shape[2:]) + self.skip(x))


class Operator(nn.Module):
    """FNO: lifting, spectral layers, projection."""

    def __init__(self, modes: tuple[int, ...]) -> None:
        super().__init__()
        conv = {1: nn.Conv1d, 2: nn.Conv2d}[len(modes)]
        self.lift, self.layers = conv(1, 4, 1), nn.Sequential(Spectral(4, modes), Spectral(4, modes))
        self.project = conv(4, 1, 1)

    def forward(self, x):
        return self.project(self.layers(self.lift(x)))


class GlobalFilter(nn.Module):
    """GFNet: patches, a learnt filter of their spectra, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 8, 4, 4), nn.LayerNorm(8)
        self.filter = nn.Parameter(torch.randn(7, 4, 8, 2) * 0.2)
        self.mlp, self.head = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), nn.Linear(8, 5)

    def forward(self, x):
        y = self.patches(x).permute(0, 2, 3, 1)
        z = torch.fft.rfft2(self.norm(y), dim=(1, 2), norm="ortho") * torch.view_as_complex(self.filter)
        y = y + self.mlp(torch.fft.irfft2(z, s=(7, 7), dim=(1, 2), norm="ortho"))
        return self.head(y.mean((1, 2)))


class Mixing(nn.Module):
    """FNet: tokens mixed by the real part of a transform of positions and features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second = nn.Linear(6, 10), nn.LayerNorm(10), nn.Linear(10, 3)

    def forward(self, x):
        y = self.inner(x)
        y = self.first(y + torch.fft.fftn(y, dim=(1, 2)).real)
        return self.second(y[:, 0])


class Spectrogram(nn.Module):
    """The logarithm of a mel spectrogram, and a small network of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("window", torch.hann_window(25))
        self.register_buffer("mel", torch.rand(17, 6, generator=torch.Generator().manual_seed(1)))
        self.gain, self.conv, self.head = nn.Parameter(torch.ones(1)), nn.Conv1d(6, 4, 1), nn.Linear(4, 3)

    def forward(self, x):
        z = torch.stft(x * self.gain, 32, 10, 25, self.window, return_complex=True)
        y = torch.log(z.abs().pow(2).mT @ self.mel + 1e-3).mT
        return self.head(F.relu(self.conv(y)).mean(2))


class Long(nn.Module):
    """Transforms of more elements than one table has: 900 = 30², 1022 = 2 · 7 · 73, 1025 = 5² · 41."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.gate = size, nn.Parameter(torch.randn(size // 2 + 1, 2) * 0.3)

    def forward(self, x):
        z = torch.fft.rfft(x, norm="ortho") * torch.view_as_complex(self.gate)
        whole = torch.fft.fft(torch.complex(x, x.flip(1)), norm="ortho")
        return torch.fft.irfft(z, self.size, norm="ortho") * self.gate[0, 0] + whole.abs() * self.gate[1, 1]


class AtOnce(nn.Module):
    """Transforms of the input itself, one after the other, with the tables of each and those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(8) * 0.3)

    def forward(self, x):
        z, other = torch.fft.rfft(x), torch.fft.fft(x, dim=1)
        return torch.fft.irfft(z, 8) * self.gain + other.imag + torch.fft.fft(x).abs()


class Masked(nn.Module):
    """MRI: an image from undersampled data, whose mask and sensitivities are complex buffers that move."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.randn(5, 6, dtype=torch.complex64))
        self.register_buffer("constant", torch.randn(6, dtype=torch.complex64), persistent=False)
        self.refine = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, x):
        image = torch.view_as_complex(self.refine(x).permute(0, 2, 3, 1).contiguous())
        z = torch.fft.fft2(image, norm="ortho") * self.constant
        self.average.mul_(0.5).add_(z.detach().mean(0))
        return torch.view_as_real(torch.fft.ifft2(z - self.average, norm="ortho"))


class Modulus(nn.Module):
    """Complex convolutions with a modReLU; the sizes of a complex parameter scale the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(4, 1, 3, 3, dtype=torch.complex64) * 0.3)
        self.bias = nn.Parameter(torch.randn(4, dtype=torch.complex64) * 0.1)
        self.second = nn.Parameter(torch.randn(6, 4, 3, 3, dtype=torch.complex64) * 0.2)
        self.low, self.scale = (
            nn.Parameter(torch.full((6, 1, 1), -0.1)),
            nn.Parameter(torch.randn(6, dtype=torch.cfloat)),
        )
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        z = F.conv2d(torch.complex(x[:, :1], x[:, 1:]), self.first, self.bias, padding=1)
        z = F.conv2d(torch.complex(F.relu(z.real), F.relu(z.imag)), self.second, stride=2)
        size = z.abs()
        z = z * (F.relu(size + self.low) / (size + 1e-6))
        return self.head(z.abs().mean((2, 3)) * self.scale.abs()) + self.scale.imag.sum() * self.scale.angle()[:3]


def in_float64(network):
    """A copy in float64 and complex128."""
    copied = copy.deepcopy(network).double()
    for module in copied.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and tensor.dtype == torch.complex64:
                    wide = tensor.detach().to(torch.complex128)
                    held[name] = nn.Parameter(wide) if isinstance(tensor, nn.Parameter) else wide
    return copied


def real(tensor):
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()


def exported(network, x, largest=None):
    """The program for any number of samples up to the largest, or for those of x."""
    dynamic = {0: torch.export.Dim("n", max=largest)} if largest else {}
    return torch.export.export(network, (x,), dynamic_shapes=(dynamic,))


CASES = {
    "fno_1d": (lambda: Operator((5,)), (2, 1, 20)),
    "fno_2d": (lambda: Operator((3, 4)), (2, 1, 9, 12)),
    "gfnet": (GlobalFilter, (2, 3, 28, 28)),
    "fnet": (Mixing, (3, 7, 6)),
    "log_mel": (Spectrogram, (2, 200)),
    "long_900": (lambda: Long(900), (2, 900)),
    "long_1022": (lambda: Long(1022), (2, 1022)),
    "long_1025": (lambda: Long(1025), (2, 1025)),
    "at_once": (AtOnce, (2, 6, 8)),
    "modulus": (Modulus, (2, 2, 9, 8)),
    "complex_buffers": (Masked, (2, 2, 5, 6)),
}


@pytest.mark.parametrize("name", CASES)
def test_step_is_that_of_pytorch(name):
    """Loss, gradients and buffers, to rounding; of most a dynamic batch, which the graph counts first."""
    make, shape = CASES[name]
    torch.manual_seed(0)
    network = make()
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    reference = in_float64(network)
    outputs = reference(x.double())
    target = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    loss = ((outputs - target) ** 2).mean()
    loss.backward()
    largest = None if name in ("at_once", "complex_buffers", "modulus") else 64
    step = build_step(from_exported_program(exported(network, x, largest), batch=shape[0]), loss="mse", lr=1.0)
    runner = Runner(step)
    before = runner.named("parameter")
    found = runner.step(x.numpy(), target.float().numpy(), lr=1.0)
    assert float(np.asarray(found[0]).reshape(-1)[0]) == pytest.approx(loss.item(), rel=1e-5)
    after = runner.named("parameter")
    assert set(before) == {each for each, _ in reference.named_parameters()}
    for each, parameter in reference.named_parameters():
        wanted = real(parameter.grad).numpy()
        scale = max(float(np.abs(wanted).max()), float(np.abs(before[each]).max()))
        np.testing.assert_allclose(before[each] - after[each], wanted, rtol=0, atol=400 * UNIT * scale, err_msg=each)
    if name == "complex_buffers":
        average = runner.named()["average"]
        np.testing.assert_allclose(average, real(reference.average).numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("results", ["float32", "operands", "activations"])
def test_transforms_stay_in_float32(results):
    """As under PyTorch's autocast: of a model whose only products are transforms, the step is that of float32."""
    torch.manual_seed(0)
    model = from_exported_program(exported(Long(900), torch.randn(2, 900)))
    plain, narrow = build_step(model, loss="mse"), build_step(model, loss="mse", dtype="bfloat16", results=results)
    assert "bfloat16" not in narrow.module.script()
    assert narrow.module.script().count("R.matmul(") == plain.module.script().count("R.matmul(") > 8


@pytest.mark.parametrize("period", [1, 2, 3, 4, 8, 12, 49])
def test_tables_are_those_of_the_transform(period):
    wanted = np.exp(2j * np.pi * np.outer(np.arange(period), np.arange(period)) / period)
    cosines, sines = (wave_table(period, period, period, is_sine, 1.0, False) for is_sine in (False, True))
    np.testing.assert_allclose(cosines + 1j * sines, wanted, rtol=0, atol=1e-12)
    if period % 4 == 0:
        assert cosines[1, period // 4] == 0
        assert sines[1, period // 4] == 1
        assert sines[1, period // 2] == 0


class Calls(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.scale, self.function = nn.Parameter(torch.ones(1)), function

    def forward(self, x):
        return self.function(x * self.scale)


@pytest.mark.parametrize(
    ("function", "shape", "said"),
    [
        (lambda x: torch.fft.rfft(x).abs(), (2, 4099), "prime factor 4099 .*pad or crop"),
        (lambda x: torch.fft.rfft(x), (2, 8), r"output '.*' is complex.*torch.view_as_real"),
        (lambda x: torch.fft.rfft(x).tanh().abs(), (2, 8), r"aten.tanh.default .*torch.view_as_real"),
        (lambda x: (torch.fft.rfft(x) ** 0.5).abs(), (2, 8), "whole exponents only"),
        (lambda x: (torch.fft.rfft(x) ** 9).abs(), (2, 8), "up to 8, not 9"),
    ],
)
def test_what_cannot_be_imported_is_refused_with_a_remedy(function, shape, said):
    with pytest.raises(ModelError, match=said):
        from_exported_program(exported(Calls(function), torch.randn(shape)))


def test_transform_along_a_symbolic_axis_is_refused():
    network = Calls(lambda x: torch.fft.fft(x, dim=0).real)
    with pytest.raises(ModelError, match=r"_fft_.* needs a fixed length; export the model without"):
        from_exported_program(exported(network, torch.randn(4, 6), largest=5))


def test_complex_input_is_refused():
    network = Calls(lambda x: x.abs())
    with pytest.raises(ModelError, match=r"input 'x' is complex.*torch.view_as_complex"):
        from_exported_program(exported(network, torch.randn(2, 3, dtype=torch.complex64)))
