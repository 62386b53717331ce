# SPDX-License-Identifier: Apache-2.0
"""Batches of images: bit for bit those of the arrays, whoever decodes them, wherever they lie, wherever one begins."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from tests.images.pictures import TARGET, pixels, recipe_of, source_of, write_folder, write_shards
from tvm_convgrad.core.errors import SetupError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.images import source as source_module
from tvm_convgrad.training.runtime.images.folder import index_folder
from tvm_convgrad.training.runtime.images.index import accept_targets
from tvm_convgrad.training.runtime.images.options import ImageOptions
from tvm_convgrad.training.runtime.images.pool import Pool
from tvm_convgrad.training.runtime.images.shards import index_shards
from tvm_convgrad.training.runtime.images.source import ImageSource
from tvm_convgrad.training.runtime.source import Batch, Order, Source

SAMPLES = 37
SHAPE = (3, 5, 7)
AUGMENT = ("flip", "vflip:p=0.3", "crop:padding=2", "rotate", "jitter", "erase")


def images() -> np.ndarray:
    return pixels(SAMPLES, *SHAPE[1:], SHAPE[0])


def taken(source: Source, order: Order, start: int = 0) -> list[Batch]:
    """Copies of the batches of an epoch."""
    return [Batch((b.inputs[0].copy(),), b.target.copy(), b.numbers) for b in source.batches(order, start)]


def assert_same(found: list[Batch], wanted: list[Batch]) -> None:
    assert len(found) == len(wanted) > 0
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.inputs[0], other.inputs[0])
        np.testing.assert_array_equal(one.target, other.target)
        np.testing.assert_array_equal(one.numbers, other.numbers)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("folder")
    write_folder(path, images())
    return path


@pytest.mark.parametrize(("workers", "memory"), [(0, 0), (0, 1 << 20), (1, 1 << 20), (3, 0)])
@pytest.mark.parametrize("kind", ["folder", "cls", "json", "npy"])
def test_batches_are_those_of_the_arrays(tmp_path: Path, kind: str, workers: int, memory: int) -> None:
    """(pixel / 255 - mean) / std in float64, rounded once to the input's type."""
    mean, std = (0.1, 0.4, 0.3), (0.5, 0.25, 2.0)
    options = ImageOptions(mean, std, workers=workers, memory=memory)
    order_read = np.arange(SAMPLES)
    labels = np.arange(SAMPLES) % 3
    if kind == "folder":
        order_read = write_folder(tmp_path, images())
        source = source_of(tmp_path, SHAPE, options)
    else:
        index = index_shards(write_shards(tmp_path, images(), labels, 3, kind))
        index = accept_targets(index, replace(TARGET, range=IndexRange.of_classes(3)), "class numbers")
        source = source_of(index, SHAPE, options)
    values = (images()[order_read] / 255.0 - np.array(mean)) / np.array(std)
    arrays = Samples((values.astype("float32").transpose(0, 3, 1, 2),), labels[order_read])
    assert len(source) == len(arrays)
    try:
        for epoch in (0, 1):
            order = Order(7, epoch, 4)
            assert_same(taken(source, order), list(arrays.batches(order)))
        assert_same(
            [Batch((b.inputs[0].copy(),), b.target, b.numbers) for b in source.in_order(8)], list(arrays.in_order(8))
        )
    finally:
        source.close()


@pytest.mark.parametrize("changes", [AUGMENT, ("resized:scale=0.3", *AUGMENT)])
def test_augmented_batches_do_not_depend_on_processes_memory_or_the_beginning(
    folder: Path, changes: tuple[str, ...]
) -> None:
    order = Order(3, 0, 5)
    first = source_of(folder, SHAPE, ImageOptions(augment=changes, workers=0))
    whole = taken(first, order)
    following = taken(first, order.following)
    plain = taken(source_of(folder, SHAPE, ImageOptions(workers=0)), order)
    assert not any((one.inputs[0] == other.inputs[0]).all() for one, other in zip(whole, plain, strict=True))
    for workers, memory in ((1, 1 << 20), (2, 0), (3, 1 << 20)):
        source = source_of(folder, SHAPE, ImageOptions(augment=changes, workers=workers, memory=memory))
        try:
            assert_same(taken(source, order), whole)
            assert_same(taken(source, order.following), following)  # begun while the epoch before ended
            assert_same(taken(source, order, 4), whole[4:])  # as a run that resumes does
            left = source.batches(order)
            next(left)
            left.close()  # a run that is interrupted, and another that begins elsewhere
            assert_same(taken(source, order, 2), whole[2:])
            assert_same(taken(source, Order(3, 0, 4), 1), taken(first, Order(3, 0, 4), 1))
        finally:
            source.close()


