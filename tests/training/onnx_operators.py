# SPDX-License-Identifier: Apache-2.0
"""Single operators of ONNX as exporters write them: functions of one tensor, by topic; a topic has one opset."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from onnx import TensorProto, helper, numpy_helper

SHAPE = (2, 4, 4, 4)
"""Of the tensor that each function gets: samples, channels, height, width."""


class Graph:
    """A graph in the making; floating constants have its dtype."""

    def __init__(self, dtype):
        self.dtype = dtype
        self.nodes = []

    def name(self):
        return f"t{len(self.nodes)}"

    def constant(self, value):
        """A Constant of Python numbers (floats in the graph's dtype) or an array."""
        array = np.asarray(value)
        if array.dtype.kind == "f":
            array = array.astype(self.dtype)
        name = self.name()
        self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array, name)))
        return name

    def __call__(self, kind, *operands, outputs=1, **attributes):
        """A node; what is no name of a tensor becomes a constant, and of several outputs all names are given."""
        names = [operand if isinstance(operand, str) else self.constant(operand) for operand in operands]
        name = self.name()
        results = [f"{name}_{place}" for place in range(outputs)]
        self.nodes.append(helper.make_node(kind, names, results, name=f"node_{kind}_{name}", **attributes))
        return results[0] if outputs == 1 else results


Function = Callable[[Graph, str], str]


def row(g, x):
    """(samples, 4, 16)."""
    return g("Reshape", x, [0, 4, 16])


def volume(g, x):
    """(samples, 2, 2, 4, 4)."""
    return g("Reshape", x, [0, 2, 2, 4, 4])


def weight(*shape):
    """A weight without symmetry."""
    return np.sin(np.arange(np.prod(shape, dtype=int), dtype="float64") * 1.7 + 0.3).reshape(shape)


def conv(mode, kernel, stride=1):
    return lambda g, x: g("Conv", x, weight(3, 4, *kernel), auto_pad=mode, strides=[stride] * len(kernel))


def transposed(rank, groups=1, bias=False, **attributes):
    """ConvTranspose of 4 channels (2 in volumes), kernels of 3, 2 and 3."""

    def function(g, x):
        data = {1: row, 2: lambda _, x: x, 3: volume}[rank](g, x)
        channels = 2 if rank == 3 else 4
        kernel = weight(channels, 3, *[3, 2, 3][:rank])
        operands = [weight(3 * groups)] if bias else []
        return g("ConvTranspose", data, kernel, *operands, group=groups, **attributes)

    return function


def resize(rank, scales=None, sizes=None, **attributes):
    def function(g, x):
        data = {1: row, 2: lambda _, x: x, 3: volume}[rank](g, x)
        if scales is not None:
            return g("Resize", data, "", g.constant(np.array([1, 1, *scales], "float32")), **attributes)
        return g("Resize", data, "", "", np.array([2, 2 if rank == 3 else 4, *sizes]), **attributes)

    return function


def scatter_nd(reduction, repeated):
    """Rows of 16 written into channels 2 and 0 (or 2 twice) of each sample."""
    places = np.array([[[0, 2], [0, 2 if repeated else 0]], [[1, 2], [1, 3]]])
    return lambda g, x: g(
        "ScatterND", row(g, x), places, g("Slice", g("Sin", row(g, x)), [1], [3], [1]), reduction=reduction
    )


def scatter_elements(reduction, repeated=False):
    places = np.array([[2, 2, 3] if repeated else [2, 0, -1]] * 2)[:, :, None] + np.zeros((2, 3, 16), "int64")
    update = lambda g, x: g("Slice", g("Sin", row(g, x)), [0], [3], [1])  # noqa: E731
    return lambda g, x: g(
        "ScatterElements", row(g, x), places.astype("int64"), update(g, x), axis=1, reduction=reduction
    )


def reduced(kind, axes=(2, 3), keepdims=1):
    return lambda g, x: g(kind, g("Add", g("Abs", x), 0.3), list(axes), keepdims=keepdims)


def chained(*kinds):
    """Unary operators, the sum of their results."""

    def function(g, x):
        total = x
        for kind in kinds:
            total = g("Add", total, g(kind, x))
        return total

    return function


