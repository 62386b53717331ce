# SPDX-License-Identifier: Apache-2.0
"""ONNX's Resize and Upsample as a linear map along each axis, in all modes, of 1 to 3 spatial axes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from tvm import relax

from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.frontends.resizing import Enlargement, Resize2d, resized

_RESIZE_2D = {"nearest": "nearest_neighbor", "linear": "linear"}
_COORDINATES = ("half_pixel", "align_corners", "asymmetric", "pytorch_half_pixel")


def resize(node: Node) -> relax.Expr | None:
    """Resize with constant scales or sizes; regions of interest are left to TVM's importer."""
    data, first = node.tensor(), 2 if node.opset > 10 else 1
    coordinates = node.text("coordinate_transformation_mode", "half_pixel" if node.opset > 10 else "asymmetric")
    if coordinates == "tf_crop_and_resize" or not node.is_constant(first, first + 1):
        return None
    stated = node.attributes.get("scales")  # of Upsample up to opset 8
    scales = node.value(first) if stated is None else np.array(stated, "float32")
    sizes = node.value(first + 1)
    if scales is not None and sizes is not None and scales.size and sizes.size:
        raise node.refusal("both its scales and its sizes are given; ONNX allows one of them")
    rank = data.ty.ndim
    axes = [axis % rank for axis in node.integers("axes", tuple(range(rank)))]
    given = scales if scales is not None and scales.size else sizes
    policy = node.text("keep_aspect_ratio_policy", "stretch")
    if given is None or len(given) != len(axes) or (given is sizes and policy != "stretch"):
        raise node.refusal(
            f"it has {0 if given is None else len(given)} scales or sizes for {len(axes)} axes, and the policy "
            f"{policy!r}; one number for each axis and 'stretch' are supported"
        )
    extents, maps = node.extents(), {}
    for axis, number in zip(axes, given.tolist(), strict=True):
        extent = extents[axis]
        if axis == 0 and given is sizes:  # the batch, which other sizes than that of the export may have
            continue
        if not isinstance(extent, int):
            if given is scales and number == 1:
                continue
            data = _enlarged(node, data, axis, float(number) if given is scales else None, coordinates)
            continue
        result = math.floor(extent * number) if given is scales else int(number)
        scale = float(number) if given is scales else result / extent
        maps[axis] = _matrix(node, extent, result, scale, coordinates)
    return resized(node.builder, data, maps, _candidate(node, coordinates))


def _enlarged(node: Node, data: relax.Expr, axis: int, factor: float | None, coordinates: str) -> relax.Expr:
    """The result along an axis of a free extent; the factor is None where the size is given."""
    if axis == 0:
        raise node.refusal(f"its scale of axis 0, the batch, is {factor}; samples are not resized")
    found = None
    if factor is not None and factor >= 1 and factor.is_integer():
        whole = int(factor)
        found = Enlargement.of(lambda extent: _matrix(node, extent, extent * whole, factor, coordinates), whole)
    if found is None:
        raise node.refusal(
            f"the extent of axis {axis} is {node.extents()[axis]}, and its scale {factor or 'that of a size'}; such "
            "an axis is resized by a whole factor only, without align_corners and exclude_outside"
        )
    return found.apply(node.builder, data, axis)


def _candidate(node: Node, coordinates: str) -> Resize2d | None:
    """The operator of Relax that may compute the same."""
    method = _RESIZE_2D.get(node.text("mode", "nearest"))
    if method is None or coordinates not in _COORDINATES:
        return None
    return Resize2d(method, coordinates, _nearest_mode(node, 1.0))


def _nearest_mode(node: Node, scale: float) -> str:
    """How a coordinate is rounded.

    Up to opset 10 the standard does not say; ONNX Runtime rounds down where it enlarges and up where it reduces, which
    is what PyTorch's exporter writes such nodes for.
    """
    if node.opset > 10:
        return node.text("nearest_mode", "round_prefer_floor")
    return "floor" if scale >= 1 else "ceil"


def _matrix(node: Node, extent: int, result: int, scale: float, coordinates: str) -> NDArray[np.float64]:
    """A with Y = A·X along one axis, of shape (result, extent)."""
    at = _places(node, extent, result, scale, coordinates)
    mode = node.text("mode", "nearest")
    if mode == "nearest":
        offsets, weights = np.zeros((result, 1), "int64"), np.ones((result, 1))
        base = _ROUNDINGS[_nearest_mode(node, scale)](at.astype("float32")).astype("int64")
    else:
        base = np.ceil(at).astype("int64") - 1
        kernel, reach = _linear, 1
        if mode == "cubic":
            factor = node.number("cubic_coeff_a", -0.75)
            kernel, reach = (lambda distance: _cubic(distance, factor)), 2
        shrink = min(scale, 1.0) if node.integer("antialias", 0) else 1.0
        begin = math.floor(-reach / shrink) + 1
        offsets = np.arange(begin, 2 - begin)[None, :] + np.zeros((result, 1), "int64")
        weights = kernel((offsets - (at - base)[:, None]) * shrink)
        if shrink < 1:
            weights /= weights.sum(1, keepdims=True)
    taps = base[:, None] + offsets
    if node.integer("exclude_outside", 0):
        weights = np.where((taps < 0) | (taps >= extent), 0, weights)
        weights /= weights.sum(1, keepdims=True)
    matrix = np.zeros((result, extent))
    np.add.at(matrix, (np.arange(result)[:, None], taps.clip(0, extent - 1)), weights)
    return matrix


def _places(node: Node, extent: int, result: int, scale: float, coordinates: str) -> NDArray[np.float64]:
    """The coordinate in the data of each place of the result."""
    place = np.arange(result, dtype="float64")
    half = (place + 0.5) / scale - 0.5
    if coordinates == "half_pixel":
        return half
    if coordinates == "pytorch_half_pixel":
        return half if result > 1 else np.zeros(1)
    if coordinates == "align_corners":
        return place * (extent - 1) / (result - 1) if result > 1 else np.zeros(1)
    if coordinates == "asymmetric":
        return place / scale
    if coordinates == "tf_half_pixel_for_nn":
        return (place + 0.5) / scale
    if coordinates == "half_pixel_symmetric":
        return extent / 2 * (1 - result / (extent * scale)) + half
    raise node.refusal(f"coordinate_transformation_mode {coordinates!r} is not known")


def _linear(distance: NDArray[np.float64]) -> NDArray[np.float64]:
    return (1 - np.abs(distance)).clip(0)


def _cubic(distance: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    """Keys' kernel (1981), equations (4) and (15)."""
    t = np.abs(distance)
    near, far = (a + 2) * t**3 - (a + 3) * t**2 + 1, a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a
    return np.where(t <= 1, near, np.where(t < 2, far, 0.0))


_ROUNDINGS: dict[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]] = {
    "round_prefer_floor": lambda at: np.ceil(at - np.float32(0.5)),
    "round_prefer_ceil": lambda at: np.floor(at + np.float32(0.5)),
    "floor": np.floor,
    "ceil": np.ceil,
}

CONVERTERS: dict[str, Converter] = {"Resize": resize, "Upsample": resize}
"""By operator of ONNX."""
