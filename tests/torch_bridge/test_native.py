# SPDX-License-Identifier: Apache-2.0
"""The entries in C++: a call whose choice is made needs no Python, and is counted; any other call does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

from tvm_convgrad.bridge import choice  # noqa: E402
from tvm_convgrad.bridge.job import TORCH_ENTRIES, library_key  # noqa: E402
from tvm_convgrad.bridge.store import Kernels, kernels  # noqa: E402
from tvm_convgrad.core.errors import ConvGradError  # noqa: E402
from tvm_convgrad.torch import override  # noqa: E402

F = torch.nn.functional
ALL = (True, True, True)
DAMAGED = b"\x7fELF and nothing more"


class Made:
    """A process that compiles, which always gives one library, and keeps it."""

    def __init__(self, kept, content: bytes) -> None:
        self.kept, self.content, self.problem = kept, content, ""

    def make(self, job, refused=None) -> bytes:
        assert refused == DAMAGED
        self.kept.put(library_key(job), self.content)
        return self.content

    def stop(self) -> None:
        """There is nothing to end."""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, store: Path):
    """A bridge without plans, enabled; and its calls that came to Python."""
    made, calls = override.Bridge(), []
    for name in ("forward", "backward"):
        function = getattr(made, name)

        def counted(*arguments, function=function):
            calls.append(arguments[-1])
            return function(*arguments)

        monkeypatch.setattr(made, name, counted)
    monkeypatch.setattr(override, "BRIDGE", made)
    with bridge.enable(wait=True, always=True, folder=store):
        assert made.native
        yield calls
    assert not made.installed


def operands(dtype=torch.float32, transposed: bool = False):
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 7, 6), (4, 6, 3, 3) if transposed else (6, 4, 3, 3), (6,))
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def step(x, w, b, wanted, transposed: bool = False):
    function = F.conv_transpose2d if transposed else F.conv2d
    tensors = [each.detach().requires_grad_(asked) for each, asked in zip((x, w, b), wanted, strict=True)]
    y = function(*tensors, padding=1)
    dy = torch.linspace(-1, 1, y.numel()).reshape(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [each for each in tensors if each.requires_grad], dy)]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("wanted", [ALL, (True, False, True), (False, True, False), (True, False, False)])
def test_a_made_choice_needs_no_python(fresh, wanted, transposed: bool) -> None:
    """PyTorch's, the first with a kernel, and then without: results and counts go on."""
    tensors = operands(transposed=transposed)
    for _ in range(3):
        step(*tensors, wanted, transposed)
    known, before = len(fresh), bridge.stats()
    found = step(*tensors, wanted, transposed)
    after = bridge.stats()
    assert len(fresh) == known
    assert after.kernel_calls - before.kernel_calls == 2
    assert after.kernel_seconds > before.kernel_seconds
    bridge.disable()
    for one, other in zip(found, step(*tensors, wanted, transposed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)
        assert one.stride() == other.stride()


def test_what_falls_through_needs_no_python(fresh) -> None:
    """From the second call on, in PyTorch's own bits."""
    tensors = operands(torch.float64)
    step(*tensors, ALL)
    before = bridge.stats()
    found = step(*tensors, ALL)
    assert len(fresh) == 2
    assert bridge.stats().pytorch_calls - before.pytorch_calls == 2
    bridge.disable()
    assert all(torch.equal(one, other) for one, other in zip(found, step(*tensors, ALL), strict=True))


@pytest.mark.parametrize(
    "change",
    [
        lambda x, w, b: (x.to(memory_format=torch.channels_last), w, b),
        lambda x, w, b: (x[:1], w, b),
        lambda x, w, b: (x, w.to(memory_format=torch.channels_last), b),
        lambda x, w, b: (x.bfloat16(), w.bfloat16(), b.bfloat16()),
        lambda x, w, b: (x.transpose(2, 3).contiguous().transpose(2, 3), w, b),
    ],
)
def test_another_signature_is_another_entry(fresh, change) -> None:
    step(*operands(), ALL)
    step(*operands(), ALL)
    known = len(fresh)
    step(*change(*operands()), ALL)
    assert len(set(fresh[known:])) == len(fresh) - known > 0


def test_settings_are_in_the_key(fresh) -> None:
    """The number of threads, oneDNN and deterministic algorithms."""
    x, w, b = operands()
    threads = torch.get_num_threads()
    for _ in range(3):
        F.conv2d(x, w, b)
    known = len(fresh)
    torch.set_num_threads(threads + 1)
    try:
        F.conv2d(x, w, b)
    finally:
        torch.set_num_threads(threads)
    with torch.backends.mkldnn.flags(enabled=False):
        F.conv2d(x, w, b)
    torch.use_deterministic_algorithms(True)
    try:
        F.conv2d(x, w, b)
    finally:
        torch.use_deterministic_algorithms(False)
    F.conv2d(x, w, b)
    assert len(fresh) == known + 3


def test_errors_are_pytorchs(fresh) -> None:
    """Again and again: an entry whose call fails stays without a choice."""
    x, w, b = operands()
    for _ in range(3):
        with pytest.raises(RuntimeError, match="expected input"):
            F.conv2d(x[:, :3], w, b)


def test_memory_of_freed_results_is_kept(fresh, store: Path) -> None:
    """For results of like size, up to a number of bytes; results that live share none of it. `disable` frees it."""
    x, w = torch.ones(2, 8, 96, 96), torch.ones(8, 8, 1, 1)
    for _ in range(3):
        y = F.conv2d(x, w)
    size = y.untyped_storage().nbytes()
    before, place = bridge.stats().kept_bytes, y.data_ptr()
    del y
    assert bridge.stats().kept_bytes == before + size
    first = F.conv2d(x, w)
    second = F.conv2d(x, 2 * w)
    assert first.data_ptr() == place
    assert (float(first.min()), float(first.max()), float(second.min())) == (8, 8, 16)
    del first
    second.resize_(3, 8, 96, 96)  # PyTorch takes and frees such memory, too
    assert float(second[:2].min()) == 16
    with bridge.enable(wait=True, always=True, folder=store, kept_memory=size // 2):
        assert bridge.stats().kept_bytes == 0
        del second
        assert bridge.stats().kept_bytes == 0
    many = [F.conv2d(x, w) for _ in range(4)]
    del many
    assert bridge.stats().kept_bytes == 4 * size
    bridge.disable()
    assert bridge.stats().kept_bytes == 0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kept_memory": -1}, "kept_memory is -1; give bytes from 0"),
        ({"kept_memory": 2**64}, "kept_memory is 18446744073709551616; give bytes from 0"),
        ({"kept_memory": 1e9}, "kept_memory is 1000000000.0, a float; give a number of bytes"),
        ({"kept_memory": float("nan")}, "kept_memory is nan, a float"),
        ({"kept_memory": True}, "kept_memory is True, a bool"),
        ({"kept_memory": None}, "kept_memory is None"),
        ({"wait": "no"}, "wait is 'no', a str; give True or False"),
        ({"always": 1}, "always is 1, a int"),
        ({"forward": None}, "forward is None"),
        ({"folder": ""}, "folder is ''"),
        ({"folder": "a\0b"}, "folder is 'a"),
        ({"folder": b"a"}, "folder is b'a', a bytes; give a path"),
        ({"folder": 3}, "folder is 3"),
    ],
)
def test_wrong_arguments_are_refused(given, words: str, fresh) -> None:
    """What was enabled stays so."""
    with pytest.raises(ConvGradError, match=re.escape(f"enable: {words}")):
        bridge.enable(**given)
    assert override.BRIDGE.native
    assert override.BRIDGE.kept_memory == override.KEPT_MEMORY


