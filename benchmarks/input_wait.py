# SPDX-License-Identifier: Apache-2.0
"""How long a training step waits for images, and what decoding beside it costs: steps on images and on arrays by turns.

    convgrad build model.onnx -o step.so
    python benchmarks/input_wait.py step.so --images 2048

writes PNGs of noise in the size of the step's input into a temporary folder, and trains on them in four ways: on the
decoded arrays, as an .npz would give them; on the folder, decoded once before the run; the same with a flip and a crop
in each epoch; and decoded again in each epoch with them, as a set is that does not fit into memory. Each line has the
median time of a step, that time beside the first line's, the median time that a step waited for its batch, and the part
of the whole time that waiting took.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from tvm_convgrad.threads import use_threads
from tvm_convgrad.training.runtime.checkpoint import Progress
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.images.options import ImageOptions
from tvm_convgrad.training.runtime.images.recipe import Recipe
from tvm_convgrad.training.runtime.images.source import ImageSource
from tvm_convgrad.training.runtime.loop import train
from tvm_convgrad.training.runtime.reader import Reader
from tvm_convgrad.training.runtime.session import Session

AUGMENT = ("flip", "crop:padding=4")


def write_images(folder: Path, recipe: Recipe, images: int, classes: int) -> None:
    """Noise that is smooth enough to be compressed as photographs are, in a folder for each class."""
    random = np.random.default_rng(0)
    height, width, channels = recipe.pixels
    for number in range(images):
        coarse = random.integers(0, 256, (-(-height // 4), -(-width // 4), channels))
        fine = coarse.repeat(4, 0).repeat(4, 1)[:height, :width] + random.integers(-8, 9, (height, width, channels))
        pixels = fine.clip(0, 255).astype("uint8")
        path = folder / f"{number % classes:04d}" / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(pixels[..., 0] if channels == 1 else pixels).save(path)


def sources(session: Session, folder: Path, workers: int | None) -> Iterator[tuple[str, Samples | ImageSource]]:
    """The ways to have the images, by name."""
    options = {
        "decoded before": ImageOptions(workers=workers),
        "augmented": ImageOptions(augment=AUGMENT, workers=workers),
        "decoded and augmented": ImageOptions(augment=AUGMENT, workers=workers, memory=0),
    }
    found = {name: Reader(session, each).read(folder, "train", given=True) for name, each in options.items()}
    plain = found["decoded before"]
    assert isinstance(plain, ImageSource)
    inputs = np.concatenate([batch.inputs[0].copy() for batch in plain.in_order(256)])
    yield "arrays", Samples((inputs,), plain.index.targets)
    for name, source in found.items():
        assert source is not None
        yield name, source


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure how long a step waits for images.")
    parser.add_argument("step", type=Path, help="the library of `convgrad build`, of a classifier of images")
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=3, help="of each way, by turns; the first is not counted")
    parser.add_argument("--batch", type=int, default=32, help="for a step whose batch is free")
    parser.add_argument("--workers", type=int, default=None, help="as of `convgrad run`")
    arguments = parser.parse_args()
    threads = use_threads()
    session = Session(arguments.step)
    recipe = Recipe.of(session.inputs, session.target, ImageOptions(), session.artifact.options)
    size = session.batch or arguments.batch
    with tempfile.TemporaryDirectory() as place:
        write_images(Path(place), recipe, arguments.images, min(session.classes or 2, 10))
        ways = dict(sources(session, Path(place), arguments.workers))
        progress = {name: Progress("", "", 0, size, 1e-3) for name in ways}
        times: dict[str, list[float]] = {name: [] for name in ways}
        waits: dict[str, list[float]] = {name: [] for name in ways}
        for epoch in range(arguments.epochs + 1):
            for name, source in ways.items():
                begin = time.perf_counter()
                for report in train(session, source, progress[name], epoch + 1, allow_nonfinite=True):
                    end = time.perf_counter()
                    if epoch:
                        times[name].append(end - begin)
                        waits[name].append(report.waited)
                    begin = end
        for source in ways.values():
            source.close()
    print(f"{arguments.images} images {recipe.pixels}, batch {size}, {threads} threads")
    base = statistics.median(times["arrays"])
    for name, found in times.items():
        step = statistics.median(found)
        wait, share = statistics.median(waits[name]), sum(waits[name]) / sum(found)
        beside = f"{step * 1e3:9.3f} ms a step, {step / base:6.3f} of arrays"
        print(f"{name:24} {beside}, waited {wait * 1e6:6.0f} us, {share:6.2%}")


if __name__ == "__main__":
    main()
