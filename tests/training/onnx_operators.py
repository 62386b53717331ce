# SPDX-License-Identifier: Apache-2.0
"""Single operators of ONNX as exporters write them: functions of one tensor, by topic; a topic has one opset."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, defs

from tests.training.onnx_graphs import (
    Function,
    chained,
    conv,
    initial,
    of,
    recurrent,
    reduced,
    resize,
    row,
    scatter_elements,
    scatter_nd,
    transposed,
    two,
    volume,
    weight,
)

BOTH = np.array([[[0, 2], [-1, 1]], [[1, 3], [0, -4]]])
LAST = np.array([[0], [-1], [2], [2]])


def _counts(g, x):
    """Integers from 0 to 4 that depend on x."""
    return g("Cast", g("Abs", g("Round", g("Mul", x, 1.5))), to=TensorProto.INT64)


TOPICS: dict[str, tuple[int, dict[str, Function]]] = {
    "activations": (
        18,
        {
            "elu": of("Elu", scale=60.0, alpha=0.7),
            "celu": of("Celu", scale=60.0, alpha=1.3),
            "selu": of("Selu", scale=60.0),
            "softplus": of("Softplus", scale=60.0),
            "softplus_near_zero": lambda g, x: g("Mul", g("Softplus", g("Sub", x, 18.0)), 1e7),
            "elu_near_zero": lambda g, x: g("Mul", g("Elu", g("Mul", x, 1e-6)), 1e6),
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
            "pow_of_integer": lambda g, x: g("Mul", x, g("CastLike", g("Pow", _counts(g, x), g.constant(0.5)), x)),
            "pow_of_integers": lambda g, x: g("Mul", x, g("CastLike", g("Pow", _counts(g, x), _counts(g, x)), x)),
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
            "mean_variance_9": of("MeanVarianceNormalization", axes=[2, 3]),
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
    "resizing_10": (
        10,
        {
            "nearest_10": lambda g, x: g("Resize", x, np.array([1, 1, 3, 4], "float32")),
            "nearest_fraction_10": lambda g, x: g("Resize", x, np.array([1, 1, 1.7, 2.4], "float32")),
            "nearest_reduced_10": lambda g, x: g("Resize", x, np.array([1, 1, 0.6, 0.75], "float32"), mode="nearest"),
            "linear_10": lambda g, x: g("Resize", x, np.array([1, 1, 0.6, 2], "float32"), mode="linear"),
        },
    ),
    "resizing_9": (9, {"upsample_9": lambda g, x: g("Upsample", x, np.array([1, 1, 4, 3], "float32"))}),
    "resizing_8": (8, {"upsample_8": lambda g, x: g("Upsample", x, mode="nearest", scales=[1.0, 1.0, 4.0, 3.0])}),
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
            "layer_norm_statistics": lambda g, x: g(
                "Concat",
                *[
                    g("Flatten", each)
                    for each in g("LayerNormalization", x, weight(4), weight(4), outputs=3, axis=-1, epsilon=0.1)
                ],
                axis=1,
            ),
            "layer_norm_of_axes_statistics": lambda g, x: g(
                "Mul", *g("LayerNormalization", x, weight(4, 4), outputs=3, axis=2, epsilon=0.1)[1:]
            ),
            "layer_norm_broadcast": lambda g, x: g("LayerNormalization", x, weight(4), weight(4, 1), outputs=3, axis=2)[
                0
            ],
            "instance_norm": lambda g, x: g("InstanceNormalization", x, weight(4), weight(4)),
            "instance_norm_1d": lambda g, x: g("InstanceNormalization", row(g, x), weight(4), weight(4)),
            "instance_norm_3d": lambda g, x: g("InstanceNormalization", volume(g, x), weight(2), weight(2)),
            "mean_variance": of("MeanVarianceNormalization", axes=[0, 2, 3]),
            "mean_variance_of_defaults": of("MeanVarianceNormalization"),
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
            "transposed_shape_more": transposed(2, strides=[3, 2], output_shape=[14, 9]),
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
            "lp_ceil": of("LpPool", kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1, p=3),
            "lp_ceil_pads": of("LpPool", kernel_shape=[2, 3], strides=[3, 2], pads=[1, 0, 0, 1], ceil_mode=1, p=1),
            "lp_dilated_ceil": of("LpPool", kernel_shape=[2, 2], strides=[3, 1], dilations=[1, 2], ceil_mode=1, p=2),
            "lp_1d": of("LpPool", shape=row, kernel_shape=[3], strides=[2], p=2),
            "lp_of_zeros": lambda g, x: g("LpPool", g("Relu", g("Sub", x, 1.0)), kernel_shape=[1, 1], p=3),
            "global_lp_of_zeros": lambda g, x: g("GlobalLpPool", g("Relu", g("Sub", x, 1.7)), p=2),
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
            "linear_aligned_to_one": resize(
                2, None, (1, 3), mode="linear", coordinate_transformation_mode="align_corners"
            ),
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
    "spectra": (
        17,
        {
            "mean_variance_before_18": of("MeanVarianceNormalization", axes=[1, 3]),
            "dft": lambda g, x: g("DFT", g("Reshape", x, [0, 8, 4, 2]), axis=2),
            "dft_default_axis": lambda g, x: g("DFT", g("Reshape", x, [0, 8, 4, 2])),
            "dft_of_real": lambda g, x: g("DFT", g("Unsqueeze", x, [4]), axis=3, onesided=1),
            "dft_whole_of_real": lambda g, x: g("DFT", g("Unsqueeze", x, [4]), axis=-3),
            "dft_padded": lambda g, x: g("DFT", g("Reshape", x, [0, 32, 2]), np.int64(37), axis=1),
            "dft_cut": lambda g, x: g("DFT", g("Reshape", x, [0, 4, 8, 2]), np.int64(5), axis=2),
            "inverse": lambda g, x: g("DFT", g("Reshape", x, [0, 8, 4, 2]), axis=1, inverse=1),
            "stft": lambda g, x: g(
                "STFT", g("Reshape", x, [0, 64, 1]), np.int64(5), np.hanning(14)[1:-1], np.int64(12)
            ),
            "stft_whole": lambda g, x: g("STFT", g("Reshape", x, [0, 64, 1]), np.int64(8), weight(9), onesided=0),
        },
    ),
    "spectra_newer": (
        20,
        {
            "dft": lambda g, x: g("DFT", g("Reshape", x, [0, 8, 4, 2])),
            "dft_of_real": lambda g, x: g("DFT", g("Unsqueeze", x, [4]), "", np.int64(1), onesided=1),
            "inverse": lambda g, x: g("DFT", g("Reshape", x, [0, 8, 4, 2]), np.int64(7), np.int64(-2), inverse=1),
        },
    ),
    "newer": (
        24,
        {
            "group_norm": lambda g, x: g("GroupNormalization", x, weight(4), weight(4), num_groups=2, epsilon=1e-3),
            "rms_norm": lambda g, x: g("RMSNormalization", x, weight(4), axis=-1),
            "rms_norm_of_all": lambda g, x: g("RMSNormalization", x, weight(4), axis=0, epsilon=0.1),
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
if defs.onnx_opset_version() >= 28:
    TOPICS["newest"] = (28, {"space_to_depth_crd": of("SpaceToDepth", blocksize=2, mode="CRD")})