def test_numbers_and_paths_of_other_kinds_are_taken(fresh, store: Path) -> None:
    with bridge.enable(kept_memory=np.int64(5), always=np.True_, folder=os.path.relpath(store)):
        assert override.BRIDGE.kept_memory == 5
        assert override.BRIDGE.folder.samefile(store)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_damaged_library_is_made_anew(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_loaded: bool
) -> None:
    """By who calls often; until then calls go through Python. A second one that is refused is one warning."""
    monkeypatch.setattr(override, "BRIDGE", override.Bridge())
    monkeypatch.setattr(override, "WORTH_COMPILING", 2)
    key, whole = library_key(TORCH_ENTRIES), Kernels(store).kept.get(library_key(TORCH_ENTRIES))
    used = kernels(tmp_path)
    used.kept.put(key, DAMAGED)
    monkeypatch.setattr(used, "_worker", Made(used.kept, whole if is_loaded else DAMAGED + b"?"))
    choice._warned.clear()
    with bridge.enable(folder=tmp_path), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert not override.BRIDGE.native
        for _ in range(3):
            F.conv2d(*operands(torch.float64))
        wait = override.BRIDGE._asked
        if wait is not None:
            wait.exception()
        for _ in range(3):
            F.conv2d(*operands(torch.float64))
    said = [str(each.message) for each in warned if "tvm_convgrad.torch" in str(each.message)]
    assert len(said) == (not is_loaded), said
    assert is_loaded or "cannot be loaded" in said[0]
    with bridge.enable(folder=tmp_path):
        assert override.BRIDGE.native == is_loaded


def test_a_library_of_which_bytes_are_missing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(override, "BRIDGE", override.Bridge())
    Kernels(tmp_path).kept.put(library_key(TORCH_ENTRIES), DAMAGED)
    path = next(tmp_path.rglob("*.object"))
    path.write_bytes(path.read_bytes()[:-1])
    with bridge.enable(folder=tmp_path):
        assert not override.BRIDGE.native
    assert not path.exists()


def test_two_stores_may_have_different_libraries(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as of two compilers: each serves its own."""
    monkeypatch.setattr(override, "BRIDGE", override.Bridge())
    kept, key = Kernels(store).kept, library_key(TORCH_ENTRIES)
    Kernels(tmp_path).kept.put(key, kept.get(key) + b"!")
    tensors = operands(torch.float64)
    for folder in (store, tmp_path, store):
        with bridge.enable(folder=folder):
            assert override.BRIDGE.native
            for _ in range(3):
                F.conv2d(*tensors)
            assert bridge.stats().pytorch_calls == 3


def test_a_call_that_has_begun_when_it_is_disabled(fresh) -> None:
    """In another thread, before its choice was made: it comes to Python afterwards."""
    x, w, b = operands()
    bridge.disable()
    found = torch.ops.tvm_convgrad._convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, 0)
    assert torch.equal(found, F.conv2d(x, w, b))
    assert len(fresh) == 1


REQUEST = """
import sys, torch
from pathlib import Path
import tvm_convgrad.torch as bridge
from tvm_convgrad.torch import override
x, w = (torch.ones(shape, dtype=torch.float64) for shape in ((1, 2, 4, 4), (2, 2, 3, 3)))
with bridge.enable(folder=Path(sys.argv[1])):
    for _ in range(override.WORTH_COMPILING + 2):
        torch.conv2d(x, w)
    print(override.BRIDGE.native, override.BRIDGE._asked is not None)
"""


def test_it_is_asked_for_by_who_calls_often(store: Path, tmp_path: Path) -> None:
    """The next start has it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for folder, said in ((tmp_path, "False True"), (store, "True False")):
        command = [sys.executable, "-c", REQUEST, str(folder)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stdout.strip() == said
