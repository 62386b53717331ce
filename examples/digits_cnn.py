# SPDX-License-Identifier: Apache-2.0
"""Makes a small residual CNN as an ONNX file, and scikit-learn's handwritten digits as an .npz, for `make demo`.

    python examples/digits_cnn.py [--out FOLDER] [--batch N]

writes FOLDER/digits_cnn.onnx and FOLDER/digits.npz (default: out). The network has an ordinary, a strided, a dilated
and a depthwise convolution, batch norm, ReLU, two residual additions, an average pool and a linear layer.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

TEST_SHARE = 0.2
OPSET = 17


class Network:
    """Collects nodes and initial values; each method adds a layer and returns the name of its output."""

    def __init__(self, seed: int) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.values: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(seed)

    def value(self, name: str, array: np.ndarray) -> str:
        self.values.append(numpy_helper.from_array(array.astype("float32"), name))
        return name

    def add(self, kind: str, inputs: list[str], name: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def conv(
        self, x: str, name: str, channels: tuple[int, int], kernel: int = 3, *, strides: int = 1, dilation: int = 1,
        groups: int = 1,
    ) -> str:  # fmt: skip
        """Convolution (padded so that stride 1 keeps the size) and batch norm; He's initial values."""
        into, out = channels
        shape = (out, into // groups, kernel, kernel)
        deviation = np.sqrt(2 / np.prod(shape[1:]))
        weight = self.value(f"{name}.weight", self._random.normal(0, deviation, shape))
        reach = dilation * (kernel // 2)
        attributes = {
            "kernel_shape": [kernel] * 2,
            "strides": [strides] * 2,
            "dilations": [dilation] * 2,
            "pads": [reach] * 4,
            "group": groups,
        }
        x = self.add("Conv", [x, weight], f"{name}_out", **attributes)
        statistics = {"gamma": np.ones(out), "beta": np.zeros(out), "mean": np.zeros(out), "var": np.ones(out)}
        names = [self.value(f"{name}.{key}", array) for key, array in statistics.items()]
        return self.add("BatchNormalization", [x, *names], f"{name}_norm")

    def relu(self, x: str, name: str) -> str:
        return self.add("Relu", [x], name)

    def linear(self, x: str, name: str, features: tuple[int, int]) -> str:
        weight = self._random.normal(0, np.sqrt(1 / features[0]), features[::-1])
        names = [self.value(f"{name}.weight", weight), self.value(f"{name}.bias", np.zeros(features[1]))]
        return self.add("Gemm", [x, *names], name, transB=1)


def make_model(batch: int, seed: int = 0) -> onnx.ModelProto:
    """The network for `batch` pictures of 1x8x8, with 10 class scores as its output."""
    net = Network(seed)
    stem = net.relu(net.conv("image", "stem", (1, 16)), "stem_relu")
    x = net.relu(net.conv(stem, "block1.first", (16, 16)), "block1_relu")
    x = net.conv(x, "block1.dilated", (16, 16), dilation=2)
    x = net.relu(net.add("Add", [x, stem], "block1_sum"), "block1_out")
    down = net.relu(net.conv(x, "strided", (16, 32), strides=2), "strided_relu")
    x = net.relu(net.conv(down, "block2.depthwise", (32, 32), groups=32), "block2_relu")
    x = net.conv(x, "block2.pointwise", (32, 32), kernel=1)
    x = net.relu(net.add("Add", [x, down], "block2_sum"), "block2_out")
    x = net.add("AveragePool", [x], "pool", kernel_shape=[2, 2], strides=[2, 2])
    x = net.add("Flatten", [x], "flat", axis=1)
    net.linear(x, "scores", (32 * 2 * 2, 10))
    graph = helper.make_graph(
        net.nodes,
        "digits_cnn",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, [batch, 10])],
        net.values,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


def make_data() -> dict[str, np.ndarray]:
    """The 1,797 digits as float32 NCHW with mean 0 and deviation 1 over the training part, and int64 labels."""
    digits = load_digits()
    pictures = digits.images[:, None].astype("float32")
    x_train, x_test, y_train, y_test = train_test_split(
        pictures, digits.target.astype("int64"), test_size=TEST_SHARE, random_state=0, stratify=digits.target
    )
    mean, deviation = x_train.mean(), x_train.std()
    return {
        "x_train": (x_train - mean) / deviation,
        "y_train": y_train,
        "x_test": (x_test - mean) / deviation,
        "y_test": y_test,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the ONNX model and the data of the digits demo.")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder to write to")
    parser.add_argument("--batch", type=int, default=32, help="samples of a training step")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    model_path, data_path = arguments.out / "digits_cnn.onnx", arguments.out / "digits.npz"
    onnx.save(make_model(arguments.batch), model_path)
    data = make_data()
    np.savez_compressed(data_path, **data)
    print(f"{model_path}: residual CNN, batch {arguments.batch}")
    print(f"{data_path}: {len(data['y_train'])} training and {len(data['y_test'])} test digits")


if __name__ == "__main__":
    main()
