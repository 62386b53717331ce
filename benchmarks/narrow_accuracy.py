# SPDX-License-Identifier: Apache-2.0
"""Losses and accuracies of trainings in bfloat16 beside those in float32, from the same initial values.

    python -m benchmarks.narrow_accuracy --model digits,resnet18 --steps 200 --seeds 3

Models: `digits` is the network of examples/digits_cnn.py, `resnet18` the ResNet-18 for pictures of 32 x 32. Both train
on scikit-learn's digits, for `resnet18` enlarged four times and repeated in three channels, with SGD and momentum. A
seed gives the initial values and the order of the data; both types get the same. Prints a row for each: the mean loss
of the last 20 steps, and the share of the test digits that is recognised afterwards.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import mean

import numpy as np
import onnx

from examples.digits_cnn import make_data, make_model
from tvm_convgrad.training.runtime.session import Session

DTYPES = ("float32", "bfloat16")
LAST = 20
"""Steps at the end over which the loss is averaged."""
RATES = {"digits": "0.05", "resnet18": "0.02"}


def data_of(model: str) -> dict[str, np.ndarray]:
    """Digits of the size that a model takes."""
    data = make_data()
    if model == "resnet18":
        for key in ("x_train", "x_test"):
            data[key] = np.repeat(np.kron(data[key], np.ones((1, 1, 4, 4), "float32")), 3, axis=1)
    return data


def write_model(model: str, batch: int, seed: int, folder: Path) -> Path:
    """The model's file with the initial values of a seed."""
    if model == "digits":
        path = folder / "model.onnx"
        onnx.save(make_model(batch, seed), path)
        return path
    import torch

    from tvm_convgrad.bench.networks import network

    module, size = network("resnet18_cifar", seed)
    path = folder / "model.pt2"
    torch.export.save(torch.export.export(module.train(), (torch.zeros(batch, 3, size, size),)), path)
    return path


def train(step: Path, data: dict[str, np.ndarray], batch: int, steps: int, seed: int) -> tuple[float, float]:
    """The mean of the last losses, and the accuracy on the test digits."""
    session, random, losses = Session(step), np.random.default_rng(seed), []
    order = np.concatenate([random.permutation(len(data["y_train"])) for _ in range(steps)])  # more than enough
    for number in range(steps):
        rows = order[number * batch : (number + 1) * batch]
        loss, _ = session.step(np.ascontiguousarray(data["x_train"][rows]), data["y_train"][rows])
        losses.append(float(loss))
    scores = np.asarray(session.predict(data["x_test"]))
    return mean(losses[-LAST:]), float((scores.argmax(axis=1) == data["y_test"]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="digits,resnet18", help="of digits and resnet18, with commas")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=3)
    given = parser.parse_args()
    print("| model | seed | type | loss of the last steps | test accuracy |\n| --- | --- | --- | --- | --- |")
    for model in given.model.split(","):
        data = data_of(model)
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory(prefix="convgrad-accuracy-") as folder:
                path = write_model(model, given.batch, seed, Path(folder))
                for dtype in DTYPES:
                    step = Path(folder) / f"{dtype}.so"
                    command = [sys.executable, "-m", "tvm_convgrad", "build", str(path), "-o", str(step)]
                    command += ["--dtype", dtype, "--target", "native", "--momentum", "0.9", "--lr", RATES[model]]
                    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                    loss, accuracy = train(step, data, given.batch, given.steps, seed)
                    print(f"| {model} | {seed} | {dtype} | {loss:.4f} | {100 * accuracy:.1f} % |", flush=True)


if __name__ == "__main__":
    main()
