# SPDX-License-Identifier: Apache-2.0
"""What other threads may do between two steps of a call, and a library that takes the place of another."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
override = pytest.importorskip("tvm_convgrad.torch").override

from tvm_convgrad.torch.plan import Policy  # noqa: E402

ENDS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def call(made) -> None:
    """A convolution in float64, of a bridge that is not installed."""
    x, w = torch.ones(1, 2, 4, 4, dtype=torch.float64), torch.ones(2, 2, 3, 3, dtype=torch.float64)
    assert float(made.forward(x, w, None, *ENDS).min()) == 18


def test_another_thread_sees_first_that_the_library_is_there() -> None:
    made = override.Bridge()
    made.prepare()

    class Taken(Future):
        def done(self) -> bool:
            made._asked = None
            return super().done()

    made._asked = Taken()
    made._asked.set_result(b"")
    for _ in range(2):
        call(made)
    assert made._asked is None


def test_a_new_signature_waits_for_nobody() -> None:
    """A process that is forked while another thread installs a bridge has nobody who gives the lock back."""
    made = override.Bridge()
    made.prepare()
    calls = threading.Thread(target=call, args=(made,), daemon=True)
    with made._lock:
        calls.start()
        calls.join(timeout=20)
        assert not calls.is_alive()
    assert len(made.plans) == 1


class Library:
    """The entries in C++, as a bridge sees them."""

    def __init__(self) -> None:
        self.bridge, self.released = None, 0

    def new_table(self) -> int:
        return 1

    def install(self, bridge, table: int, forward: bool, kept_memory: int) -> None:
        self.bridge = bridge

    def remove(self) -> None:
        self.bridge = None

    def release(self) -> None:
        self.released += 1


@pytest.mark.parametrize("second", [Library(), None])
def test_the_memory_of_the_library_before_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, second) -> None:
    first = Library()
    found = iter((first, first, second))
    monkeypatch.setattr(override, "native", lambda _kernels: next(found))
    made = override.Bridge()
    for number, released in enumerate((0, 0, 1)):
        made.install(Policy(), tmp_path / str(number))
        assert first.released == released
    made.remove()
