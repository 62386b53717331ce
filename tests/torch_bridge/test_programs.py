# SPDX-License-Identifier: Apache-2.0
"""PyTorch's transforms, autocast, compile, checkpoints, DDP and forked workers go on with the bridge enabled."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

F = torch.nn.functional


def operands():
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(2, 4, 8, 8, generator=generator), torch.randn(6, 4, 3, 3, generator=generator)
    return x, w, torch.randn(6, generator=generator)


def loss(x, w, b):
    return F.conv2d(x, w, b, padding=1).sin().sum()


def twice(function):
    """What kernels give: the first call of a signature is PyTorch's."""
    function()
    before = bridge.stats().kernel_calls
    result = function()
    assert bridge.stats().kernel_calls > before, bridge.explain()
    return result


def own(function):
    """What PyTorch gives without us."""
    installed = bridge.override.BRIDGE
    policy, folder = installed.policy, installed.folder
    bridge.disable()
    try:
        return function()
    finally:
        installed.install(policy, folder)


def same(function, rtol: float = 1e-5, atol: float = 1e-4) -> None:
    torch.testing.assert_close(twice(function), own(function), rtol=rtol, atol=atol)


def grads(function=loss):
    tensors = [each.requires_grad_() for each in operands()]
    return torch.autograd.grad(function(*tensors), tensors)


def test_gradients_of_gradients(kernels_always: None) -> None:
    """PyTorch's formula of the backward operator calls both operators again."""

    def second():
        x, w, b = (each.requires_grad_() for each in operands())
        first = torch.autograd.grad(loss(x, w, b), (x, w, b), create_graph=True)
        return torch.autograd.grad(sum((each * each).sum() for each in first), (x, w, b))

    same(second, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradcheck_in_float64_is_pytorchs(transposed: bool, kernels_always: None) -> None:
    function = F.conv_transpose2d if transposed else F.conv2d
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((1, 2, 4, 4), (2, 2, 2, 2)))
    assert torch.autograd.gradcheck(function, (x, w))
    assert torch.autograd.gradgradcheck(function, (x, w))
    assert all(each.by_kernels == 0 for each in bridge.explain() if "float64" in each.call)


def test_functional_transforms(kernels_always: None) -> None:
    x, w, b = operands()
    same(lambda: torch.func.grad(loss, argnums=(0, 1, 2))(x, w, b))
    same(lambda: torch.func.vmap(torch.func.grad(loss, argnums=1), in_dims=(0, None, None))(x[:, None], w, b))
    same(lambda: torch.func.jvp(loss, (x, w, b), (x.cos(), w.cos(), b.cos())), rtol=1e-4)

    def curvature():
        return torch.func.hessian(lambda s: loss(x, w * s, b))(torch.tensor(1.0))

    torch.testing.assert_close(curvature(), own(curvature), rtol=1e-3, atol=0.1)  # its vmap makes tensors strided


def test_autocast(kernels_always: None) -> None:
    def step():
        with torch.autocast("cpu", torch.bfloat16):
            return grads()

    same(step, rtol=0.05, atol=0.1)


