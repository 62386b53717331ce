# SPDX-License-Identifier: Apache-2.0
"""Training on batches that a user's program makes, from Python."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tvm_convgrad.core.errors import ArtifactError, DataError
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.loop import train
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.source import IterableSource, Order
from tvm_convgrad.training.runtime.validation import validate

X, Y = tiny.make_arrays(24, 0)
BATCHES = [(X[first : first + 8], Y[first : first + 8]) for first in range(0, 24, 8)]


@pytest.fixture
def session(tiny_step: Path) -> Session:
    return Session(tiny_step)


def losses(session: Session, source: IterableSource, epochs: int, progress: Progress | None = None) -> list[float]:
    progress = progress or Progress("", "", 0, 8, 0.1)
    list(train(session, source, progress, epochs))
    return progress.losses


def shuffled(epoch: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Batches in another order each epoch."""
    return (BATCHES[number] for number in np.random.default_rng(epoch).permutation(3))


def test_a_list_and_a_function_of_the_epoch(session: Session) -> None:
    wanted = []
    for epoch in range(4):
        wanted += [session.step(*batch, 0.1)[0] for batch in shuffled(epoch)]
    session.reset()
    assert losses(session, IterableSource(shuffled, count=3), 4) == wanted
    session.reset()
    assert losses(session, IterableSource(BATCHES), 1) != wanted[:3]


def test_a_run_that_goes_on_in_the_midst_of_an_epoch(session: Session) -> None:
    source = IterableSource(shuffled, count=3)
    whole = losses(session, source, 3)
    session.reset()
    progress = Progress("", "", 0, 8, 0.1)
    running = train(session, source, progress, 3)
    for _ in range(4):
        next(running)
    running.close()
    assert (progress.epoch, progress.position) == (1, 1)
    assert losses(session, source, 3, progress) == whole


def test_a_loader_of_pytorch(session: Session) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), batch_size=8)
    found = losses(session, IterableSource(loader), 2)
    session.reset()
    assert found == losses(session, IterableSource(BATCHES), 2)
    assert validate(session, IterableSource(loader)) == validate(session, Samples((X,), Y))


def test_ranks_take_turns() -> None:
    source = IterableSource([*BATCHES, *BATCHES[:2]])
    for rank in range(2):
        order = Order(0, 0, 8, rank, 2)
        assert source.steps(8, 2) == 2
        found = [batch.target for batch in source.batches(order)]
        assert [(t == (BATCHES * 2)[2 * n + rank][1]).all() for n, t in enumerate(found)] == [True, True]
        assert len(list(source.batches(order, 1))) == 1


def test_updates_of_several_batches() -> None:
    """Shared out unevenly: two for the first rank, one for the second, none for a third."""
    source = IterableSource([*BATCHES, *BATCHES[:1]])
    assert source.steps(8, 3) == (len(BATCHES) + 1) // 3
    for first, count in ((0, 2), (2, 1), (3, 0)):
        (batch, *_) = source.batches(Order(0, 0, 8, first, 3, count))
        wanted = [BATCHES[number % len(BATCHES)] for number in range(first, first + count)]
        assert len(batch.inputs[0]) == len(batch.target) == 8 * count
        np.testing.assert_array_equal(batch.target, np.concatenate([y for _, y in wanted] or [batch.target]))
        np.testing.assert_array_equal(batch.inputs[0], np.concatenate([x for x, _ in wanted] or [batch.inputs[0]]))


@pytest.mark.parametrize(
    ("make", "count", "message"),
    [
        (iter(BATCHES), 3, r"an iterator \(list_iterator\) are used up after one epoch"),
        (shuffled, None, "the number of batches of an epoch is unknown"),
    ],
)
def test_what_cannot_be_iterated_again(make: object, count: int | None, message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        IterableSource(make, count)


@pytest.mark.parametrize(
    ("batches", "error", "message"),
    [
        ([X[:8]], ArtifactError, "batch 0 of the data is a ndarray; give a tuple"),
        ([(X[:8],)], ArtifactError, "batch 0 of the data is a tuple; give"),
        ([(X[:8], 3)], ArtifactError, "the target of batch 0 of the data is a single number"),
        ([BATCHES[0], (X[:5], Y[:5])], ArtifactError, "axis 0"),
        ([(X[:8], Y[:8] + 9)], ArtifactError, r"the value \d+ at \[0\]"),
        ([(X[:8], X[:8], Y[:8])], ArtifactError, "takes 1 inputs|input"),
        ([(X[:8] * np.nan, Y[:8])], DataError, r"'x' of the training samples 0 of its batch"),
        ([], ArtifactError, "do not fill one batch"),
    ],
)
def test_wrong_batches(session: Session, batches: list, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        losses(session, IterableSource(batches), 1)


def test_an_epoch_that_ends_early(session: Session) -> None:
    with pytest.raises(DataError, match="epoch 1 of the data had 3 batches, but 4 were announced"):
        losses(session, IterableSource(BATCHES, count=4), 1)
    late = Progress("", "", 0, 8, 0.1, position=3)
    with pytest.raises(ArtifactError, match="3 batches of epoch 1 are done, but the data have 2 in an epoch"):
        losses(session, IterableSource(BATCHES, count=2), 1, late)
