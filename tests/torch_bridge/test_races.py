# SPDX-License-Identifier: Apache-2.0
"""What other threads may do between two steps of a call."""

from __future__ import annotations

import threading
from concurrent.futures import Future

import pytest

torch = pytest.importorskip("torch")
override = pytest.importorskip("tvm_convgrad.torch").override

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
