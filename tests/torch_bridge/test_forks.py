# SPDX-License-Identifier: Apache-2.0
"""Forked children: locks that another thread of the parent had, and kernels that only the parent waits for."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

from tvm_convgrad.bridge.store import kernels  # noqa: E402
from tvm_convgrad.torch import override  # noqa: E402

F = torch.nn.functional
SECONDS = 20


def in_child(work: Callable[[], bool]) -> int:
    """The exit code of a forked child: 0 if the work gives True, and SIGALRM if it does not end."""
    process = os.fork()
    if process == 0:
        signal.alarm(SECONDS)
        code = 1
        try:
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[override.Bridge]:
    """A bridge without plans; PyTorch on one thread, as its pool does not survive a fork."""
    fresh = override.Bridge()
    monkeypatch.setattr(override, "BRIDGE", fresh)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield fresh
    torch.set_num_threads(threads)


def test_the_memory_of_results_while_another_thread_frees_it(made, store: Path) -> None:
    """A child that is forked meanwhile can request it, free it and enable the bridge again."""
    x, w = torch.ones(2, 8, 96, 96), torch.ones(8, 8, 1, 1)
    with bridge.enable(wait=True, always=True, folder=store):
        for _ in range(4):
            F.conv2d(x, w)
            many = [F.conv2d(x, w) for _ in range(150)]
            del many
            assert bridge.stats().kept_bytes > 50_000_000
            freeing = threading.Thread(target=made._native.release)
            freeing.start()  # it takes milliseconds to give the pages back
            time.sleep(0.001)

            def work() -> bool:
                before = bridge.stats().kept_bytes
                bridge.disable()
                bridge.enable(wait=True, always=True, folder=store)
                return before == 0 and float(F.conv2d(x, w).min()) == 8

            code = in_child(work)
            freeing.join()
            assert code == 0
            bridge.enable(wait=True, always=True, folder=store)


def test_the_lock_of_a_bridge_that_another_thread_installs(made, store: Path) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with made._lock:
            held.set()
            done.wait(SECONDS)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait()
    code = in_child(lambda: bridge.enable(folder=store) is not None)
    done.set()
    holder.join()
    assert code == 0


@pytest.mark.parametrize("wait", [True, False])
def test_a_kernel_that_is_being_compiled(made, tmp_path: Path, wait: bool) -> None:
    """In the child PyTorch computes; a bridge that the child enables itself has kernels compiled."""
    x, w = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)
    started, kept = threading.Event(), kernels(tmp_path)
    asked = kept._ask

    def ask(*arguments: object) -> None:
        asked(*arguments)
        started.set()

    kept._ask = ask

    def calls(count: int) -> bool:
        return all(float(F.conv2d(x, w).max()) == 18 for _ in range(count))

    def work() -> bool:
        right = calls(4)
        fell_through = override.BRIDGE.explain()[0].where != "compiling"  # or the parent's kernel was kept meanwhile
        bridge.enable(wait=True, always=True, folder=tmp_path)
        found = [F.conv2d(torch.ones(1, 2, 5, 4), w) for _ in range(2)]
        return right and fell_through and override.BRIDGE.stats().kernel_calls == 1 and float(found[1].max()) == 18

    with bridge.enable(wait=wait, folder=tmp_path):
        waiting = threading.Thread(target=calls, args=(2,))
        waiting.start()
        assert started.wait(SECONDS)
        assert not any(future.done() for future in kept._loaded.values())
        assert in_child(work) == 0
        waiting.join()
