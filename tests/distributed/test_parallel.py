# SPDX-License-Identifier: Apache-2.0
"""Data parallel steps on ranks that are threads: any number of ranks trains as one does."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from tests import tiny
from tests.distributed.thread_ranks import on_ranks
from tvm_convgrad.core.errors import ArtifactError, DataError, TrainingError
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.loop import train
from tvm_convgrad.training.runtime.parallel import (
    DataParallel,
    ParallelStep,
    check_split,
    shares,
    synchronise,
)
from tvm_convgrad.training.runtime.ranks import AVERAGE, FIRST, Alone, Ranks, check_agreement, together
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.runtime.validation import validate

SAMPLES = Samples((tiny.make_arrays(61, 3)[0],), tiny.make_arrays(61, 3)[1])
EPOCHS = 3


def trained(step: Path, ranks: Ranks, micro_batches: int, size: int) -> tuple[Progress, Session]:
    """A run, on one of the ranks."""
    session = Session(step)
    progress = Progress("", "", 1, size * micro_batches, 0.01, micro_batches=micro_batches)
    update = ParallelStep(session, ranks, micro_batches, lambda: False)
    for _ in train(session, SAMPLES, progress, EPOCHS, update=update):
        pass
    return progress, session


def losses_of(step: Path, micro_batches: int, size: int) -> list[float]:
    return trained(step, Alone(), micro_batches, size)[0].losses


@pytest.mark.parametrize("size", [1, 3, 7])
def test_two_ranks_train_as_one_with_two_batches(full_step: Path, size: int) -> None:
    """Bit for bit, dropout's masks and all parameters: a + b is b + a."""
    one, session = trained(full_step, Alone(), 2, size)
    expected = session.state
    for progress, other in on_ranks(2, lambda ranks: trained(full_step, ranks, 2, size)):
        assert progress.losses == one.losses
        assert len(set(progress.losses)) > 3
        moving = other.statistics
        for name, value in other.state.items():
            if name not in moving:
                np.testing.assert_array_equal(value, expected[name], err_msg=name)


@pytest.mark.parametrize("seed", range(4))
def test_any_number_of_ranks_trains_the_same(full_step: Path, seed: int) -> None:
    """Also those that do not divide the batches, or are more; sums in another order differ by rounding."""
    draw = random.Random(seed)
    micro_batches, size, number = draw.randint(2, 6), draw.randint(1, 5), draw.randint(3, 8)
    expected = losses_of(full_step, micro_batches, size)
    runs = on_ranks(number, lambda ranks: trained(full_step, ranks, micro_batches, size)[0].losses)
    assert all(run == runs[0] for run in runs)
    # float32 sums of up to 6 terms differ by 6 x 2**-24 of their size, and Adam's steps of 0.01 pass that on for
    # at most 3 x 61 updates: far below 1e-3, while another batch or mask changes a loss by a tenth.
    np.testing.assert_allclose(runs[0], expected, atol=1e-3)


def test_one_batch_is_the_whole_step(full_step: Path) -> None:
    session = Session(full_step)
    progress = Progress("", "", 1, 5, 0.01)
    for _ in train(session, SAMPLES, progress, EPOCHS):
        pass
    assert losses_of(full_step, 1, 5) == progress.losses