def of(kind, *operands, scale=1.0, shape=None, **attributes):
    """An operator of scale·x."""

    def function(g, x):
        data = g("Mul", x, scale) if scale != 1 else x
        return g(kind, shape(g, data) if shape else data, *operands, **attributes)

    return function


def two(kind, **attributes):
    """A binary operator of x and of itself turned over."""
    return lambda g, x: g(kind, x, g("Transpose", x, perm=[0, 1, 3, 2]), **attributes)


def halves(g, x):
    """(samples, 2, 32)."""
    return g("Reshape", x, [0, 2, 32])


def recurrent(kind, gates, directions=1, optional=(), result=0, **attributes):
    """A recurrent layer of 3 units over two steps of 32 numbers; `optional` operands begin at sequence_lens."""

    def function(g, x):
        steps = halves(g, x) if attributes.get("layout") else g("Transpose", halves(g, x), perm=[1, 0, 2])
        operands = [weight(directions, gates * 3, 32), weight(directions, gates * 3, 3), weight(directions, gates * 6)]
        rest = [operand(g, x) if callable(operand) else operand for operand in optional]
        outputs = 3 if kind == "LSTM" else 2
        return g(kind, steps, *operands, *rest, outputs=outputs, hidden_size=3, **attributes)[result]

    return function


def initial(g, x):
    """(1, samples, 3), which depends on x."""
    return g("Unsqueeze", g("Slice", g("Flatten", x), [0], [3], [1]), [0])


BOTH = np.array([[[0, 2], [-1, 1]], [[1, 3], [0, -4]]])
LAST = np.array([[0], [-1], [2], [2]])

