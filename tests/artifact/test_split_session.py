# SPDX-License-Identifier: Apache-2.0
"""A session of a split step: its halves, and arrays of several libraries that cross without a copy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from tests import tiny
from tests.conftest import build_tiny
from tvm_convgrad.core.errors import ArtifactError, UnsupportedError
from tvm_convgrad.training.runtime.arrays import ALIGNMENT, array_of, as_array, tensor_of
from tvm_convgrad.training.runtime.session import Session

X, Y = tiny.make_arrays(tiny.BATCH, 0)


@pytest.fixture(scope="module")
def session(tiny_split_step: Path) -> Session:
    return Session(tiny_split_step)


def aligned(shape: tuple[int, ...], offset: int = 0) -> np.ndarray[Any, Any]:
    """An array of zeros that begins `offset` bytes after a multiple of 64."""
    size = int(np.prod(shape)) * 4
    memory = np.zeros(size + 2 * ALIGNMENT, "uint8")
    begin = -memory.ctypes.data % ALIGNMENT + offset
    return memory[begin : begin + size].view("float32").reshape(shape)


def test_halves_equal_steps(session: Session) -> None:
    session.reset()
    expected = [session.step(X, Y)[0] for _ in range(3)]
    state = session.state
    session.reset()
    losses = []
    for _ in range(3):
        loss, predictions, flat = session.gradients(X, Y)
        assert predictions.shape == (tiny.BATCH, tiny.CLASSES)
        session.apply(flat)
        losses.append(loss)
    assert losses == expected
    for name, value in session.state.items():
        np.testing.assert_array_equal(value, state[name], err_msg=name)


def test_gradients_move_the_statistics_alone(session: Session) -> None:
    session.reset()
    before = session.state
    session.gradients(X, Y)
    changed = {name for name, value in session.state.items() if not np.array_equal(value, before[name])}
    assert changed == {"mean", "var"} == set(session.statistics)


def test_evaluate_leaves_the_state(session: Session) -> None:
    session.reset()
    before = session.state
    loss, predictions = session.evaluate(X, Y)
    np.testing.assert_array_equal(predictions, session.predict(X))
    shifted = predictions.astype("float64") - predictions.max(1, keepdims=True)
    assert loss == pytest.approx(
        float((np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(Y)), Y]).mean()), abs=1e-6
    )
    for name, value in session.state.items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def test_statistics_and_tensors_are_the_state_itself(session: Session) -> None:
    session.reset()
    session.statistics["mean"][:] = 7
    assert (session.state["mean"] == 7).all()
    assert np.shares_memory(np.from_dlpack(session.tensors["mean"]), session.statistics["mean"])


def test_results_stay_when_the_session_goes_on(session: Session) -> None:
    session.reset()
    _, predictions, flat = session.gradients(X, Y)
    kept = predictions.copy(), flat.copy()
    for _ in range(3):
        session.apply(session.gradients(X[::-1], Y[::-1]).flat)
    np.testing.assert_array_equal(predictions, kept[0])
    np.testing.assert_array_equal(flat, kept[1])


def test_a_state_that_is_set_is_a_copy(session: Session) -> None:
    session.reset()
    mine = {name: aligned(value.shape) for name, value in session.state.items()}
    session.state = mine
    session.step(X, Y)
    assert not any(value.any() for value in mine.values())


def copies(given: Any, dtype: str = "float32") -> bool:
    """Whether an array is copied on its way to TVM; its values arrive in any case."""
    array = np.asarray(as_array(given, "x"), dtype, order="C")
    tensor = tensor_of(array, given, tvm.cpu())
    np.testing.assert_array_equal(tensor.numpy(), array)
    assert tensor.data_ptr() % ALIGNMENT == 0
    return bool(tensor.data_ptr() != as_array(given, "x").ctypes.data)


def test_numpy_s_arrays_cross_unless_they_cannot() -> None:
    assert not copies(aligned((4, 5)))
    assert copies(aligned((4, 5), offset=16))
    assert copies(aligned((4, 5)).T)
    assert copies(aligned((4, 5)).astype("float64"))
    locked = aligned((4, 5))
    locked.flags.writeable = False
    assert copies(locked)
    assert copies(aligned((0, 5)))
    assert not copies(tvm.runtime.tensor(np.ones((4, 5), "float32")))


@pytest.mark.parametrize("given", [[[1.0, 2.0]], 3.5, np.float32(2)], ids=str)
def test_lists_and_numbers_are_arrays(given: Any) -> None:
    assert copies(given)


def test_pytorch_s_tensors_cross() -> None:
    torch = pytest.importorskip("torch")
    assert not copies(torch.ones(4, 5))
    assert copies(torch.ones(5, 4).T)
    assert copies(torch.ones(4, 5)[:, 1:])
    with pytest.raises(ArtifactError, match=r"the input, a torch.Tensor, cannot be read as an array .*BFloat16"):
        as_array(torch.ones(3, dtype=torch.bfloat16), "the input")
    with pytest.raises(ArtifactError, match=r"requires grad.*move and detach it first"):
        as_array(torch.ones(3, requires_grad=True), "the input")
    found = array_of(tensor_of(as_array(torch.arange(6), "x"), None, tvm.cpu()))
    assert torch.from_numpy(found).tolist() == [0, 1, 2, 3, 4, 5]


def test_jax_s_arrays_cross() -> None:
    numpy = pytest.importorskip("jax.numpy")
    assert not copies(numpy.ones((64, 64)))


def test_any_library_s_arrays_train(session: Session) -> None:
    torch = pytest.importorskip("torch")
    makers: list[Callable[[Any], Any]] = [np.asarray, torch.from_numpy, tvm.runtime.tensor]
    found = []
    for make in makers:
        session.reset()
        loss, _, flat = session.gradients(make(X), make(Y))
        session.apply(make(flat))
        found.append((loss, session.step(make(X), make(Y))[0], float(session.predict(make(X)).sum())))
    assert found == [found[0]] * 3


def test_what_does_not_fit_is_refused(session: Session, tiny_step: Path) -> None:
    session.reset()
    flat = session.gradients(X, Y).flat
    with pytest.raises(ArtifactError, match=r"the flat gradient has extent 5 on axis 0.*takes \d+ there"):
        session.apply(flat[:5])
    with pytest.raises(ArtifactError, match="the flat gradient has element type int64"):
        session.apply(np.zeros(len(flat), "int64"))
    with pytest.raises(ArtifactError, match=r"the value 3 at \[3\]"):
        session.gradients(X, np.arange(tiny.BATCH) + np.arange(tiny.BATCH) // 7 * 2)
    whole = Session(tiny_step)
    for call in (lambda: whole.gradients(X, Y), lambda: whole.apply(flat), lambda: whole.evaluate(X, Y)):
        with pytest.raises(ArtifactError, match="no functions gradients, apply and evaluate; build it with --split"):
            call()


def test_no_samples_have_no_loss(tiny_model: str, tmp_path: Path) -> None:
    """The mean loss of none would be of any bits, which an update would take over."""
    session = Session(build_tiny(tiny_model, tmp_path / "free.so", batch="dynamic", split=True))
    before = session.state
    for function in (session.step, session.gradients, session.evaluate):
        with pytest.raises(ArtifactError, match="no samples"):
            function(X[:0], Y[:0])
    assert all(np.array_equal(before[name], value) for name, value in session.state.items())


@pytest.mark.parametrize("rate", [-0.1, float("nan"), float("inf"), 1e39, "fast", (0.1, 0.2)])
def test_learning_rates_are_finite_and_not_negative(tiny_split_step: Path, rate: Any) -> None:
    session = Session(tiny_split_step)
    before = session.state
    gradients = session.gradients(X, Y)[2]
    for update in (lambda: session.step(X, Y, lr=rate), lambda: session.apply(gradients, lr=rate)):
        with pytest.raises(UnsupportedError, match="learning rate must be"):
            update()
    parameters = [spec.name for spec in session.artifact.state if spec.role == "parameter"]
    assert all(np.array_equal(before[name], session.state[name]) for name in parameters)