def test_jobs_are_given_many_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that waits for every job would wake up beside each step, on the step's CPU."""
    events: list[str] = []
    give, answer = Pool.give, Pool.answer
    monkeypatch.setattr(Pool, "give", lambda self, job: (events.append("give"), give(self, job))[1])
    monkeypatch.setattr(Pool, "answer", lambda self: (events.append("answer"), answer(self))[1])
    source = source_of(folder, SHAPE, ImageOptions(augment=AUGMENT, workers=1, memory=0))
    try:
        for epoch in range(13):
            taken(source, Order(3, epoch, 4))
    finally:
        source.close()
    rounds = [len(list(found)) for kind, found in groupby(events) if kind == "give"]
    assert rounds == [64, *[32] * ((13 * 9) // 32)]


def test_a_sample_is_drawn_for_by_epoch_and_number(folder: Path) -> None:
    """Not by its place in the batch: another size of batches, or another rank, changes nothing but the grouping."""
    source = source_of(folder, SHAPE, ImageOptions(augment=AUGMENT, workers=0))
    found = {}
    for order in (Order(0, 2, 3), Order(0, 2, 5), *(Order(0, 2, 3, rank, 4) for rank in range(4))):
        for batch in taken(source, order):
            for number, row in zip(batch.numbers.tolist(), batch.inputs[0], strict=True):
                np.testing.assert_array_equal(row, found.setdefault(number, row))
    batches = taken(source, Order(0, 3, 3))
    other = {number: row for b in batches for number, row in zip(b.numbers.tolist(), b.inputs[0], strict=True)}
    shared = found.keys() & other.keys()
    assert sum((found[number] == other[number]).all() for number in shared) < len(shared) / 4


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_ranks_share_an_epoch(folder: Path, ranks: int) -> None:
    """Their batches side by side are those of one rank with the whole size."""
    source = source_of(folder, SHAPE, ImageOptions(augment=("flip",), workers=0))
    parts = [taken(source, Order(1, 4, 2, rank, ranks)) for rank in range(ranks)]
    whole = taken(source, Order(1, 4, 2 * ranks))
    assert source.steps(2, ranks) == len(whole)
    together = [
        Batch(
            (np.concatenate([batch.inputs[0] for batch in row]),),
            np.concatenate([batch.target for batch in row]),
            np.concatenate([batch.numbers for batch in row]),
        )
        for row in zip(*parts, strict=True)
    ]
    assert_same(together, whole)


@pytest.mark.parametrize(("dtype", "shape"), [("float16", (7, 5, 3)), ("bfloat16", (1, 5, 7)), ("uint8", (5, 7, 4))])
def test_layouts_and_element_types(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    """NHWC and NCHW of 1, 3 and 4 channels; integers are the pixels."""
    last = shape[0] != 1
    height, width, channels = shape if last else (*shape[1:], shape[0])
    given = pixels(6, height, width, channels)
    order_read = write_folder(tmp_path, given)
    recipe = recipe_of(shape, ImageOptions(), dtype)
    (batch,) = ImageSource(index_folder(tmp_path), recipe, ImageOptions(workers=0)).in_order(6)
    found = batch.inputs[0] if last else batch.inputs[0].transpose(0, 2, 3, 1)
    wanted = given[order_read] if dtype == "uint8" else (given[order_read] / 255.0).astype(found.dtype)
    assert str(found.dtype) == dtype
    np.testing.assert_array_equal(found.astype("float64"), wanted.astype("float64"))


def test_a_killed_process_is_a_sentence(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "_AHEAD", (1, 1))  # else all batches may be made before the processes end
    source = source_of(folder, SHAPE, ImageOptions(augment=("rotate",), workers=2))
    batches = source.batches(Order(0, 0, 1))
    next(batches)
    for process in source._ahead._pool._processes:
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(SetupError, match=r"has ended \(signal 9\).*--workers"):
        list(batches)  # what was made before may still be taken
    source.close()


def test_processes_end_with_the_source(folder: Path) -> None:
    source = source_of(folder, SHAPE, ImageOptions(augment=("flip",), workers=2, memory=0))
    next(source.batches(Order(0, 0, 2)))
    processes = list(source._ahead._pool._processes)
    assert all(process.poll() is None for process in processes)
    source.close()
    assert all(process.poll() is not None for process in processes)
    source.close()  # twice does no harm