TOPICS: dict[str, tuple[int, dict[str, Function]]] = {
    "activations": (
        18,
        {
            "elu": of("Elu", scale=60.0, alpha=0.7),
            "celu": of("Celu", scale=60.0, alpha=1.3),
            "selu": of("Selu", scale=60.0),
            "softplus": of("Softplus", scale=60.0),
            "mish": of("Mish", scale=30.0),
            "hard_swish": of("HardSwish", scale=3.0),
            "hard_sigmoid": of("HardSigmoid", scale=3.0, alpha=0.3, beta=0.4),
            "shrink": of("Shrink", lambd=0.4, bias=0.1),
            "thresholded_relu": of("ThresholdedRelu", alpha=0.3),
            "leaky_relu": of("LeakyRelu", alpha=0.2),
            "prelu": lambda g, x: g("PRelu", x, weight(4, 1, 1)),
            "prelu_all": lambda g, x: g("PRelu", x, weight(1)),
            "softsign": of("Softsign"),
            "sigmoid": chained("Sigmoid", "Tanh", "Relu", "Abs", "Neg", "Identity"),
            "trigonometry": chained("Sin", "Cos", "Tan", "Atan", "Sinh", "Cosh", "Asinh", "Exp"),
            "steps": chained("Floor", "Ceil", "Round", "Sign"),
            "inverse": lambda g, x: chained("Asin", "Acos", "Atanh")(g, g("Mul", g("Tanh", x), 0.7)),
            "positive": lambda g, x: chained("Sqrt", "Log", "Reciprocal", "Acosh")(g, g("Add", g("Mul", x, x), 1.2)),
            "softmax": of("Softmax", axis=1),
            "log_softmax": of("LogSoftmax", axis=-1),
            "hardmax": lambda g, x: g("Mul", x, g("Hardmax", x, axis=2)),
            "clip": of("Clip", -0.4, 0.6),
            "clip_tensors": lambda g, x: g("Clip", x, g("ReduceMean", x, keepdims=0), g.constant(1.0)),
            "clip_low": of("Clip", -0.3),
            "pow": lambda g, x: g("Add", g("Pow", x, 3.0), g("Pow", g("Add", g("Abs", x), 0.5), -1.5)),
            "pow_integer": lambda g, x: g("Pow", x, np.array(2, "int64")),
            "pow_tensor": lambda g, x: g("Pow", g("Add", g("Abs", x), 0.5), x),
            "maximum": lambda g, x: g("Max", x, g("Transpose", x, perm=[0, 1, 3, 2]), g("Mul", x, x)),
            "minimum": two("Min"),
            "mean": lambda g, x: g("Mean", x, g("Sin", x), g("Cos", x)),
            "sum": lambda g, x: g("Sum", x, g("Sin", x), 0.3),
            "divide": lambda g, x: g("Div", x, g("Add", g("Mul", x, x), 1.0)),
            "subtract": lambda g, x: g("Sub", 1.5, x),
            "mod": of("Mod", 0.7, fmod=1),
            "where": lambda g, x: g("Where", g("Greater", x, 0.2), g("Mul", x, x), g("Neg", x)),
            "masks": lambda g, x: (
                g("Mul", x, g("Cast", g("And", g("Less", x, 0.5), g("Not", g("Equal", x, 0.0))), to=TensorProto.FLOAT))
                if g.dtype == "float32"
                else g("Mul", x, g("CastLike", g("Less", x, 0.5), x))
            ),
            "is_nan": lambda g, x: g("Where", g("Or", g("IsNaN", x), g("IsInf", x)), 0.0, g("Mul", x, x)),
        },
    ),
    "older": (
        11,
        {
            "sum_axes": lambda g, x: g("ReduceSum", g("Mul", x, x), axes=[1, 3], keepdims=0),
            "mean_axes": lambda g, x: g("ReduceMean", g("Mul", x, x), axes=[-1]),
            "squeeze_axes": lambda g, x: g("Squeeze", g("Unsqueeze", g("Mul", x, x), axes=[0, 2]), axes=[0]),
            "softmax_flat": of("Softmax", axis=1),
            "log_softmax_flat": of("LogSoftmax", axis=2),
            "split_sizes": lambda g, x: g("Mul", *g("Split", x, outputs=2, axis=1, split=[2, 2])),
            "clip": of("Clip", -0.4, 0.6),
            "pad": lambda g, x: g("Pad", x, [0, 0, 1, 0, 0, 0, 2, 1], 0.5, mode="constant"),
            "top": lambda g, x: g("TopK", x, [2], outputs=2, axis=2)[0],
            "gather_nd": lambda g, x: g("GatherND", x, BOTH),
            "resize_half_pixel": lambda g, x: (
                g(
                    "Resize",
                    x,
                    np.array([], "float32"),
                    g.constant(np.array([1, 1, 2, 2], "float32")),
                    mode="linear",
                    coordinate_transformation_mode="pytorch_half_pixel",
                )
                if g.dtype == "float32"
                else g("Resize", x, "", np.array([1, 1, 2, 2], "float32"), mode="linear")
            ),
            "l2_axes": lambda g, x: g("ReduceL2", x, axes=[1]),
            "depth_to_space": of("DepthToSpace", blocksize=2),
        },
    ),
    "reductions": (
        18,
        {
            "l1": reduced("ReduceL1"),
            "l2": reduced("ReduceL2", (1,), 0),
            "log_sum": reduced("ReduceLogSum"),
            "log_sum_exp": reduced("ReduceLogSumExp", (-1,)),
            "log_sum_exp_large": lambda g, x: g("ReduceLogSumExp", g("Mul", x, 60.0), [1]),
            "sum_square": reduced("ReduceSumSquare", (1, 2), 0),
            "max": reduced("ReduceMax"),
            "min": reduced("ReduceMin", (1,)),
            "prod": reduced("ReduceProd", (3,)),
            "prod_axes": reduced("ReduceProd", (2, 3), 0),
            "sum_all": lambda g, x: g("Mul", x, g("ReduceSum", x, keepdims=0)),
            "sum_none": lambda g, x: g("ReduceSum", g("Mul", x, x), noop_with_empty_axes=1),
            "mean": reduced("ReduceMean", (1, -1), 0),
            "cumsum": lambda g, x: g("CumSum", x, 2),
            "cumsum_exclusive": lambda g, x: g("CumSum", x, 1, exclusive=1),
            "cumsum_reverse": lambda g, x: g("CumSum", x, -1, reverse=1),
            "cumsum_both": lambda g, x: g("CumSum", x, 3, reverse=1, exclusive=1),
            "lp_normalization": of("LpNormalization", axis=1, p=2),
            "l1_normalization": of("LpNormalization", axis=-1, p=1),
            "argmax": lambda g, x: g("Mul", x, g("CastLike", g("ArgMax", x, axis=1), x)),
            "top_k": lambda g, x: g("TopK", x, [3], outputs=2, axis=1)[0],
            "top_k_smallest": lambda g, x: g("TopK", row(g, x), [5], outputs=2, axis=-1, largest=0)[0],
            "einsum": lambda g, x: g("Einsum", x, x, equation="nchw,nkhw->nck"),
            "einsum_implicit": lambda g, x: g("Einsum", row(g, x), weight(16, 3), equation="bij,jk"),
            "einsum_three": lambda g, x: g(
                "Einsum", row(g, x), weight(4, 3), row(g, x), equation="b c i, c k, b c j -> b k i j"
            ),
            "einsum_ellipsis": lambda g, x: g("Einsum", x, x, equation="...ij,...kj->...ik"),
            "einsum_diagonal": lambda g, x: g("Einsum", x, equation="nchh->nch"),
            "einsum_sum": lambda g, x: g("Einsum", x, x, equation="nchw,nchv->nh"),
            "variance": lambda g, x: g("ReduceMean", g("Pow", g("Sub", x, g("ReduceMean", x, [1])), 2.0), [1]),
        },
    ),
    "layers": (
        18,
        {
            "layer_norm": lambda g, x: g("LayerNormalization", x, weight(4), weight(4), axis=-1),
            "layer_norm_axes": lambda g, x: g("LayerNormalization", x, weight(4, 4), axis=2, epsilon=1e-3),
            "instance_norm": lambda g, x: g("InstanceNormalization", x, weight(4), weight(4)),
            "instance_norm_1d": lambda g, x: g("InstanceNormalization", row(g, x), weight(4), weight(4)),
            "instance_norm_3d": lambda g, x: g("InstanceNormalization", volume(g, x), weight(2), weight(2)),
            "mean_variance": of("MeanVarianceNormalization", axes=[0, 2, 3]),
            "lrn": of("LRN", size=3, alpha=0.1, beta=0.6, bias=1.2),
            "lrn_even": of("LRN", size=2, alpha=0.1),
            "depth_to_space": of("DepthToSpace", blocksize=2, mode="DCR"),
            "depth_to_space_crd": of("DepthToSpace", blocksize=2, mode="CRD"),
            "space_to_depth": of("SpaceToDepth", blocksize=2),
            "conv_same": conv("SAME_UPPER", (3, 2)),
            "conv_same_lower": conv("SAME_LOWER", (2, 4)),
            "conv_same_stride": conv("SAME_UPPER", (2, 3), 2),
            "conv_valid": conv("VALID", (3, 3)),
            "conv_uneven": lambda g, x: g("Conv", x, weight(3, 4, 2, 2), weight(3), pads=[1, 0, 0, 2]),
            "conv_1d": lambda g, x: g("Conv", row(g, x), weight(4, 2, 3), group=2, pads=[1, 2], dilations=[2]),
            "conv_3d": lambda g, x: g("Conv", volume(g, x), weight(3, 2, 2, 2, 3), pads=[1, 0, 1, 0, 0, 1]),
            "transposed_1d": transposed(1, strides=[2], output_padding=[1], pads=[1, 1]),
            "transposed_2d": transposed(2, bias=True, strides=[2, 3], pads=[1, 0, 1, 1], output_padding=[1, 2]),
            "transposed_groups": transposed(2, groups=2, dilations=[1, 2]),
            "transposed_3d": transposed(3, strides=[1, 2, 1], output_padding=[0, 1, 0]),
            "transposed_same": transposed(2, auto_pad="SAME_UPPER", strides=[2, 2]),
            "transposed_shape": transposed(2, strides=[2, 2], output_shape=[8, 7]),
            "gemm": lambda g, x: g("Gemm", g("Flatten", x), weight(5, 64), weight(5), transB=1, alpha=0.5, beta=2.0),
            "gemm_transposed": lambda g, x: g("Gemm", g("Flatten", x), weight(2, 3), transA=1),
            "matmul": lambda g, x: g("MatMul", x, g("Transpose", x, perm=[0, 1, 3, 2])),
            "matmul_vector": lambda g, x: g("MatMul", x, weight(4)),
        },
    ),
    "pools": (
        19,
        {
            "average": of("AveragePool", kernel_shape=[2, 3], strides=[2, 1]),
            "average_same": of("AveragePool", kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
            "average_same_lower": of("AveragePool", kernel_shape=[2, 3], auto_pad="SAME_LOWER"),
            "average_include": of("AveragePool", kernel_shape=[3, 3], pads=[1, 1, 1, 1], count_include_pad=1),
            "average_exclude": of("AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1, 0, 1, 1]),
            "average_ceil": of("AveragePool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
            "average_ceil_include": of(
                "AveragePool", kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4, ceil_mode=1, count_include_pad=1
            ),
            "average_dilated": of("AveragePool", kernel_shape=[2, 2], dilations=[2, 2]),
            "average_1d": of("AveragePool", shape=row, kernel_shape=[3], strides=[2], pads=[1, 1]),
            "average_3d": of("AveragePool", shape=volume, kernel_shape=[2, 2, 3]),
            "max": of("MaxPool", kernel_shape=[2, 3], strides=[2, 1], pads=[1, 0, 0, 1]),
            "max_same": of("MaxPool", kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_UPPER"),
            "max_same_lower": of("MaxPool", kernel_shape=[3, 2], strides=[2, 2], auto_pad="SAME_LOWER"),
            "max_ceil": of("MaxPool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
            "max_dilated": of("MaxPool", kernel_shape=[2, 2], dilations=[2, 1]),
            "max_1d": of("MaxPool", shape=row, kernel_shape=[3], strides=[2]),
            "max_3d": of("MaxPool", shape=volume, kernel_shape=[2, 2, 2], strides=[1, 2, 1]),
            "max_places": lambda g, x: g("MaxPool", x, outputs=2, kernel_shape=[2, 2], strides=[2, 2])[0],
            "unpool": lambda g, x: g(
                "MaxUnpool",
                *g("MaxPool", x, outputs=2, kernel_shape=[2, 2], strides=[2, 2]),
                kernel_shape=[2, 2],
                strides=[2, 2],
            ),
            "lp": of("LpPool", kernel_shape=[2, 2], strides=[2, 1], p=3),
            "lp_pads": of("LpPool", kernel_shape=[3, 2], pads=[1, 0, 1, 1], p=2),
            "global_lp": of("GlobalLpPool", p=3),
            "global_average": of("GlobalAveragePool"),
            "global_average_1d": of("GlobalAveragePool", shape=row),
            "global_max": of("GlobalMaxPool"),
            "global_max_3d": of("GlobalMaxPool", shape=volume),
            "columns": lambda g, x: g(
                "Col2Im", g("Reshape", x, [0, 8, 8]), [5, 3], [2, 2], dilations=[1, 1], pads=[0, 0, 0, 0]
            ),
            "columns_apart": lambda g, x: g("Col2Im", g("Reshape", x, [0, 16, 4]), [4, 4], [2, 2], strides=[2, 2]),
        },
    ),
    "resizing": (
        20,
        {
            "nearest": resize(
                2, (2, 3), mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
            ),
            "nearest_fraction": resize(
                2, (1.7, 1.3), mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
            ),
            "nearest_default": resize(2, None, (7, 3), mode="nearest"),
            "nearest_ceil": resize(2, None, (7, 3), mode="nearest", nearest_mode="ceil"),
            "nearest_prefer_ceil": resize(2, None, (6, 8), mode="nearest", nearest_mode="round_prefer_ceil"),
            "nearest_1d": resize(
                1, (2,), mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor"
            ),
            "nearest_3d": resize(3, (2, 1, 2), mode="nearest", nearest_mode="floor"),
            "linear": resize(2, (2, 2), mode="linear", coordinate_transformation_mode="pytorch_half_pixel"),
            "linear_fraction": resize(2, (1.7, 0.6), mode="linear"),
            "linear_aligned": resize(2, None, (7, 3), mode="linear", coordinate_transformation_mode="align_corners"),
            "linear_asymmetric": resize(2, (2, 2), mode="linear", coordinate_transformation_mode="asymmetric"),
            "linear_1d": resize(1, (1.5,), mode="linear", coordinate_transformation_mode="half_pixel"),
            "linear_3d": resize(3, (2, 1.5, 2), mode="linear", coordinate_transformation_mode="align_corners"),
            "linear_symmetric": resize(
                2, (1.7, 0.6), mode="linear", coordinate_transformation_mode="half_pixel_symmetric"
            ),
            "linear_antialias": resize(2, None, (3, 2), mode="linear", antialias=1),
            "cubic": resize(2, (2, 1.5), mode="cubic", cubic_coeff_a=-0.75),
            "cubic_aligned": resize(2, None, (7, 3), mode="cubic", coordinate_transformation_mode="align_corners"),
            "cubic_exclude": resize(2, None, (3, 7), mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5),
            "cubic_antialias": resize(2, None, (3, 7), mode="cubic", antialias=1),
            "axes": lambda g, x: g("Resize", x, "", "", [5, 3], axes=[3, 2], mode="linear"),
            "pad_reflect": lambda g, x: g("Pad", x, [0, 0, 1, 2, 0, 0, 2, 1], mode="reflect"),
            "pad_edge": lambda g, x: g("Pad", x, [1, 2, 2, 1], "", [2, 3], mode="edge"),
            "pad_wrap": lambda g, x: g("Pad", x, [1, 2, 2, 1], "", [2, 3], mode="wrap"),
            "pad_crop": lambda g, x: g("Pad", x, [0, 0, -1, 2, 0, 0, 1, -1], 0.5),
            "tile": lambda g, x: g("Tile", x, [1, 2, 1, 3]),
            "trilu": lambda g, x: g("Trilu", x, 1),
            "trilu_lower": lambda g, x: g("Trilu", x, -1, upper=0),
        },
    ),
    "indexing": (
        18,
        {
            "gather": lambda g, x: g("Gather", x, [2, -4, 2], axis=1),
            "gather_one": lambda g, x: g("Gather", x, np.array(-1), axis=2),
            "gather_table": lambda g, x: g("Gather", x, [[0, 3], [1, 1]], axis=3),
            "gather_elements": lambda g, x: g("GatherElements", row(g, x), np.array([[[0, -1, 2, 2]] * 4] * 2), axis=2),
            "gather_nd": lambda g, x: g("GatherND", x, BOTH),
            "gather_nd_last": lambda g, x: g("GatherND", g("Transpose", row(g, x), perm=[1, 0, 2]), LAST),
            "gather_nd_batch": lambda g, x: g("GatherND", x, BOTH, batch_dims=1),
            "gather_nd_whole": lambda g, x: g("GatherND", x, np.array([[0, 1, 2, 3], [1, -1, -2, 0]] * 2)),
            "scatter_nd": scatter_nd("none", False),
            "scatter_nd_add": scatter_nd("add", True),
            "scatter_nd_elements": lambda g, x: g(
                "ScatterND", x, np.array([[0, 1, 2, 3], [1, 1, 1, -1]]), g("ReduceMean", x, [1, 2, 3], keepdims=0)
            ),
            "scatter_elements": scatter_elements("none"),
            "scatter_elements_add": scatter_elements("add", True),
            "concat": lambda g, x: g("Concat", x, g("Sin", x), axis=-1),
            "concat_one": lambda g, x: g("Concat", x, axis=1),
            "split": lambda g, x: g("Mul", *g("Split", x, outputs=2, axis=1, num_outputs=2)),
            "split_sizes": lambda g, x: g("Split", x, [1, 3], outputs=2, axis=2)[1],
            "slice": lambda g, x: g("Slice", x, [1, 0], [4, 4], [2, 3], [1, 2]),
            "slice_negative": lambda g, x: g("Slice", x, [-1], [-5], [2], [-1]),
            "slice_end": lambda g, x: g("Slice", x, [-3], [2**62], [3]),
            "expand": lambda g, x: g("Expand", g("Slice", x, [0], [1], [1]), [1, 3, 1, 1]),
            "reshape": lambda g, x: g("Reshape", x, [0, -1, 2]),
            "squeeze": lambda g, x: g("Squeeze", g("Unsqueeze", x, [0, -1]), [0]),
            "transpose": lambda g, x: g("Transpose", x),
            "shape": lambda g, x: g("Mul", x, g("CastLike", g("Shape", x, start=1, end=2), x)),
            "size": lambda g, x: g("Mul", x, g("CastLike", g("Size", x), x)),
            "constant_of_shape": lambda g, x: g("Add", x, g("CastLike", g("ConstantOfShape", g("Shape", x)), x)),
            "range": lambda g, x: g("Mul", x, g("CastLike", g("Range", 0, 4, 1), x)),
            "one_hot": lambda g, x: g(
                "Mul", x, g("OneHot", [0, 2, 1, 3], 4, g.constant(np.array([0.5, 2.0])), axis=-1)
            ),
            "eye": lambda g, x: g("Mul", x, g("CastLike", g("EyeLike", g.constant(np.zeros((4, 4)))), x)),
            "compress": lambda g, x: g("Compress", x, np.array([True, False, True]), axis=2),
            "reverse_sequence": lambda g, x: g("ReverseSequence", row(g, x), [3, 5], batch_axis=0, time_axis=2),
        },
    ),
    "recurrent": (
        14,
        {
            "lstm_cell": recurrent("LSTM", 4, result=2),
            "lstm_reverse": recurrent("LSTM", 4, direction="reverse"),
            "lstm_both": recurrent("LSTM", 4, 2, direction="bidirectional"),
            "lstm_peepholes": recurrent(
                "LSTM", 4, optional=(np.array([2, 2], "int32"), initial, initial, weight(1, 9))
            ),
            "lstm_batch_first": recurrent("LSTM", 4, layout=1),
            "gru_started": recurrent("GRU", 3, optional=("", initial), result=1),
            "gru_both": recurrent("GRU", 3, 2, direction="bidirectional", linear_before_reset=1),
            "rnn_relu": recurrent("RNN", 1, optional=("", initial), activations=["Relu"]),
            "rnn_clip": recurrent("RNN", 1, clip=0.4),
        },
    ),
    "newer": (
        24,
        {
            "group_norm": lambda g, x: g("GroupNormalization", x, weight(4), weight(4), num_groups=2, epsilon=1e-3),
            "rms_norm": lambda g, x: g("RMSNormalization", x, weight(4), axis=-1),
            "gelu_tanh": of("Gelu", approximate="tanh"),
            "swish": of("Swish", alpha=1.5),
            "attention": lambda g, x: g("Attention", x, g("Sin", x), g("Cos", x)),
            "attention_causal": lambda g, x: g("Attention", x, x, x, is_causal=1, scale=0.7),
            "attention_heads": lambda g, x: g(
                "Attention", row(g, x), row(g, x), row(g, x), q_num_heads=2, kv_num_heads=2
            ),
            "reduce_max": reduced("ReduceMax"),
            "cast": lambda g, x: (
                g("Cast", g("Cast", x, to=TensorProto.DOUBLE), to=TensorProto.FLOAT)
                if g.dtype == "float32"
                else g("Mul", x, 1.0)
            ),
        },
    ),
}


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


REFERENCES: dict[str, Function] = {
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
    "transposed_groups": _grouped,
    "transposed_shape": transposed(2, strides=[2, 2], pads=[1, 1, 0, 0]),
    "global_lp": lambda g, x: g("Pow", g("ReduceSum", g("Pow", g("Abs", x), 3.0), [2, 3]), 1 / 3),
    "pad_crop": lambda g, x: g("Pad", g("Slice", x, [1, 0], [4, 3], [2, 3]), [0, 0, 0, 2, 0, 0, 1, 0], 0.5),
}
"""The same functions of other operators, where onnx's reference lacks one or is wrong."""


def model(functions, opset, dtype, parameters=True, batch=SHAPE[0]):
    """A model of functions of one tensor, each of x plus a parameter of its own; the results stand in a row."""
    g = Graph(dtype)
    results = []
    for name, function in functions.items():
        y = g("Add", "x", f"offsets.{name}") if parameters else g("Identity", "x")
        results.append(g("Reshape", function(g, y), [SHAPE[0], -1] if batch == SHAPE[0] else [0, -1]))
    g.nodes.append(helper.make_node("Concat", results, ["y"], axis=1))
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    zeros = np.zeros(SHAPE[1:], dtype)
    stored = [numpy_helper.from_array(zeros, f"offsets.{name}") for name in functions] if parameters else []
    inputs = [helper.make_tensor_value_info("x", kind, [batch, *SHAPE[1:]])]
    outputs = [helper.make_tensor_value_info("y", kind, [None, None])]
    graph = helper.make_graph(g.nodes, "operators", inputs, outputs, stored)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