def test_checkpoint(kernels_always: None) -> None:
    same(lambda: grads(lambda *each: torch.utils.checkpoint.checkpoint(loss, *each, use_reentrant=False)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_whole_graph(backend: str, kernels_always: None) -> None:
    """Inductor, which generates C++ for all else, calls PyTorch's operators for convolutions, and so ours."""
    same(lambda: grads(torch.compile(loss, fullgraph=True, backend=backend)))


def test_traced_scripts(kernels_always: None) -> None:
    """While torch.jit.trace records, extents are tensors and PyTorch computes; what it made calls kernels.

    So it is where a choice was made before."""
    for _ in range(3):
        grads()

    def gradients():
        x, w, b = operands()
        traced = torch.jit.trace(loss, (x, w, b), check_trace=False)
        return [grads(traced) for _ in range(3)][-1]

    same(gradients)


def test_inference_and_modes(kernels_always: None) -> None:
    x, w, b = operands()

    def inference():
        with torch.inference_mode():
            return F.conv2d(x, w, b).clone()

    same(inference)
    with torch.no_grad():
        same(lambda: F.conv2d(x, w, b))
    same(lambda: F.conv2d(x[0], w, b))  # without a batch
    last = x.to(memory_format=torch.channels_last)
    for enabled in (True, False):
        with torch.backends.mkldnn.flags(enabled=enabled):
            same(lambda: F.conv2d(last, w, b))
            assert F.conv2d(last, w, b).stride() == own(lambda: F.conv2d(last, w, b)).stride()


class Tagged(torch.Tensor):
    """A subclass without a dispatch of its own."""


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda x, w: F.conv2d(x[:, :, ::2, ::2], w), "strides of data"),
        (lambda x, w: F.conv2d(x.expand(3, 2, 4, 8, 8)[:, 0], w), "strides of data"),
        (lambda x, w: F.conv2d(x[:0], w), "no elements"),
        (lambda x, w: F.conv2d(x.double(), w.double()), "not for float64"),
        (lambda x, w: F.conv2d(torch.ones(1, 4, 8, 8, dtype=torch.int64), w.long()), "not for int64"),
    ],
)
def test_what_kernels_do_not_take_falls_through(make, words: str, kernels_always: None) -> None:
    x, w, _ = operands()
    before = bridge.stats().kernel_calls
    found = [make(x, w) for _ in range(2)]
    assert bridge.stats().kernel_calls == before
    assert words in bridge.explain()[-1].why
    for each in found:
        torch.testing.assert_close(each, own(lambda: make(x, w)))


def test_other_tensors_never_arrive(kernels_always: None) -> None:
    x, w, _ = operands()
    known = len(bridge.explain())
    assert F.conv2d(x.to("meta"), w.to("meta")).shape == (2, 6, 6, 6)
    with torch._subclasses.FakeTensorMode() as fake:
        assert F.conv2d(fake.from_tensor(x), fake.from_tensor(w)).shape == (2, 6, 6, 6)
    quantized = [torch.quantize_per_tensor(each, 0.1, 0, torch.quint8) for each in (x,)]
    with pytest.raises((NotImplementedError, RuntimeError)):
        torch.ops.aten.convolution(quantized[0], w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert len(bridge.explain()) == known
    same(lambda: torch.Tensor(F.conv2d(x.as_subclass(Tagged), w)))
    same(lambda: torch.view_as_real(F.conv2d(torch.complex(x, x), torch.complex(w, w))))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, w: F.conv2d(x, w[:, :3]),
        lambda x, w: F.conv2d(x, w, stride=0),
        lambda x, w: F.conv2d(x, w, padding=-1),
        lambda x, w: F.conv2d(x[:, :, :2, :2], w),
        lambda x, w: F.conv_transpose2d(x, w.transpose(0, 1).contiguous(), output_padding=2),
        lambda x, w: F.conv2d(x, w.double()),
    ],
)
def test_what_pytorch_refuses_it_refuses_in_its_own_words(call, kernels_always: None) -> None:
    x, w, _ = operands()

    def words() -> str:
        with pytest.raises(RuntimeError) as raised:
            call(x, w)
        return str(raised.value)

    assert words() == own(words)


@pytest.mark.parametrize("always", [True, False])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_bias_of_another_length_is_refused(
    store: Path, monkeypatch: pytest.MonkeyPatch, always: bool, transposed: bool
) -> None:
    """A kernel would read beyond it. After calls with a right one, and first of all where the choice is on disk."""
    x, w, b = operands()
    w, function = (w.transpose(0, 1).contiguous(), F.conv_transpose2d) if transposed else (w, F.conv2d)
    for tries in (24, 0):
        monkeypatch.setattr(bridge.override, "BRIDGE", bridge.override.Bridge())
        with bridge.enable(wait=True, always=always, folder=store):
            for _ in range(tries):
                function(x, w, b)
            for _ in range(2):
                with pytest.raises(RuntimeError, match="bias to be 1-dimensional with 6 elements"):
                    function(x, w, b[:3])
            assert function(x, w, b).shape[1] == 6


