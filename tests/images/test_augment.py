# SPDX-License-Identifier: Apache-2.0
"""What augmentations make of images: only what they may, for each sample something else, in the right shares."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from PIL import Image

from tests.images.pictures import pixels
from tvm_convgrad.training.runtime.images.augment import Draws, augment, resize_part
from tvm_convgrad.training.runtime.images.options import KINDS, RESIZED, Augmentation

SAMPLES, HEIGHT, WIDTH = 400, 5, 6
IMAGES = pixels(SAMPLES, HEIGHT, WIDTH, 3)
NUMBERS = np.arange(SAMPLES)


def changed(text: str, images: np.ndarray = IMAGES, seed: int = 0, stage: int = 0) -> np.ndarray:
    draws = Draws(seed, 0, SAMPLES)
    return augment(images.copy(), Augmentation.parse(text), stage, NUMBERS, draws)


@pytest.mark.parametrize(("kind", "axis"), [("flip", 1), ("vflip", 0)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_flips(kind: str, axis: int, share: float) -> None:
    found = changed(f"{kind}:p={share}")
    mirrored = [(row == np.flip(image, axis)).all() for row, image in zip(found, IMAGES, strict=True)]
    kept = [(row == image).all() for row, image in zip(found, IMAGES, strict=True)]
    assert sum(mirrored) + sum(kept) == SAMPLES
    assert abs(sum(mirrored) / SAMPLES - share) <= (0.0 if share in (0.0, 1.0) else 5 * 0.5 / SAMPLES**0.5)


def test_crops_are_all_parts_of_the_bordered_image() -> None:
    border = 2
    found = changed(f"crop:padding={border}")
    places: Counter[tuple[int, int]] = Counter()
    for row, image in zip(found, IMAGES, strict=True):
        padded = np.pad(image, ((border, border), (border, border), (0, 0)))
        (place,) = [
            (top, left)
            for top in range(2 * border + 1)
            for left in range(2 * border + 1)
            if (padded[top : top + HEIGHT, left : left + WIDTH] == row).all()
        ]
        places[place] += 1
    assert len(places) == (2 * border + 1) ** 2
    assert max(places.values()) < 5 * SAMPLES / len(places)


def test_jitter_moves_brightness_within_its_bounds() -> None:
    grey = np.full((SAMPLES, HEIGHT, WIDTH, 3), 100, "uint8")
    found = changed("jitter:brightness=0.2,contrast=0,saturation=0", grey)
    assert found.min() >= 79
    assert found.max() <= 121
    assert len(np.unique(found[:, 0, 0, 0])) > 20


def test_erased_rectangles_are_no_larger_than_said() -> None:
    black = np.zeros((SAMPLES, 20, 20, 1), "uint8")
    found = changed("erase:p=0.5,scale=0.25", black)
    sizes = (found == 128).reshape(SAMPLES, -1).sum(1)
    assert ((found == 0) | (found == 128)).all()
    assert 0.35 < (sizes > 0).mean() < 0.65
    assert sizes.max() <= 0.25 * 400 + 20  # sides are rounded


def test_rotation_by_nothing_and_by_something() -> None:
    np.testing.assert_array_equal(changed("rotate:degrees=0"), IMAGES)
    assert (changed("rotate:degrees=90") != IMAGES).any(axis=(1, 2, 3)).mean() > 0.9


def test_resized_is_a_part_of_the_image() -> None:
    """Of an image whose columns grow: the part lies within it, whole images stay whole."""
    ramp = Image.fromarray(np.tile(np.arange(0, 240, 2, dtype="uint8"), (60, 1)))
    draws = Draws(0, 0, 100)
    widths = []
    for number in range(100):
        part = resize_part(ramp, Augmentation.parse("resized:scale=0.2"), (30, 30), draws.of(0, number))
        row = np.asarray(part)[15].astype(int)
        assert (np.diff(row) >= 0).all()
        widths.append(row[-1] - row[0])
    assert min(widths) < 100 < max(widths)
    whole = resize_part(ramp, Augmentation.parse("resized:scale=1,ratio=1"), (30, 30), draws.of(0, 0))
    assert whole.size == (30, 30)


@pytest.mark.parametrize("kind", sorted(KINDS.keys() - {RESIZED}))
def test_draws_differ_by_seed_and_place(kind: str) -> None:
    found = changed(kind)
    np.testing.assert_array_equal(found, changed(kind))
    for other in (changed(kind, seed=1), changed(kind, stage=1)):
        assert (found != other).any(axis=(1, 2, 3)).mean() > 0.2
