# SPDX-License-Identifier: Apache-2.0
"""A U-Net that separates shapes from noise: makes the network and the pictures, and draws what was learnt.

    python examples/unet_shapes.py make [--out FOLDER] [--batch N]
    python examples/unet_shapes.py show STEP.so DATA.npz CHECKPOINT_FOLDER PICTURE.png

`make` writes FOLDER/unet.onnx and FOLDER/shapes.npz: pictures of 32 x 32 pixels with a disc and a square in noise, and
the class of each pixel (nothing, disc, square). The network halves the resolution twice by strided convolutions, goes
up again by transposed ones, and joins each level with the one of its size on the way down.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from digits_cnn import OPSET, Network
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from onnx import TensorProto, helper

from tvm_convgrad.training import Session, load_latest

SIZE, CLASSES, TRAINED, TESTED = 32, 3, 512, 64


class UNet(Network):
    """The layers of a U-Net."""

    def up(self, x: str, name: str, channels: tuple[int, int]) -> str:
        """A transposed convolution that doubles the resolution."""
        deviation = np.sqrt(1 / channels[0])
        weight = self.value(f"{name}.weight", self._random.normal(0, deviation, (*channels, 2, 2)))
        return self.add("ConvTranspose", [x, weight], f"{name}_out", kernel_shape=[2, 2], strides=[2, 2])

    def block(self, x: str, name: str, channels: tuple[int, int], strides: int = 1) -> str:
        return self.relu(self.conv(x, name, channels, strides=strides), f"{name}_relu")


def make_model(batch: int) -> onnx.ModelProto:
    """The network, with scores (batch, classes, rows, columns)."""
    net = UNet(0)
    fine = net.block("image", "fine", (1, 8))
    middle = net.block(fine, "middle", (8, 16), strides=2)
    coarse = net.block(middle, "coarse", (16, 32), strides=2)
    x = net.add("Concat", [net.up(coarse, "up1", (32, 16)), middle], "join1", axis=1)
    x = net.block(x, "out1", (32, 16))
    x = net.add("Concat", [net.up(x, "up2", (16, 8)), fine], "join2", axis=1)
    x = net.block(x, "out2", (16, 8))
    weight = net.value("scores.weight", net._random.normal(0, 0.3, (CLASSES, 8, 1, 1)))
    net.add("Conv", [x, weight, net.value("scores.bias", np.zeros(CLASSES))], "scores", kernel_shape=[1, 1])
    graph = helper.make_graph(
        net.nodes,
        "unet",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 1, SIZE, SIZE])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, CLASSES, SIZE, SIZE])],
        net.values,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def make_data(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Pictures (count, 1, SIZE, SIZE) in float32, and the class of each pixel in int64."""
    rng = np.random.default_rng(seed)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    labels = np.zeros((count, SIZE, SIZE), "int64")
    for label in labels:
        y, x, radius = [*rng.integers(6, SIZE - 6, 2).tolist(), int(rng.integers(3, 7))]
        top, left, side = [*rng.integers(0, SIZE - 12, 2).tolist(), int(rng.integers(6, 12))]
        label[(rows - y) ** 2 + (columns - x) ** 2 <= radius**2] = 1
        label[top : top + side, left : left + side] = 2
    pictures = (labels > 0) + rng.normal(0, 0.4, labels.shape)
    return pictures[:, None].astype("float32"), labels


def make(out: Path, batch: int) -> None:
    out.mkdir(parents=True, exist_ok=True)
    onnx.save(make_model(batch), out / "unet.onnx")
    arrays = dict(zip(("x_train", "y_train"), make_data(TRAINED, 0), strict=True))
    np.savez_compressed(
        out / "shapes.npz", **arrays, **dict(zip(("x_test", "y_test"), make_data(TESTED, 1), strict=True))
    )
    print(f"{out / 'unet.onnx'}, {out / 'shapes.npz'}: {TRAINED} training and {TESTED} test pictures")


def show(step: Path, data: Path, checkpoints: Path, picture: Path) -> None:
    session = Session(step)
    checkpoint, _ = load_latest(checkpoints)
    assert checkpoint is not None, f"{checkpoints}: no checkpoints"
    session.state = checkpoint.state
    with np.load(data) as arrays:
        pictures, labels = arrays["x_test"], arrays["y_test"]
    found = session.predict(pictures).argmax(axis=1)
    figure = Figure(figsize=(8, 4), layout="constrained")
    FigureCanvasAgg(figure)
    for number, column in enumerate(figure.subplots(3, 6).T):
        shown = (pictures[number, 0], "gray"), (labels[number], "viridis"), (found[number], "viridis")
        for axes, (image, colours) in zip(column, shown, strict=True):
            axes.imshow(image, cmap=colours)
            axes.set_axis_off()
    figure.savefig(picture, dpi=100)
    both = [((found == each) & (labels == each)).sum() / ((found == each) | (labels == each)).sum() for each in (1, 2)]
    print(
        f"{(found == labels).mean():.1%} of the pixels are right; IoU of discs {both[0]:.2f}, of squares {both[1]:.2f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True, dest="command")
    making = commands.add_parser("make", help="write the network and the pictures")
    making.add_argument("--out", type=Path, default=Path("out"))
    making.add_argument("--batch", type=int, default=32)
    showing = commands.add_parser("show", help="draw what a trained step finds")
    for name in ("step", "data", "checkpoints", "picture"):
        showing.add_argument(name, type=Path)
    options = vars(parser.parse_args())
    {"make": make, "show": show}[options.pop("command")](**options)


if __name__ == "__main__":
    main()
