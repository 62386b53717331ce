# SPDX-License-Identifier: Apache-2.0
"""`tvm_convgrad.compile`: every operator on plain memory equals float64 sums; kept code is checked before it runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import tvm_convgrad
from tvm_convgrad.bridge.job import Job
from tvm_convgrad.bridge.library import Kernel
from tvm_convgrad.bridge.store import Kernels
from tvm_convgrad.core.catalogue import DIRECTIONS
from tvm_convgrad.core.dtypes import numpy_dtype
from tvm_convgrad.core.errors import ConvGradError, DTypeError, ProblemError, SetupError, UnsupportedError
from tvm_convgrad.core.exact import numbers_of
from tvm_convgrad.core.problem import ConvProblem

SMALL = "mb1ic1ih4oc1kh3"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store for all tests of this file: each kernel is compiled once."""
    return tmp_path_factory.mktemp("store")


def zoned(shape: tuple[int, ...], dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """An array of NaN, at an address that is a multiple of the element only, and the memory around it."""
    whole = np.full(int(np.prod(shape)) + 34, 77.0, numpy_dtype(dtype))
    inside = whole[17:-17].reshape(shape)
    inside[...] = np.nan
    return whole, inside


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "descriptor",
    [
        "mb2ic3iw19oc5kw4sw2pw1",
        "g2mb2ic4ih9iw7oc6kh3kw3sh2sw2ph1pw0",
        "mb1ic8ih6oc16kh3dh1ph2_lay=NHWC:HWIO:NHWC",
        "mb2ic4id5ih4iw6oc3kd3kh2kw1pd1",
        "mb2ic8ih5oc8kh1_dt=bf16:bf16:bf16",
        "g16mb2ic16ih8oc16kh3ph1_dt=f64:f64:f64",
    ],
)
def test_every_direction_of_every_rank_is_exact(descriptor: str, direction: str, folder: Path) -> None:
    """Into memory full of NaN that is aligned to an element only; nothing around it is written."""
    problem = ConvProblem.from_descriptor(descriptor)
    name = f"conv{problem.rank}d" + ("" if direction == "forward" else f"_{direction}")
    compiled = tvm_convgrad.compile(name, descriptor, folder=folder)
    operands, wanted = numbers_of(problem, direction, 0)
    for threads in (1, 3):
        whole, out = zoned(*compiled.result)
        assert compiled(*operands, out=out, threads=threads) is out
        np.testing.assert_array_equal(out, wanted)
        assert (whole[:17] == 77.0).all()
        assert (whole[-17:] == 77.0).all()


def test_a_transposed_convolution_and_its_gradients(folder: Path) -> None:
    """They are the directions of the convolution whose data gradient it is, with operands by their own names."""
    problem = ConvProblem.from_descriptor("mb2ic4ih9oc6kh3sh2ph1")
    (dy_family, w), y = numbers_of(problem, "backward_data", 0)
    data, grad = dy_family, np.round(np.random.default_rng(0).normal(size=y.shape) * 2).astype("float32")
    forward = tvm_convgrad.compile("conv2d_transpose", problem, folder=folder)
    np.testing.assert_array_equal(forward(data, w), y)
    dx = tvm_convgrad.compile("conv2d_transpose_backward_data", problem, folder=folder)
    np.testing.assert_array_equal(dx(grad, w), tvm_convgrad.reference.forward(problem, grad, w))
    dw = tvm_convgrad.compile("conv2d_transpose_backward_weight", problem, folder=folder)
    assert [name for name, *_ in dw.operands] == ["grad", "data"]
    np.testing.assert_array_equal(dw(grad, data), tvm_convgrad.reference.backward_weight(problem, data, grad))


OTHER_ORDER = np.dtype("float32").newbyteorder()
ONES = (np.ones((1, 1, 2, 2), "float32"), np.ones((1, 1, 4, 4), "float32"))


