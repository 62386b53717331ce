# SPDX-License-Identifier: Apache-2.0
"""Pooling, its gradients, and changes of resolution."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.core.geometry import SPATIAL
from tvm_convgrad.importer.attributes import integers
from tvm_convgrad.importer.context import Context
from tvm_convgrad.importer.ops_conv import flat_pads, layout_of, per_axis
from tvm_convgrad.importer.table import Converter, op

_POOLS = {(kind, rank): getattr(relax.op.nn, f"{kind}_pool{rank}d") for kind in ("max", "avg") for rank in (1, 2, 3)}
_GRADS = {"max": relax.op.grad.max_pool2d_backward, "avg": relax.op.grad.avg_pool2d_backward}


def _window(context: Context, data: relax.Expr, attrs: SimpleNamespace, rank: int) -> dict[str, Any]:
    """The arguments that Relax's pools share, checked."""
    letters = "NC" + SPATIAL[rank]
    layout = layout_of("layout", attrs.layout, letters, letters)
    if layout_of("out_layout", attrs.out_layout, letters, layout) != layout:
        raise ModelError(f"out_layout {attrs.out_layout} differs from layout {layout}")
    shape = context.shape(data)
    if len(shape) != rank + 2:
        raise ModelError(f"the data has {len(shape)} axes, which {layout} does not fit")
    window = {
        "pool_size": per_axis("pool_size", attrs.pool_size, rank),
        "strides": per_axis("strides", attrs.strides, rank),
        "dilation": per_axis("dilation", attrs.dilation, rank),
        "padding": flat_pads(attrs.padding, rank),
        "layout": layout,
        "ceil_mode": attrs.ceil_mode,
        "count_include_pad": getattr(attrs, "count_include_pad", False),
    }
    for place, letter in enumerate(SPATIAL[rank]):
        extent = shape[layout.index(letter)]
        low, high = window["padding"][place], window["padding"][rank + place]
        spread = window["dilation"][place] * (window["pool_size"][place] - 1) + 1
        if max(low, high) >= spread:
            raise ModelError(f"padding {low}, {high} along {letter} is not smaller than the window, {spread}")
        if isinstance(extent, int) and extent + low + high < spread:
            raise ModelError(f"the window spans {spread} along {letter}, more than the padded data")
    return window


