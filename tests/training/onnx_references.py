# SPDX-License-Identifier: Apache-2.0
"""Functions of `onnx_operators` by other operators, where the reference of the package onnx lacks one or is wrong."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from tests.training.onnx_graphs import (
    SHAPE,
    Function,
    halves,
    initial,
    of,
    transposed,
    volume,
    weight,
)


def _parts(g, x, axis, sizes):
    """The node split along an axis."""
    return g("Split", x, sizes, outputs=len(sizes), axis=axis)


def _norm(g, x):
    mean = g("ReduceMean", x, [0, 2, 3])
    centred = g("Sub", x, mean)
    return g("Div", centred, g("Add", g("Sqrt", g("ReduceMean", g("Mul", centred, centred), [0, 2, 3])), 1e-9))


def _grouped(g, x):
    """ConvTranspose of two groups, one by one."""
    kernels = np.split(weight(4, 3, 3, 2), 2)
    parts = zip(_parts(g, x, 1, [2, 2]), kernels, strict=True)
    return g("Concat", *[g("ConvTranspose", part, kernel, dilations=[1, 2]) for part, kernel in parts], axis=1)


def _neighbours(size, alpha, beta=0.75, bias=1.0):
    """LRN; onnx's own counts samples for channels."""

    def function(g, x):
        wide = g("Pad", g("Mul", x, x), [(size - 1) // 2, size // 2], 0.0, [1])
        total = g("Sum", *[g("Slice", wide, [k], [k + SHAPE[1]], [1]) for k in range(size)])
        return g("Div", x, g("Pow", g("Add", g("Mul", total, alpha / size), bias), beta))

    return function


def _flat(kind, rows):
    """Softmax of before opset 13, for which onnx runs the newer one."""
    return lambda g, x: g("Reshape", g(kind, g("Reshape", x, [rows, -1]), axis=-1), SHAPE)


def _unrolled(active, started=False):
    """RNN step by step; onnx's own has tanh only, and no clip."""

    def function(g, x):
        inner, outer, bias = weight(1, 3, 32)[0].T, weight(1, 3, 3)[0].T, weight(6)[:3] + weight(6)[3:]
        hidden = g("Squeeze", initial(g, x), [0]) if started else np.zeros((2, 3))
        steps = []
        for step in _parts(g, halves(g, x), 1, [1, 1]):
            total = g("Add", g("MatMul", g("Squeeze", step, [1]), inner), bias)
            hidden = active(g, g("Add", total, g("MatMul", hidden, outer)))
            steps.append(g("Unsqueeze", hidden, [0, 1]))
        return g("Concat", *steps, axis=0)

    return function


def _at(rows, columns):
    """The elements at these rows and columns: resizes of before opset 11, as ONNX Runtime has them."""
    return lambda g, x: g("Gather", g("Gather", x, rows, axis=2), columns, axis=3)


def _mixed(rows, columns):
    """Products with a matrix for each axis, of 4 columns."""
    return lambda g, x: g("MatMul", g("MatMul", np.array(rows, "float64"), x), np.array(columns, "float64").T)


_UPSAMPLED = _at(np.arange(16) // 4, np.arange(12) // 3)


def _mean_variance(axes):
    """Its definition of opsets before 18; onnx's reference writes the newest one out for any opset."""

    def written(g, x):
        mean = g("ReduceMean", x, axes=axes, keepdims=1)
        squares = g("ReduceMean", g("Mul", x, x), axes=axes, keepdims=1)
        deviation = g("Sqrt", g("Sub", squares, g("Mul", mean, mean)))
        return g("Div", g("Sub", x, mean), g("Add", deviation, 1e-9))

    return written


REFERENCES: dict[str, Function] = {
    "mean_variance_9": _mean_variance([2, 3]),
    "mean_variance_before_18": _mean_variance([1, 3]),
    "nearest_10": _at(np.arange(12) // 3, np.arange(16) // 4),
    "nearest_fraction_10": _at([0, 0, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2, 2, 2, 3]),
    "nearest_reduced_10": _at([0, 2], [0, 2, 3]),
    "linear_10": _mixed(
        [[1, 0, 0, 0], [0, 1 / 3, 2 / 3, 0]],
        np.repeat(np.eye(4), 2, 0) / 2 + np.eye(4)[[0, 1, 1, 2, 2, 3, 3, 3]] / 2,
    ),
    "upsample_9": _UPSAMPLED,
    "upsample_8": _UPSAMPLED,
    "rnn_relu": _unrolled(lambda g, x: g("Relu", x), started=True),
    "rnn_clip": _unrolled(lambda g, x: g("Tanh", g("Clip", x, -0.4, 0.4))),
    "softmax_flat": _flat("Softmax", 2),
    "log_softmax_flat": _flat("LogSoftmax", 8),
    "max_same_lower": of("MaxPool", kernel_shape=[3, 2], strides=[2, 2], pads=[1, 0, 0, 0]),
    "lrn": _neighbours(3, 0.1, 0.6, 1.2),
    "lrn_even": _neighbours(2, 0.1),
    "l1_normalization": lambda g, x: g("Div", x, g("ReduceL1", x, [-1])),
    "global_max_3d": lambda g, x: g("ReduceMax", volume(g, x), [2, 3, 4]),
    "group_norm": lambda g, x: g(
        "GroupNormalization", x, weight(4), weight(4), num_groups=2, epsilon=1e-3, stash_type=TensorProto.DOUBLE
    ),
    "mean_variance": _norm,
    "mean_variance_of_defaults": _norm,
    "transposed_groups": _grouped,
    "transposed_shape": transposed(2, strides=[2, 2], pads=[1, 1, 0, 0]),
    "transposed_shape_more": transposed(2, strides=[3, 2], output_padding=[2, 1]),
    "space_to_depth_crd": lambda g, x: g(
        "Reshape", g("Transpose", g("Reshape", x, [2, 4, 2, 2, 2, 2]), perm=[0, 1, 3, 5, 2, 4]), [2, 16, 2, 2]
    ),
    "lp_ceil": lambda g, x: g(
        "LpPool", g("Pad", x, [0, 0, 0, 0, 0, 0, 1, 1], 0.0), kernel_shape=[3, 3], strides=[2, 2], p=3
    ),
    "lp_ceil_pads": lambda g, x: g(
        "LpPool", g("Pad", x, [0, 0, 1, 0, 0, 0, 0, 1], 0.0), kernel_shape=[2, 3], strides=[3, 2], p=1
    ),
    "lp_dilated_ceil": lambda g, x: g(
        "LpPool", g("Pad", x, [0, 0, 0, 0, 0, 0, 1, 0], 0.0), kernel_shape=[2, 2], strides=[3, 1], dilations=[1, 2], p=2
    ),
    "global_lp_of_zeros": lambda g, x: g("ReduceL2", g("Relu", g("Sub", x, 1.7)), [2, 3]),
    "global_lp": lambda g, x: g("Pow", g("ReduceSum", g("Pow", g("Abs", x), 3.0), [2, 3]), 1 / 3),
    "pad_crop": lambda g, x: g("Pad", g("Slice", x, [1, 0], [4, 3], [2, 3]), [0, 0, 0, 2, 0, 0, 1, 0], 0.5),
}
"""The same functions of other operators, where onnx's reference lacks one or is wrong."""