def test_data_parallel_in_a_loop_of_ones_own(full_step: Path) -> None:
    x, y = tiny.make_arrays(24, 9)

    def loop(ranks: Ranks) -> tuple[list[float], np.ndarray]:
        parallel = DataParallel(Session(full_step), ranks)
        part = slice(ranks.rank * 24 // ranks.size, (ranks.rank + 1) * 24 // ranks.size)
        losses = [parallel.step(x[part], y[part], lr=0.02)[0] for _ in range(5)]
        assert parallel.step(x[part], y[part])[1].shape == (24 // ranks.size, tiny.CLASSES)
        return losses, parallel.session.state["w"]

    (losses, w), *others = on_ranks(3, loop)
    assert len(set(losses)) == 5
    for other, other_w in others:
        assert other == losses
        np.testing.assert_array_equal(other_w, w)
    assert losses[-1] < losses[0]


def test_batches_of_different_sizes_are_refused_by_all_ranks(full_step: Path) -> None:
    """Their mean gradient would weigh a sample of the smaller batch more."""
    x, y = tiny.make_arrays(24, 9)

    def step(ranks: Ranks) -> np.ndarray:
        parallel = DataParallel(Session(full_step), ranks)
        size = 8 - ranks.rank
        with pytest.raises(
            ArtifactError, match=rf"rank {ranks.rank} has {size} samples, and those of 3 ranks have 21;"
        ):
            parallel.step(x[:size], y[:size])
        return parallel.session.state["w"]

    for weights in on_ranks(3, step):
        np.testing.assert_array_equal(weights, Session(full_step).state["w"])


def test_statistics_are_averaged_or_the_first_ranks(full_step: Path) -> None:
    """The mean weighs a rank by its batches, so that one without work counts nothing."""

    def ends(ranks: Ranks, how: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        session = trained(full_step, ranks, 3, 4)[1]
        before = {name: value.copy() for name, value in session.statistics.items()}
        synchronise(session, ranks, 3, how)
        return before, session.statistics

    for number, how in ((2, AVERAGE), (4, AVERAGE), (2, FIRST)):
        runs = on_ranks(number, lambda ranks, how=how: ends(ranks, how))
        weights = [len(share) / 3 for share in shares(3, number)] if how == AVERAGE else [1.0, 0.0]
        for name in ("mean", "var"):
            values = [before[name].astype("float64") for before, _ in runs]
            assert not np.array_equal(values[0], values[1])
            wanted = sum(weight * value for weight, value in zip(weights, values, strict=True)).astype("float32")
            for _, after in runs:
                np.testing.assert_array_equal(after[name], wanted)


def test_ranks_that_drift_apart_are_found(full_step: Path) -> None:
    def work(ranks: Ranks) -> None:
        session = Session(full_step)
        if ranks.rank == 1:
            state = session.state
            state["w"].flat[0] += 1e-6
            session.state = state
        synchronise(session, ranks, 2)

    with pytest.raises(TrainingError, match="different parameters after the same updates"):
        on_ranks(2, work)


def test_validation_is_shared_out(full_step: Path) -> None:
    """More ranks than batches, too: 61 samples are one batch."""
    wanted = validate(Session(full_step), SAMPLES)
    many = Samples(tuple(np.tile(array, (9, 1, 1, 1)) for array in SAMPLES.inputs), np.tile(SAMPLES.target, 9))
    for number in (2, 3):
        for found in on_ranks(number, lambda ranks: validate(Session(full_step), many, ranks)):
            assert found == pytest.approx(wanted, rel=1e-12)
        assert on_ranks(number, lambda ranks: validate(Session(full_step), SAMPLES, ranks)) == [wanted] * number


def test_shares_are_whole_and_even() -> None:
    for micro_batches in range(1, 9):
        for size in range(1, 9):
            found = shares(micro_batches, size)
            assert [number for share in found for number in share] == list(range(micro_batches))
            assert max(map(len, found)) - min(map(len, found)) <= 1


def test_interruptions_reach_all_ranks(full_step: Path) -> None:
    def work(ranks: Ranks) -> list[bool]:
        session = Session(full_step)
        calls: list[int] = []

        def asked() -> bool:
            calls.append(0)
            return ranks.rank == 2 and len(calls) == 4

        update = ParallelStep(session, ranks, 3, asked)
        reports = train(session, SAMPLES, Progress("", "", 1, 6, 0.01, micro_batches=3), 1, update=update)
        return [report.interrupted for report in reports]

    wanted = [number == 3 for number in range(10)]
    assert on_ranks(3, work) == [wanted] * 3


def test_all_ranks_name_the_sample_that_is_not_finite(full_step: Path) -> None:
    x = SAMPLES.inputs[0].copy()
    x[17, 0, 2, 3] = np.nan

    def work(ranks: Ranks) -> str:
        session = Session(full_step)
        update = ParallelStep(session, ranks, 2, lambda: False)
        progress = Progress("", "", 1, 60, 0.01, micro_batches=2)
        with pytest.raises(DataError) as found:
            list(train(session, Samples((x,), SAMPLES.target), progress, 1, update=update))
        return str(found.value)

    (message,) = set(on_ranks(3, work))
    assert "'x' of the training samples 17 (counted from 0) has values that are not finite" in message


def test_an_error_of_one_rank_is_that_of_all() -> None:
    def work(ranks: Ranks) -> str:
        try:
            with together(ranks):
                if ranks.rank == 1:
                    raise TrainingError("no disk")
        except (ArtifactError, TrainingError) as error:
            return f"{type(error).__name__}: {error}"
        return "nothing"

    assert on_ranks(3, work) == [
        "ArtifactError: rank 1: no disk",
        "TrainingError: no disk",
        "ArtifactError: rank 1: no disk",
    ]


def test_ranks_agree_or_say_on_what_they_do_not() -> None:
    def work(ranks: Ranks) -> str:
        check_agreement(ranks, {"the step": "a", "--epochs": 3})
        with pytest.raises(ArtifactError) as found:
            check_agreement(ranks, {"the step": "a", "--epochs": 3 + ranks.rank // 2})
        return str(found.value)

    assert set(on_ranks(3, work)) == {
        "the ranks disagree on --epochs: rank 0 has 3, rank 2 has 4; start all of them with the same step, data and "
        "options."
    }


def test_a_whole_step_is_refused(tiny_step: Path) -> None:
    with pytest.raises(ArtifactError, match="--accumulate needs a step in two; build it with --split"):
        check_split(Session(tiny_step), "--accumulate")