def _pool(kind: str, rank: int) -> Converter:
    def convert(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
        return context.emit(_POOLS[kind, rank](args[0], **_window(context, args[0], attrs, rank)))

    return convert


for _rank in (1, 2, 3):
    op(f"nn.max_pool{_rank}d", attributes=f"MaxPool{_rank}DAttrs")(_pool("max", _rank))
    op(f"nn.avg_pool{_rank}d", attributes=f"AvgPool{_rank}DAttrs")(_pool("avg", _rank))


@op("nn.max_pool2d_grad", attributes="MaxPool2DAttrs", operands=2)
@op("nn.avg_pool2d_grad", attributes="AvgPool2DAttrs", operands=2)
def _pool_grad(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    kind = "max" if "max" in attrs.op_name else "avg"
    window = _window(context, args[1], attrs, 2)
    given = context.shape(args[0])
    if len(given) != 4:
        raise ModelError(f"the gradient has {len(given)} axes")
    _check_grad(context, given, context.shape(args[1]), window)
    return context.emit(_GRADS[kind](args[0], args[1], **window))


def _check_grad(context: Context, grad: relax.Expr, data: relax.Expr, window: dict[str, Any]) -> None:
    """The gradient must have the extents of the pool's result."""
    layout = window["layout"]
    for index, letter in enumerate(layout):
        have, extent = grad[index], data[index]
        if not isinstance(have, int) or not isinstance(extent, int):
            continue
        if letter in "HW":
            place = "HW".index(letter)
            pads = window["padding"][place] + window["padding"][2 + place]
            spread = window["dilation"][place] * (window["pool_size"][place] - 1) + 1
            room = extent + pads - spread
            steps = -(-room // window["strides"][place]) if window["ceil_mode"] else room // window["strides"][place]
            extent = steps + 1
        if have != extent:
            raise ModelError(f"the gradient has the extent {have} along {letter}, the pool's result {extent}")


def _spatial_axes(context: Context, value: relax.Expr, layout: str, rank: int) -> list[int]:
    if context.rank(value) != rank + 2:
        raise ModelError(f"the data has {context.rank(value)} axes, which {layout} does not fit")
    return [layout.index(letter) for letter in SPATIAL[rank]]


@op("nn.global_avg_pool2d", "nn.global_max_pool2d", attributes="GlobalPool2DAttrs")
def _global_pool(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    layout = layout_of("layout", attrs.layout, "NCHW", "NCHW")
    axes = _spatial_axes(context, args[0], layout, 2)
    reduce = relax.op.mean if "avg" in attrs.op_name else relax.op.max
    return context.emit(reduce(args[0], axes, keepdims=True))


def _adaptive(kind: str, rank: int) -> Converter:
    letters = "NC" + SPATIAL[rank]

    def convert(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
        value = args[0]
        layout = layout_of("layout", attrs.layout, letters, letters)
        axes = _spatial_axes(context, value, layout, rank)
        shape = context.shape(value)
        if attrs.output_size in ((), None):
            return value
        sizes = per_axis("output_size", attrs.output_size, rank)
        if all(size == 1 for size in sizes):
            return context.emit((relax.op.mean if kind == "avg" else relax.op.max)(value, axes, keepdims=True))
        extents = [shape[axis] for axis in axes]
        if all(isinstance(e, int) and e % size == 0 for e, size in zip(extents, sizes, strict=True)):
            steps = tuple(extent // size for extent, size in zip(extents, sizes, strict=True))
            return context.emit(
                _POOLS[kind, rank](value, pool_size=steps, strides=steps, padding=(0,) * (2 * rank), layout=layout)
            )
        if kind == "max":
            raise ModelError(f"extents {list(map(str, extents))} are not multiples of {list(sizes)}")
        return context.emit(getattr(relax.op.nn, f"adaptive_avg_pool{rank}d")(value, sizes, layout))

    return convert


for _rank in (1, 2, 3):
    op(f"nn.adaptive_avg_pool{_rank}d", attributes=f"AdaptivePool{_rank}DAttrs")(_adaptive("avg", _rank))
    op(
        f"nn.adaptive_max_pool{_rank}d",
        attributes=f"AdaptivePool{_rank}DAttrs",
        note="input extents must be multiples of the result's",
    )(_adaptive("max", _rank))

_METHODS = {"nearest_neighbor": "nearest_neighbor", "nearest": "nearest_neighbor"}
_METHODS |= {"linear": "linear", "bilinear": "linear", "trilinear": "linear", "cubic": "cubic", "bicubic": "cubic"}
_COORDINATES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel", "half_pixel_symmetric")
_ROUNDING = ("", "round", "floor", "ceil", "round_prefer_floor", "round_prefer_ceil")


def _method(name: str) -> str:
    if name not in _METHODS:
        raise ModelError(f"the method {name!r} is unknown; {', '.join(_METHODS)} are known")
    return _METHODS[name]


@op("image.resize2d", attributes="Resize2DAttrs", note="without regions of interest")
@op("image.resize3d", attributes="Resize3DAttrs", note="without regions of interest")
def _resize(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = 2 if attrs.op_name.endswith("2d") else 3
    letters = "NC" + SPATIAL[rank]
    layout = layout_of("layout", attrs.layout, letters, letters)
    _spatial_axes(context, args[0], layout, rank)
    if attrs.coordinate_transformation_mode not in _COORDINATES:
        raise ModelError(f"the coordinate_transformation_mode {attrs.coordinate_transformation_mode!r} is not imported")
    if attrs.rounding_method not in _ROUNDING:
        raise ModelError(f"the rounding_method {attrs.rounding_method!r} is unknown")
    resize = relax.op.image.resize2d if rank == 2 else relax.op.image.resize3d
    return context.emit(
        resize(
            args[0],
            tuple(integers("size", attrs.size, lowest=1, count=(rank,))),
            layout=layout,
            method=_method(attrs.method),
            coordinate_transformation_mode=attrs.coordinate_transformation_mode,
            rounding_method=attrs.rounding_method,
            cubic_alpha=attrs.cubic_alpha,
            cubic_exclude=attrs.cubic_exclude,
            extrapolation_value=attrs.extrapolation_value,
            out_dtype=attrs.out_dtype or None,
        )
    )


@op("nn.upsampling", attributes="UpSamplingAttrs")
@op("nn.upsampling3d", attributes="UpSampling3DAttrs")
def _upsampling(context: Context, args: list[relax.Expr], attrs: SimpleNamespace) -> relax.Expr:
    rank = 3 if attrs.op_name.endswith("3d") else 2
    letters = "NC" + SPATIAL[rank]
    layout = layout_of("layout", attrs.layout, letters, letters)
    axes = _spatial_axes(context, args[0], layout, rank)
    shape = context.static(args[0], "upsampling")
    scales = [getattr(attrs, f"scale_{letter.lower()}") for letter in SPATIAL[rank]]
    if not all(math.isfinite(scale) and 0 < scale < 1e6 for scale in scales):
        raise ModelError(f"the scales are {scales}")
    size = tuple(round(shape[axis] * scale) for axis, scale in zip(axes, scales, strict=True))
    if min(size) < 1:
        raise ModelError(f"the result would have the extents {size}")
    mode = getattr(attrs, "coordinate_transformation_mode", "")
    if not mode:
        mode = "align_corners" if attrs.align_corners else "asymmetric"
    if mode not in _COORDINATES:
        raise ModelError(f"the coordinate_transformation_mode {mode!r} is not imported")
    resize = relax.op.image.resize2d if rank == 2 else relax.op.image.resize3d
    return context.emit(
        resize(
            args[0],
            size,
            layout=layout,
            method=_method(attrs.method),
            coordinate_transformation_mode=mode,
            rounding_method="",
            cubic_alpha=-0.5,
        )
    )
