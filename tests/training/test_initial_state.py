# SPDX-License-Identifier: Apache-2.0
"""The initial state as data of the library: `init` gives it bit by bit, as often as it is asked."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import tvm
from tvm import relax

from tests import tiny
from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.initial_state import COPY, InitialState
from tvm_convgrad.training.compile.linking import Linker
from tvm_convgrad.training.compile.lower import compile_to_link
from tvm_convgrad.training.frontends import load_model
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.vm_code import constants_of
from tvm_convgrad.training.step.build import build_step

VALUES = [
    np.arange(4097, dtype="float32"),
    np.zeros((3, 5), "float32"),
    np.array([-0.0, 0.0, -0.0], "float32"),
    np.array([True, False]),
    np.array([1.5, np.nan, -np.inf], ml_dtypes.bfloat16),
    np.array(2**40 + 1, "int64"),
    np.zeros((0, 7), "float32"),
    np.arange(12.0).reshape(3, 4).T,  # not contiguous
]


def same_bytes(one: np.ndarray, other: np.ndarray) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and one.tobytes() == other.tobytes()


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> tvm.runtime.Module:
    """A library whose state is VALUES and the first of them once more."""
    return link(tmp_path_factory.mktemp("state") / "state.so")


def link(path: Path, linker: Linker | None = None) -> tvm.runtime.Module:
    """A library at `path` whose state is VALUES and the first of them once more."""
    initial, target = InitialState([*VALUES, VALUES[0]]), native_target()
    module = initial.module(tvm.IRModule({"init": relax.Function([], relax.Tuple([]), relax.TupleType([]))}))
    save_artifact(tvm.compile(module, target=target), {"target": str(target)}, path, linker, initial)
    return tvm.runtime.load_module(str(path))


@pytest.mark.parametrize("name", ["plain", 'quote"d back\\slash \\x41', "bell\a escape\x1b line\n", "日本 % {a|b}"])
def test_the_temporary_folder_may_have_any_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    machine = relax.VirtualMachine(link(tmp_path / "state.so"), tvm.cpu())
    assert same_bytes(machine["init"]()[0].numpy(), VALUES[0])


@pytest.mark.parametrize("standard", ["c11", "gnu17"])
def test_a_c_compiler_may_be_told_a_standard(standard: str, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    machine = relax.VirtualMachine(link(tmp_path / "state.so", Linker(("gcc", f"-std={standard}"))), tvm.cpu())
    assert same_bytes(machine["init"]()[0].numpy(), VALUES[0])


def test_ziglang_links_the_same_bytes_without_a_runtime_of_its_own(tmp_path: Path) -> None:
    pytest.importorskip("ziglang")
    linker = Linker((sys.executable, "-m", "ziglang", "cc"))
    paths = [tmp_path / "one.so", tmp_path / "two.so"]
    for path in paths:
        link(path, linker)
    one, two = (path.read_bytes() for path in paths)
    assert one == two
    assert len(one) < 200_000


def test_a_full_temporary_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(InitialState, "write", fail)
    with pytest.raises(SetupError, match=r"temporary folder \(No space left on device\); .* TMPDIR"):
        link(tmp_path / "state.so")


def test_init_gives_every_value_in_new_tensors(library: tvm.runtime.Module) -> None:
    machine = relax.VirtualMachine(library, tvm.cpu())
    first, second = list(machine["init"]()), list(machine["init"]())
    for given in (first, second):
        assert all(same_bytes(tensor.numpy(), value) for tensor, value in zip(given, [*VALUES, VALUES[0]], strict=True))
    first[0].copyfrom(np.full(4097, np.nan, "float32"))  # as a step that overwrites its state
    others = [first[-1], second[0], machine["init"]()[0]]
    assert all(same_bytes(tensor.numpy(), VALUES[0]) for tensor in others)


def test_zeros_take_no_place_and_a_repeated_array_one() -> None:
    initial = InitialState([*VALUES, VALUES[0]])
    assert [offset < 0 for offset in initial.offsets] == [False, True, False, False, False, False, True, False, False]
    assert initial.offsets[-1] == initial.offsets[0]
    assert all(offset % 64 == 0 for offset in initial.offsets if offset >= 0)


@pytest.mark.parametrize(
    ("number", "shape", "message"), [(99, (4097,), "takes the number"), (-1, (4097,), "takes"), (0, (4096,), "size")]
)
def test_wrong_calls_are_refused(
    library: tvm.runtime.Module, number: int, shape: tuple[int, ...], message: str
) -> None:
    copy = library.get_function(COPY, query_imports=True)
    with pytest.raises(ValueError, match=message):
        copy(number, tvm.runtime.tensor(np.zeros(shape, "float32")))


def test_a_step_keeps_no_second_copy_of_its_state(tiny_model: str, tmp_path: Path) -> None:
    """No tensor of the state is a constant of the virtual machine, and slots of Adam are not in the file."""
    step = build_step(load_model(tiny_model), optimizer="adamw", ema=0.9, lr=0.1)
    executable, _plan, initial = compile_to_link(step, native_target())
    constants = constants_of(str(executable.mod["stats"]()))  # a tensor as its extents
    assert not {str(list(value.shape)) for value in step.initial_state if value.ndim} & set(constants)
    path = tmp_path / "step.so"
    save_artifact(executable, make_manifest(step, native_target(), []), path, initial=initial)
    session = Session(path)
    for _ in range(2):
        pairs = zip(session.state.values(), step.initial_state, strict=True)
        assert all(same_bytes(found, expected) for found, expected in pairs)
        images, labels = tiny.make_arrays(tiny.BATCH, 0)
        session.step(images, labels)
        session.reset()
    slots = [offset for offset, entry in zip(initial.offsets, step.state, strict=True) if entry.role == "optimizer"]
    assert slots
    assert set(slots) == {-1}
