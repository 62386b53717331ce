# SPDX-License-Identifier: Apache-2.0
"""A small Relax network, its ONNX twin, and a float64 numpy reference of both."""

from __future__ import annotations

import numpy as np
import tvm
from tvm import relax

CLASSES = 5


def weights(seed=0):
    """conv (6,2,3,3) with bias, batch norm over 6, linear (5,6) with bias."""
    rng = np.random.default_rng(seed)
    normal = lambda *shape: (0.4 * rng.standard_normal(shape)).astype("float32")  # noqa: E731
    return {
        "conv_weight": normal(6, 2, 3, 3),
        "conv_bias": normal(6),
        "bn_weight": 1 + normal(6),
        "bn_bias": normal(6),
        "bn_mean": normal(6),
        "bn_var": 1 + abs(normal(6)),
        "fc_weight": normal(CLASSES, 6),
        "fc_bias": normal(CLASSES),
    }


def relax_module(batch="n", dropout=0.0, shapes=None):
    """conv 3x3 - batch norm (momentum 0.1) - relu - mean over H, W - (dropout) - linear, on 2x7x6 images."""
    extent = tvm.tirx.Var(batch, "int64") if isinstance(batch, str) else batch
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((extent, 2, 7, 6), "float32"))
    params = {name: relax.Var(name, relax.TensorType(value.shape, "float32")) for name, value in weights().items()}
    with builder.function("main", [x, *params.values()]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, params["conv_weight"], padding=1))
            y = builder.emit(relax.op.add(y, relax.op.reshape(params["conv_bias"], (1, 6, 1, 1))))
            normed = [params[name] for name in ("bn_weight", "bn_bias", "bn_mean", "bn_var")]
            y = builder.emit(relax.op.nn.batch_norm(y, *normed, axis=1, momentum=0.1))
            y = builder.emit(relax.op.nn.relu(builder.emit(y[0])))
            y = builder.emit(relax.op.mean(y, [2, 3]))
            if dropout:
                y = builder.emit(builder.emit(relax.op.nn.dropout(y, dropout))[0])
            y = builder.emit(relax.op.matmul(y, relax.op.permute_dims(params["fc_weight"])))
            output = builder.emit_output(relax.op.add(y, params["fc_bias"]))
        builder.emit_func_output(output)
    return builder.get()


def onnx_model(path, batch="N", ops=None, momentum=0.9):
    """The same network as an ONNX file exported for inference."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    initializers = [numpy_helper.from_array(value, name) for name, value in weights().items()]
    nodes = [
        helper.make_node("Conv", ["x", "conv_weight", "conv_bias"], ["c"], pads=[1, 1, 1, 1]),
        helper.make_node(
            "BatchNormalization", ["c", "bn_weight", "bn_bias", "bn_mean", "bn_var"], ["b"], momentum=momentum
        ),
        helper.make_node("Relu", ["b"], ["r"]),
        helper.make_node("GlobalAveragePool", ["r"], ["g"]),
        helper.make_node("Flatten", ["g"], ["f"]),
        helper.make_node("Gemm", ["f", "fc_weight", "fc_bias"], ["y"], transB=1),
        *(ops or []),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 2, 7, 6])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES])],
        initializers,
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return model


def data(count=8, seed=1):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((count, 2, 7, 6)).astype("float32"), rng.integers(0, CLASSES, count)


class Reference:
    """The network with hand-written gradients in float64; batch statistics, unbiased running variance."""

    def __init__(self, values=None, momentum=0.1):
        self.values = {name: value.astype("float64") for name, value in (values or weights()).items()}
        self.momentum = momentum

    def loss_and_gradients(self, x, labels):
        v = self.values
        x = x.astype("float64")
        count = len(x)
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
        conv = np.einsum("nchwij,ocij->nohw", windows, v["conv_weight"]) + v["conv_bias"][:, None, None]
        axes = (0, 2, 3)
        total = conv.size / conv.shape[1]
        mean, var = conv.mean(axes), conv.var(axes)
        inverse = 1 / np.sqrt(var + 1e-5)
        hat = (conv - mean[:, None, None]) * inverse[:, None, None]
        normed = hat * v["bn_weight"][:, None, None] + v["bn_bias"][:, None, None]
        relu = np.maximum(normed, 0)
        pooled = relu.mean((2, 3))
        logits = pooled @ v["fc_weight"].T + v["fc_bias"]
        exponents = np.exp(logits - logits.max(1, keepdims=True))
        softmax = exponents / exponents.sum(1, keepdims=True)
        loss = -np.log(softmax[np.arange(count), labels]).mean()
        d_logits = (softmax - np.eye(CLASSES)[labels]) / count
        gradients = {"fc_weight": d_logits.T @ pooled, "fc_bias": d_logits.sum(0)}
        d_normed = (d_logits @ v["fc_weight"])[:, :, None, None] / (7 * 6) * (normed > 0)
        gradients["bn_weight"] = (d_normed * hat).sum(axes)
        gradients["bn_bias"] = d_normed.sum(axes)
        d_hat = d_normed * v["bn_weight"][:, None, None]
        centred = d_hat - d_hat.mean(axes)[:, None, None] - hat * (d_hat * hat).mean(axes)[:, None, None]
        d_conv = centred * inverse[:, None, None]
        gradients["conv_bias"] = d_conv.sum(axes)
        gradients["conv_weight"] = np.einsum("nchwij,nohw->ocij", windows, d_conv)
        statistics = {
            "bn_mean": (1 - self.momentum) * v["bn_mean"] + self.momentum * mean,
            "bn_var": (1 - self.momentum) * v["bn_var"] + self.momentum * var * total / (total - 1),
        }
        return loss, gradients, statistics