def test_deterministic_algorithms(store: Path) -> None:
    """A measured choice differs from run to run, so it is not made; kernels that are always taken are."""
    torch.use_deterministic_algorithms(True)
    try:
        with bridge.enable(wait=True, folder=store):
            before = bridge.stats().kernel_calls
            grads()
            grads()
            assert bridge.stats().kernel_calls == before
            assert "deterministic" in bridge.explain()[-1].why
        with bridge.enable(wait=True, always=True, folder=store):
            first = twice(grads)
            assert all(torch.equal(one, other) for one, other in zip(first, grads(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_threads_of_python(kernels_always: None) -> None:
    """Backward passes in several threads at once, each with its own data."""
    twice(grads)
    wrong: list[int] = []
    x, w, _ = operands()
    x = x.requires_grad_()
    (base,) = torch.autograd.grad(F.conv2d(x, w, torch.zeros(6), padding=1).square().sum(), x)
    base = base / 2

    threads = [threading.Thread(target=_with_zero_bias, args=(seed, base, wrong)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def _with_zero_bias(seed: int, half, wrong) -> None:
    x, w, _ = operands()
    x = (x * seed).requires_grad_()
    for _ in range(10):
        (found,) = torch.autograd.grad(F.conv2d(x, w, torch.zeros(6), padding=1).square().sum(), x)
        if not torch.allclose(found, 2 * seed * half, rtol=1e-4, atol=1e-2):
            wrong.append(seed)


def test_the_number_of_threads_holds(kernels_always: None) -> None:
    """Results are the same bits on any number; with one no other thread of the pool is used."""
    wanted = twice(grads)
    before = torch.get_num_threads()
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert all(torch.equal(one, other) for one, other in zip(twice(grads), wanted, strict=True))
    finally:
        torch.set_num_threads(before)


class Gradients(torch.utils.data.Dataset):
    """A data set whose items are gradients."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int):
        return torch.cat([each.flatten() for each in grads()])


def test_forked_workers_of_a_data_loader(kernels_always: None) -> None:
    """They have kernels that were loaded before the fork, on their one thread, and compile nothing."""
    wanted = torch.cat([each.flatten() for each in twice(grads)])
    loader = torch.utils.data.DataLoader(Gradients(), num_workers=2, multiprocessing_context="fork", timeout=60)
    for batch in loader:
        torch.testing.assert_close(batch[0], wanted, rtol=1e-5, atol=1e-4)


DDP = """
import sys, torch, torch.distributed as dist
from pathlib import Path
import tvm_convgrad.torch as bridge
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[3]}", rank=rank, world_size=2)
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Flatten()))
x = torch.randn(4, 4, 8, 8)[rank * 2:rank * 2 + 2]
with bridge.enable(wait=True, always=True, folder=folder):
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
assert bridge.stats().kernel_calls == 4, bridge.explain()
torch.save([p.grad for p in model.parameters()], f"{sys.argv[3]}.{rank}")
print(bridge.stats().compiled)
"""


def test_two_ranks_share_gradients_and_a_store(tmp_path: Path) -> None:
    """They start at once on an empty store: each kernel is compiled, and both have the same gradients."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", DDP]
    ranks = [
        subprocess.Popen([*command, str(rank), str(tmp_path / "store"), str(tmp_path / "meet")], env=environment)
        for rank in (0, 1)
    ]
    assert [rank.wait(timeout=120) for rank in ranks] == [0, 0]
    first, second = (torch.load(f"{tmp_path / 'meet'}.{rank}") for rank in (0, 1))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, 3), torch.nn.Flatten())
    model(torch.randn(4, 4, 8, 8)).square().mean().backward()
    for one, parameter in zip(first, model.parameters(), strict=True):
        torch.testing.assert_close(one, parameter.grad, rtol=1e-4, atol=1e-5)
