# SPDX-License-Identifier: Apache-2.0
"""Who computes is measured and kept; whatever goes wrong beside, training goes on with PyTorch's own operators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
bridge = pytest.importorskip("tvm_convgrad.torch")

from tvm_convgrad.bridge import choice  # noqa: E402
from tvm_convgrad.bridge.store import Kernels  # noqa: E402
from tvm_convgrad.torch import plan as plans  # noqa: E402
from tvm_convgrad.torch import turns  # noqa: E402

CALLS = 2 * turns.TURNS + 2


def call(size: int = 8):
    x = torch.linspace(-1, 1, 2 * 4 * size * size).reshape(2, 4, size, size)
    w = torch.linspace(-1, 1, 6 * 4 * 9).reshape(6, 4, 3, 3)
    return torch.nn.functional.conv2d(x, w)


def calls(count: int) -> None:
    for _ in range(count):
        call()


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """A bridge without plans."""
    made = bridge.override.Bridge()
    monkeypatch.setattr(bridge.override, "BRIDGE", made)
    yield made
    made.remove()


@pytest.mark.parametrize(("kernel_seconds", "where"), [(0.001, "kernels"), (0.5, "PyTorch")])
def test_the_faster_one_is_taken_and_kept(
    fresh, store: Path, monkeypatch: pytest.MonkeyPatch, kernel_seconds: float, where: str, tmp_path: Path
) -> None:
    """By turns, the first of each not counted; the next process measures nothing. Its clock is the test's."""
    seconds = {"now": 0.0}
    for clock in ("perf_counter", "thread_time"):
        monkeypatch.setattr(turns.time, clock, lambda: seconds["now"])
    compute, own = plans.Plan._compute, torch.ops.aten.convolution.default.redispatch
    order = []

    def timed(self, *arguments):
        seconds["now"] += kernel_seconds if len(order) > 2 else 99.0
        order.append("kernel")
        return compute(self, *arguments)

    def timed_own(*arguments):
        seconds["now"] += 0.01
        order.append("PyTorch")
        return own(*arguments)

    monkeypatch.setattr(plans.Plan, "_compute", timed)
    monkeypatch.setattr(bridge.override._convolution, "redispatch", timed_own, raising=False)
    with bridge.enable(wait=True, folder=tmp_path):
        for _ in range(CALLS):
            call()
        assert order[: 2 * turns.TURNS + 1] == ["PyTorch", *["kernel", "PyTorch"] * turns.TURNS]
        (told,) = bridge.explain()
        assert told.where == where, str(told)
        before = bridge.stats()
        call()
        after = bridge.stats()
        by_kernels = where == "kernels"
        assert after.kernel_calls - before.kernel_calls == by_kernels
        assert after.pytorch_calls - before.pytorch_calls == (not by_kernels)
    again = bridge.override.Bridge()
    monkeypatch.setattr(bridge.override, "BRIDGE", again)
    order.clear()
    with bridge.enable(folder=tmp_path):
        call()
        assert order == ([] if where == "kernels" else ["PyTorch"])
        assert bridge.stats().kernel_calls == (where == "kernels")
        assert bridge.explain()[0].where == where
        assert "measured" in str(bridge.explain()[0])


def test_kernels_are_compiled_in_the_background(fresh, tmp_path: Path) -> None:
    """PyTorch answers meanwhile; a shape that is seen once is not compiled at all."""
    with bridge.enable(always=True, folder=tmp_path):
        call(9)
        call()
        call()
        assert bridge.stats().kernel_calls == 0
        end = time.monotonic() + 120
        while not bridge.stats().kernel_calls and time.monotonic() < end:
            call()
            time.sleep(0.05)
        once, often = bridge.explain()
        assert (once.where, often.where) == ("PyTorch", "kernels")
        assert "called twice" in once.why
        assert bridge.stats().compiled == 1


SECOND = """
import json, sys, torch
from pathlib import Path
import tvm_convgrad.torch as bridge
conv = torch.nn.Conv2d(4, 6, 3)
with bridge.enable(wait=True, folder=Path(sys.argv[1])):
    for _ in range(12):
        conv(torch.ones(2, 4, 8, 8, requires_grad=True)).square().sum().backward()
stats = bridge.stats()
print(json.dumps([stats.compiled, stats.signatures, "tvm" in sys.modules]))
"""


def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    """TVM is in neither process."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", SECOND, str(tmp_path / "store")]
    found = [
        json.loads(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
        for _ in range(2)
    ]
    assert found == [[3, 2, False], [0, 2, False]]


def test_a_store_of_others_is_not_used(fresh, tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    choice._warned.clear()
    with bridge.enable(wait=True, always=True, folder=folder), pytest.warns(RuntimeWarning, match="others can write"):
        calls(3)
    assert not list(folder.rglob("*.object"))


def test_a_store_that_cannot_be_written_is_told(fresh) -> None:
    """It is the process that compiles which finds that out."""
    choice._warned.clear()
    folder = Path("/proc/nothing")  # no folder can be made there, by no user
    with bridge.enable(wait=True, always=True, folder=folder), pytest.warns(RuntimeWarning, match="cannot be written"):
        calls(3)
    assert bridge.stats().kernel_calls == 2


def test_without_a_compiler_training_goes_on(fresh, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One warning says why, however many calls there are."""
    monkeypatch.setattr(sys, "executable", "/bin/false")
    choice._warned.clear()
    with bridge.enable(wait=True, folder=tmp_path), pytest.warns(RuntimeWarning) as warned:
        calls(4)
    assert len([each for each in warned if "tvm_convgrad.torch" in str(each.message)]) == 1
    assert bridge.explain()[0].where == "PyTorch"
    assert "has ended" in str(warned[0].message)


def test_a_damaged_choice_is_made_again(fresh, store: Path) -> None:
    with bridge.enable(wait=True, folder=store):
        for _ in range(CALLS):
            call(10)
        plan = next(each for each in fresh._plans.values() if "10x10" in str(each.signature))
        key = plan._key()
    path = store / key[:2] / f"{key}.object"
    path.write_bytes(path.read_bytes()[:-3])
    assert Kernels(store).kept.get(key) is None
    assert not path.exists()


def test_contexts_may_end_in_any_order(fresh, store: Path) -> None:
    """As two fixtures have them: what was entered last and is not left yet is in force, and in the end PyTorch."""
    first, second, third = (bridge.enable(folder=store, kept_memory=size).__enter__() for size in (1, 2, 3))
    for left, size in ((second, 3), (third, 1), (first, None)):
        left.__exit__(None, None, None)
        assert (fresh.kept_memory if fresh.installed else None) == size
    first, second = (bridge.enable(folder=store, kept_memory=size).__enter__() for size in (1, 2))
    first.__exit__(None, None, None)
    assert fresh.kept_memory == 2
    second.__exit__(None, None, None)
    assert not fresh.installed


def test_contexts_nest_and_end(fresh, store: Path) -> None:
    assert not fresh.installed
    with bridge.enable(folder=store):
        with bridge.enable(always=True, wait=True, folder=store):
            assert fresh.policy.always
        assert fresh.installed
        assert not fresh.policy.always
        bridge.disable()
        assert not fresh.installed
    assert not fresh.installed
    bridge.enable(folder=store, forward=False)
    call()
    assert bridge.explain() == []
    bridge.disable()
