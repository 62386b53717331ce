# SPDX-License-Identifier: Apache-2.0
"""Libraries of the store: what tells them apart, what is made again, and failures, which are kept for a day."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import tvm_convgrad
from tests.cli.command import Command
from tvm_convgrad.bridge import failures, job, store
from tvm_convgrad.bridge.job import HOST, TORCH_ENTRIES, Job, library_key
from tvm_convgrad.bridge.library import Kernel, LoadError
from tvm_convgrad.bridge.store import Kernels
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.kept_objects import VARIABLE

SMALL = Job("backward_weight", "mb1ic1ih4oc1kh3")
FOREIGN = b"\x7fELF and nothing more"


def script(path: Path, text: str) -> str:
    """A program that the shell runs."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that fails, and the file in which it counts how often it has tried."""
    tried = tmp_path / "tried"
    words = (
        f'[ "$1" = --version ] && echo one 1.0 && exit\n'
        f'echo x >>{tried}; echo "a.cc:1: error: no such thing" >&2; exit 1'
    )
    monkeypatch.setenv("CXX", script(tmp_path / "failing", words))
    return tried


def test_compilers_and_c_libraries_have_libraries_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels depend on the C library alone; one that is started by another program is known by what it says."""
    versions = [(script(tmp_path / "wrapper", f"echo g++ {number}"), number) for number in (12, 13)]
    os.utime(versions[0][0], ns=(1, 1))
    found = []
    for wrapper, number in versions:
        script(tmp_path / "wrapper", f"echo g++ {number}")
        os.utime(wrapper, ns=(number, number))
        monkeypatch.setenv("CXX", f"{wrapper} -O1")
        found.append((library_key(HOST), library_key(TORCH_ENTRIES), library_key(HOST, any_compiler=True), SMALL.key))
    first, second = found
    assert first[:2] != second[:2]
    assert first[2:] == second[2:]
    job.surroundings.cache_clear()
    monkeypatch.setattr(os, "confstr", lambda name: "glibc 9.9")
    assert library_key(HOST, any_compiler=True) != first[2]
    assert SMALL.key != first[3]
    job.surroundings.cache_clear()


def test_a_machine_without_a_compiler_uses_what_another_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Kernels(tmp_path).request(SMALL).result()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    alone = Kernels(tmp_path)
    assert isinstance(alone.request(SMALL).result(), Kernel)
    assert alone.compiled == 0
    missing = alone.request(Job("forward", SMALL.descriptor)).exception()
    assert "there is no C++ compiler" in str(missing)


@pytest.mark.parametrize("refused", ["host", "kernel"])
def test_what_the_loader_refuses_is_made_anew(tmp_path: Path, refused: str) -> None:
    """Also where it cannot be removed from the store, as the process that compiles would find it there."""
    Kernels(tmp_path).request(SMALL).result()
    key = library_key(HOST) if refused == "host" else SMALL.key
    made = Kernels(tmp_path)
    made.kept.put(key, FOREIGN)
    made.kept.drop = lambda key: None
    assert isinstance(made.request(SMALL).result(), Kernel)
    again = Kernels(tmp_path)
    assert isinstance(again.request(SMALL).result(), Kernel)
    assert again.compiled == 0


def test_it_is_made_anew_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader that refuses all is no reason to compile for ever."""
    loads = []

    def refuse(*_arguments: object) -> None:
        loads.append(1)
        raise LoadError("no")

    monkeypatch.setattr(store, "_loaded_host", refuse)
    made = Kernels(tmp_path)
    for descriptor in (SMALL.descriptor, "mb1ic1ih5oc1kh3"):
        error = made.request(Job("forward", descriptor)).exception()
        assert isinstance(error, LoadError)
    assert len(loads) == 2
    assert made.compiled == 0
    with pytest.raises(LoadError):
        made.request_library(HOST, refuse).result()


def test_a_failed_compilation_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: Path, convgrad: Command
) -> None:
    """By another process, within a day, with the same compiler; until it is forgotten."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "store"))

    def words() -> str:
        with pytest.raises(SetupError) as raised:
            Kernels().request(SMALL).result()
        return str(raised.value)

    def tries() -> int:
        return len(failing.read_text())

    first = words()
    assert "a.cc:1: error: no such thing" in first
    assert "x" in failing.read_text()
    known = tries()
    assert "a.cc:1: error: no such thing. This is kept for a day; `convgrad env --forget-failures`" in words()
    assert tries() == known
    later = time.time() + failures.LASTING_SECONDS
    monkeypatch.setattr(failures.time, "time", lambda: later)
    assert failures.kept_failure(Kernels().kept, library_key(HOST)) is None
    monkeypatch.setattr(failures.time, "time", lambda: later - failures.LASTING_SECONDS)
    assert convgrad("env", "--json", "--forget-failures").json["failures forgotten"] == 1
    words()
    assert tries() > known
    monkeypatch.delenv("CXX")
    assert isinstance(Kernels().request(SMALL).result(), Kernel)


def test_a_compiler_that_cannot_be_started_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "missing"))
    with pytest.raises(SetupError, match=r"missing cannot be started .*: install g"):
        tvm_convgrad.compile("conv2d", SMALL.descriptor, folder=tmp_path / "store")


@pytest.mark.parametrize("folder", [3, b"store", ""])
def test_a_folder_is_a_path(folder: object) -> None:
    with pytest.raises(tvm_convgrad.ConvGradError, match="compile: folder is"):
        tvm_convgrad.compile("conv2d", SMALL.descriptor, folder=folder)


def test_a_forked_child_compiles_if_it_asks_for_that(tmp_path: Path) -> None:
    """A worker of a loader, which has kernels by chance, does not."""
    shared = store.kernels(tmp_path)
    process = os.fork()
    if process == 0:
        code = 1
        try:
            refused = isinstance(shared.request(SMALL).exception(timeout=60), SetupError)
            operator = tvm_convgrad.compile("conv2d", SMALL.descriptor, folder=str(tmp_path))
            result = operator(np.ones((1, 1, 4, 4), "float32"), np.ones((1, 1, 3, 3), "float32"))
            code = 0 if refused and (result == 9).all() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0


def test_the_path_of_a_library_leads_to_no_other_file(tmp_path: Path) -> None:
    """TVM opens the paths of all libraries when it tells an error, and a file without content would end the process."""
    kernel = Kernels(tmp_path / "store").request(SMALL).result()
    opened = [(tmp_path / str(number)).open("w") for number in range(100)]
    for library in (kernel._library, kernel.host._library):
        assert not Path(library._name).exists(), library._name
    for file in opened:
        file.close()


def test_an_interrupt_of_the_terminal_is_not_for_the_process_that_compiles(tmp_path: Path) -> None:
    """It comes to both; a notebook goes on."""
    kept = Kernels(tmp_path)
    kept.request(SMALL).result()
    assert kept._worker is not None
    os.kill(kept._worker._process.pid, signal.SIGINT)
    assert isinstance(kept.request(Job("forward", SMALL.descriptor)).result(), Kernel)