@pytest.mark.parametrize(
    ("operands", "out", "error", "words"),
    [
        ((ONES[0][0], ONES[1]), None, ProblemError, ["grad has shape", "compiled for [1, 1, 2, 2]"]),
        ((ONES[0].astype("float64"), ONES[1]), None, DTypeError, ["grad has dtype float64", "float32"]),
        ((ONES[0], np.ones((1, 1, 4, 8), "float32")[..., ::2]), None, ProblemError, ["data is not contiguous"]),
        (([[1.0]], ONES[1]), None, DTypeError, ["grad is a list", "__dlpack__"]),
        (ONES, np.zeros((1, 1, 3, 2), "float32"), ProblemError, ["out has shape [1, 1, 3, 2]"]),
        (ONES, np.broadcast_to(np.float32(0), (1, 1, 3, 3)), ProblemError, ["out is read-only"]),
        ((ONES[0].astype(ml_dtypes.bfloat16), ONES[1]), None, DTypeError, ["grad has dtype bfloat16"]),
        ((ONES[0].astype(OTHER_ORDER), ONES[1]), None, DTypeError, ["grad has numbers of the other byte order"]),
    ],
)
def test_wrong_arrays_are_refused(operands, out, error, words, folder: Path) -> None:
    compiled = tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=folder)
    with pytest.raises(error) as raised:
        compiled(*operands, out=out)
    assert all(word in str(raised.value) for word in words), str(raised.value)


@pytest.mark.parametrize("threads", [0, -1])
def test_numbers_of_threads_are_positive(threads: int, folder: Path) -> None:
    compiled = tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=folder)
    with pytest.raises(ProblemError, match=f"threads is {threads}; give 1 or more"):
        compiled(*ONES, threads=threads)


@pytest.mark.parametrize("threads", [2.5, True, "2"])
def test_numbers_of_threads_are_integers(threads: object, folder: Path) -> None:
    compiled = tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=folder)
    with pytest.raises(DTypeError, match="give an int, or None"):
        compiled(*ONES, threads=threads)


def test_memory_that_operands_share_is_no_result(folder: Path) -> None:
    memory = np.ones(25, "float32")
    compiled = tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=folder)
    with pytest.raises(ProblemError, match="out shares memory with data"):
        compiled(ONES[0], memory[:16].reshape(1, 1, 4, 4), out=memory[15:24].reshape(1, 1, 3, 3))


@pytest.mark.parametrize(
    ("operator", "problem", "error", "words"),
    [
        ("conv2d_backward", SMALL, UnsupportedError, "there is no operator 'conv2d_backward'"),
        ("conv1d_backward_weight", SMALL, ProblemError, "has 2 spatial axes, not 1"),
        ("conv2d", "mb{n}ic1ih4oc1kh3", ProblemError, "needs static extents"),
        ("conv2d", "mb0ic1ih4oc1kh3", UnsupportedError, "no elements"),
        ("conv2d", "nonsense", ConvGradError, "not understood"),
    ],
)
def test_what_cannot_be_compiled_says_why(operator: str, problem: str, error: type, words: str, folder: Path) -> None:
    with pytest.raises(error, match=words):
        tvm_convgrad.compile(operator, problem, folder=folder)


