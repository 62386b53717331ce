# SPDX-License-Identifier: Apache-2.0
"""The attribute types of Relay's operators: field names, kinds and defaults.

JSON writes every field as a string that is either the value itself or the number of a node, depending on the C++
type of the field; texts omit fields with their default value, so this table is needed to read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from tvm_convgrad.core.geometry import SPATIAL

Kind = Literal["int", "bool", "float", "str", "dtype", "node", "int?"]
"""What a field holds. "node": the number of a node (an integer, a list, None); "str" is written out up to some version
and as a node since, "int?" likewise; the rest is always written out."""


class _Required:
    def __repr__(self) -> str:
        return "required"


REQUIRED: Final = _Required()


@dataclass(frozen=True)
class Spec:
    """One field: its kind and its default, REQUIRED if it has none."""

    kind: Kind
    default: Any = REQUIRED


Schema = Mapping[str, Spec]


def _i(default: Any = REQUIRED) -> Spec:
    return Spec("int", default)


def _b(default: Any = REQUIRED) -> Spec:
    return Spec("bool", default)


def _f(default: Any = REQUIRED) -> Spec:
    return Spec("float", default)


def _s(default: Any = REQUIRED) -> Spec:
    return Spec("str", default)


def _n(default: Any = REQUIRED) -> Spec:
    return Spec("node", default)


_T = Spec("dtype", "")
_M = Spec("int?", REQUIRED)


def _convolution(rank: int, letters: str) -> Schema:
    one, zero = (1,) * rank, (0,) * rank
    return {
        "strides": _n(one),
        "padding": _n(zero if rank > 1 else (0, 0)),
        "dilation": _n(one),
        "groups": _i(1),
        "channels": _n(None),
        "kernel_size": _n(None),
        "data_layout": _s("NC" + letters),
        "kernel_layout": _s("OI" + letters),
        "out_layout": _s(""),
        "out_dtype": _T,
    }


def _transposed(rank: int, letters: str) -> Schema:
    zero = (0,) * rank
    return {
        **_convolution(rank, letters),
        "padding": _n(zero),
        "kernel_layout": _s("IO" + letters),
        "output_padding": _n(zero),
    }


def _pool(rank: int, letters: str, *, average: bool = False) -> Schema:
    schema = {
        "pool_size": _n(),
        "strides": _n((1,) * rank),
        "dilation": _n((1,) * rank),
        "padding": _n((0,) * rank),
        "layout": _s("NC" + letters),
        "out_layout": _s(""),
        "ceil_mode": _b(False),
    }
    return schema | {"count_include_pad": _b(False)} if average else schema


def _adaptive(letters: str) -> Schema:
    return {"output_size": _n(()), "layout": _s("NC" + letters), "out_layout": _s("")}


def _resize(layout: str) -> Schema:
    return {
        "size": _n(None),
        "roi": _n(None),
        "layout": _s(layout),
        "method": _s("linear"),
        "coordinate_transformation_mode": _s("half_pixel"),
        "rounding_method": _s("round"),
        "cubic_alpha": _f(-0.5),
        "cubic_exclude": _i(0),
        "extrapolation_value": _f(0.0),
        "out_dtype": _T,
    }


_REDUCE: Schema = {"axis": _n(None), "keepdims": _b(False), "exclude": _b(False)}
_CENTER: Schema = {"center": _b(True), "scale": _b(True)}

SCHEMAS: Final[dict[str, Schema]] = {
    **{f"Conv{rank}DAttrs": _convolution(rank, letters) for rank, letters in SPATIAL.items()},
    **{f"Conv{rank}DTransposeAttrs": _transposed(rank, letters) for rank, letters in SPATIAL.items()},
    **{f"MaxPool{rank}DAttrs": _pool(rank, letters) for rank, letters in SPATIAL.items()},
    **{f"AvgPool{rank}DAttrs": _pool(rank, letters, average=True) for rank, letters in SPATIAL.items()},
    **{f"AdaptivePool{rank}DAttrs": _adaptive(letters) for rank, letters in SPATIAL.items()},
    "GlobalPool2DAttrs": {"layout": _s("NCHW"), "out_layout": _s("")},
    "ArangeAttrs": {"start": _n(None), "stop": _n(None), "step": _n(None), "dtype": _T},
    "ArgReduceAttrs": {**_REDUCE, "select_last_index": _b(False)},
    "ArgsortAttrs": {"axis": _i(-1), "is_ascend": _b(True), "dtype": _T},
    "BatchMatmulAttrs": {"out_dtype": _T, "transpose_a": _b(False), "transpose_b": _b(False)},
    "BatchNormAttrs": {"axis": _i(1), "epsilon": _f(1e-5), **_CENTER},
    "BiasAddAttrs": {"axis": _i(1)},
    "CastAttrs": {"dtype": _T},
    "ClipAttrs": {"a_min": _f(), "a_max": _f()},
    "CompilerAttrs": {"compiler": _s("")},
    "ConcatenateAttrs": {"axis": _i(0)},
    "DenseAttrs": {"units": _n(None), "out_dtype": _T},
    "DilateAttrs": {"strides": _n((1, 1)), "dilation_value": _f(0.0)},
    "DropoutAttrs": {"rate": _f(0.5)},
    "ExpandDimsAttrs": {"axis": _i(), "num_newaxis": _i(1)},
    "EinsumAttrs": {"equation": _s()},
    "GatherAttrs": {"axis": _M},
    "GatherNDAttrs": {"batch_dims": Spec("int?", 0), "index_rank": _n(None)},
    "GroupNormAttrs": {"num_groups": _i(0), "axis": _i(1), "epsilon": _f(1e-5), **_CENTER},
    "InitOpAttrs": {"shape": _n(None), "dtype": _T},
    "InstanceNormAttrs": {"axis": _i(1), "epsilon": _f(1e-5), **_CENTER},
    "L2NormalizeAttrs": {"eps": _f(), "axis": _n(None)},
    "LRNAttrs": {"size": _i(5), "axis": _i(1), "bias": _f(2.0), "alpha": _f(1e-4), "beta": _f(0.75)},
    "LayerNormAttrs": {"axis": _i(-1), "epsilon": _f(1e-5), **_CENTER},
    "LayoutTransformAttrs": {"src_layout": _s(), "dst_layout": _s()},
    "LeakyReluAttrs": {"alpha": _f(0.25)},
    "MatmulAttrs": {"units": _n(None), "out_dtype": _T, "transpose_a": _b(False), "transpose_b": _b(False)},
    "MirrorPadAttrs": {"mode": _s("SYMMETRIC"), "pad_width": _n()},
    "NLLLossAttrs": {"reduction": _s("mean"), "ignore_index": _i(-100)},
    "NdarraySizeAttrs": {"dtype": _T},
    "OnDeviceAttrs": {"virtual_device": _n(None), "constrain_result": _b(False), "constrain_body": _b(True)},
    "OneHotAttrs": {"depth": _i(1), "axis": _i(-1), "dtype": _T},
    "PReluAttrs": {"axis": _i(1)},
    "PadAttrs": {"pad_width": _n(), "pad_mode": _s("constant"), "pad_value": _f(0.0)},
    "ReduceAttrs": _REDUCE,
    "RepeatAttrs": {"repeats": _M, "axis": _n(None)},
    "ReshapeAttrs": {"newshape": _n(), "allowzero": _b(False), "reverse": _b(False)},
    "ReshapeLikeAttrs": {"lhs_begin": _i(0), "lhs_end": _n(None), "rhs_begin": _i(0), "rhs_end": _n(None)},
    **{f"Resize{rank}DAttrs": _resize("NC" + letters) for rank, letters in ((2, "HW"), (3, "DHW"))},
    "ReverseAttrs": {"axis": _n(0)},
    "ScanopAttrs": {"axis": _n(None), "dtype": _T, "exclusive": Spec("node", False)},
    "ScatterNDAttrs": {"mode": _s("update")},
    "ScatterElementsAttrs": {"axis": Spec("int?", 0), "reduction": _s("update")},
    "ShapeOfAttrs": {"dtype": _T},
    "SliceLikeAttrs": {"axes": _n(None)},
    "SpaceToBatchNDAttrs": {"block_shape": _n((1, 1)), "paddings": _n(), "pad_value": _f(0.0)},
    "BatchToSpaceNDAttrs": {"block_shape": _n((1, 1)), "crops": _n()},
    "DeviceCopyAttrs": {"src_virtual_device": _n(None), "dst_virtual_device": _n(None)},
    "SoftmaxAttrs": {"axis": _i(-1)},
    "SplitAttrs": {"indices_or_sections": _n(), "axis": _i(0)},
    "SqueezeAttrs": {"axis": _n(None)},
    "StackAttrs": {"axis": Spec("int?", 0)},
    "StridedSliceAttrs": {
        "begin": _n(),
        "end": _n(),
        "strides": _n(None),
        "slice_mode": _s("end"),
        "axes": _n(None),
    },
    "SubPixelAttrs": {"block_size": _i(1), "layout": _s("NCHW"), "mode": _s("DCR")},
    "TakeAttrs": {"batch_dims": Spec("int?", 0), "axis": _n(None), "mode": _s("clip")},
    "TileAttrs": {"reps": _n()},
    "TopkAttrs": {"k": _n(1), "axis": _i(-1), "ret_type": _s("both"), "is_ascend": _b(False), "dtype": _T},
    "TransposeAttrs": {"axes": _n(None)},
    "TriluAttrs": {"upper": _b(True)},
    "UpSampling3DAttrs": {
        "scale_d": _f(),
        "scale_h": _f(),
        "scale_w": _f(),
        "layout": _s("NCDHW"),
        "method": _s("nearest_neighbor"),
        "coordinate_transformation_mode": _s("half_pixel"),
    },
    "UpSamplingAttrs": {
        "scale_h": _f(),
        "scale_w": _f(),
        "layout": _s("NCHW"),
        "method": _s("nearest_neighbor"),
        "align_corners": _b(False),
    },
    "VarianceAttrs": {**_REDUCE, "unbiased": _b(False)},
}
"""By name, without the prefix `relay.attrs.`."""

PREFIX: Final = "relay.attrs."