def test_a_new_process_compiles_nothing_and_loads_no_tvm(folder: Path) -> None:
    tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=folder)
    program = (
        "import sys, json, pathlib, numpy as np, tvm_convgrad\n"
        "from tvm_convgrad.bridge.store import kernels\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        f"f = tvm_convgrad.compile('conv2d_backward_weight', '{SMALL}', folder=folder)\n"
        "r = f(np.ones((1, 1, 2, 2), 'float32'), np.ones((1, 1, 4, 4), 'float32'))\n"
        "print(json.dumps([r.sum().item(), kernels(folder).compiled, 'tvm' in sys.modules]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder)],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert json.loads(done.stdout) == [36.0, 0, False]


def test_damaged_code_is_made_again_and_a_refusal_is_kept(folder: Path) -> None:
    job = Job("backward_weight", SMALL)
    Kernels(folder).request(job).result()
    path = folder / job.key[:2] / f"{job.key}.object"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    again = Kernels(folder)
    assert isinstance(again.request(job).result(), Kernel)
    assert again.compiled == 1
    empty = Job("forward", "mb0ic1ih4oc1kh3")
    assert isinstance(again.request(empty).exception(), UnsupportedError)
    other = Kernels(folder)
    assert isinstance(other.request(empty).exception(), UnsupportedError)
    assert other.compiled == 0
    again.close()


def test_a_folder_that_cannot_be_written_costs_nothing_but_time(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    compiled = tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=tmp_path / "file" / "objects")
    np.testing.assert_array_equal(compiled(*ONES), np.full((1, 1, 3, 3), 4.0))


def test_a_process_that_compiles_and_ends_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(SetupError, match="has ended"):
        tvm_convgrad.compile("conv2d_backward_weight", SMALL, folder=tmp_path)


def test_threads_of_python_may_call_one_operator(folder: Path) -> None:
    compiled = tvm_convgrad.compile("conv2d_backward_weight", "mb2ic16ih12oc16kh3ph1", folder=folder)
    problem = compiled.problem
    cases = [numbers_of(problem, "backward_weight", seed) for seed in range(4)]
    wrong = []

    def work(operands, wanted) -> None:
        for _ in range(20):
            if not np.array_equal(compiled(*operands), wanted):
                wrong.append(1)

    threads = [threading.Thread(target=work, args=case) for case in cases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_tensors_of_pytorch_share_their_memory(folder: Path) -> None:
    """Also one that requires a gradient, a channels_last one as the permuted view it is, and bfloat16."""
    torch = pytest.importorskip("torch")
    compiled = tvm_convgrad.compile(
        "conv2d_backward_weight", "mb2ic4ih5oc8kh3_lay=NHWC:OHWI:NHWC_dt=bf16:bf16:bf16", folder=folder
    )
    x = torch.randint(-3, 4, (2, 4, 5, 5)).to(torch.bfloat16).to(memory_format=torch.channels_last).requires_grad_()
    dy = torch.randint(-3, 4, (2, 8, 3, 3)).to(torch.bfloat16).to(memory_format=torch.channels_last)
    with torch.no_grad():
        result = compiled(dy.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1))
    wanted = torch.nn.grad.conv2d_weight(x.detach().double(), (8, 4, 3, 3), dy.double())
    assert torch.equal(result.permute(0, 3, 1, 2), wanted.to(torch.bfloat16))
    with pytest.raises(ProblemError, match="grad has shape"):
        compiled(dy, x)


def test_derivatives_that_would_be_lost_are_refused(folder: Path) -> None:
    """By operands and by `out`, in backward and forward mode and in transforms of torch.func."""
    torch = pytest.importorskip("torch")
    compiled = tvm_convgrad.compile("conv2d", "mb1ic1ih4oc1kh3", folder=folder)
    x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
    with pytest.raises(UnsupportedError, match=r"conv2d: weight requires a gradient.*give tensor\.detach\(\)"):
        compiled(x, torch.nn.Parameter(w))
    with pytest.raises(UnsupportedError, match="conv2d: out requires a gradient"):
        compiled(x, w, out=torch.zeros(1, 1, 2, 2, requires_grad=True))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="data has a tangent"):
        compiled(torch.autograd.forward_ad.make_dual(x, x), w)
    with pytest.raises(UnsupportedError, match=r"data is a tensor of torch\.func"):
        torch.func.grad(lambda data: compiled(data, w).sum())(x)
    with pytest.raises(UnsupportedError, match=r"data is a tensor of torch\.func"):
        torch.func.vmap(lambda data: compiled(data, w))(x[None])
    assert torch.equal(compiled(x, torch.nn.Parameter(w).detach()), torch.full((1, 1, 2, 2), 9.0))
