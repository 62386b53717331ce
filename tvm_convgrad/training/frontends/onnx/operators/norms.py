# SPDX-License-Identifier: Apache-2.0
"""Norms in ONNX: LpPool, GlobalLpPool, LayerNormalization with its statistics, and RMSNormalization of all axes.

TVM's importer scales averages for LpPool, which is wrong for windows that ceil_mode cuts, and has zeros for the
statistics.
"""

from __future__ import annotations

import math

from tvm import relax
from tvm.relax import op

from relax_ops.expressions import known_extents
from relax_ops.gradients.common import cast
from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.training.frontends.onnx.node import Converter, Node
from tvm_convgrad.training.ir.graph import Extent, element_type

_AVERAGE_POOLS = {1: op.nn.avg_pool1d, 2: op.nn.avg_pool2d, 3: op.nn.avg_pool3d}


def global_lp_pool(node: Node) -> relax.Expr:
    """The p-norm over all spatial axes."""
    data = node.tensor()
    return _root(node, node.emit(op.sum(_powers(node), list(range(2, data.ty.ndim)), keepdims=True)))


def lp_pool(node: Node) -> relax.Expr:
    """The p-norm of each window: zeros are put around the data such that every window is whole."""
    kernel = node.integers("kernel_shape", ())
    rank = len(kernel)
    if rank not in _AVERAGE_POOLS or node.text("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise node.refusal("1 to 3 spatial axes with fixed extents are supported")
    strides, dilations = node.integers("strides", (1,) * rank), node.integers("dilations", (1,) * rank)
    pads = list(node.integers("pads", (0,) * (2 * rank)))
    if node.integer("ceil_mode", 0):
        for axis, extent in enumerate(node.extents()[2:]):
            if not isinstance(extent, int):
                raise node.refusal(f"the extent of axis {axis + 2} is {extent}; ceil_mode needs a fixed one")
            whole = extent + pads[axis] + pads[rank + axis]
            covered = dilations[axis] * (kernel[axis] - 1) + 1
            steps = -((covered - whole) // strides[axis])
            pads[rank + axis] += max(steps * strides[axis] + covered - whole, 0)
    powers = _powers(node)
    if any(pads):
        widths = [0, 0, 0, 0, *(pads[place] for axis in range(rank) for place in (axis, rank + axis))]
        powers = node.emit(op.nn.pad(powers, widths, pad_value=0.0))
    average = node.emit(_AVERAGE_POOLS[rank](powers, kernel, strides, (0,) * (2 * rank), dilations))
    return _root(node, node.emit(op.multiply(average, node.scalar(math.prod(kernel)))))


def _powers(node: Node) -> relax.Var:
    """|x|**p of all elements."""
    data, p = node.tensor(), node.number("p", 2.0)
    if p == 2:
        return node.emit(op.multiply(data, data))
    sizes = node.emit(op.abs(data))
    return sizes if p == 1 else node.emit(op.power(sizes, node.scalar(p)))


def _root(node: Node, total: relax.Var) -> relax.Expr:
    """total**(1/p), with gradient 0 where the total is 0."""
    p = node.number("p", 2.0)
    if p == 1:
        return total
    zero = node.emit(op.equal(total, node.scalar(0)))
    inside = node.emit(op.where(zero, op.ones_like(total), total))
    root = node.emit(op.sqrt(inside) if p == 2 else op.power(inside, node.scalar(1 / p)))
    return op.where(zero, op.zeros_like(total), root)


def layer_norm(node: Node) -> relax.Expr | None:
    """LayerNormalization with its results Mean and InvStdDev, which are float32 at least."""
    if node.results == 1:
        return None
    data, epsilon = node.tensor(), node.number("epsilon", 1e-5)
    rank = data.ty.ndim
    axes = list(range(node.integer("axis", -1) % rank, rank))
    scale = _expanded(node, node.tensor(1), node.extents()[axes[0] :])
    bias = _expanded(node, node.tensor(2), node.extents()[axes[0] :]) if node.given(2) else op.zeros_like(scale)
    result = node.emit(op.nn.layer_norm(data, scale, bias, axes, epsilon))
    x = cast(data, wide_dtype(element_type(data)), node.builder)
    mean = node.emit(op.mean(x, axes, keepdims=True))
    centred = node.emit(op.subtract(x, mean))
    variance = node.emit(op.mean(node.emit(op.multiply(centred, centred)), axes, keepdims=True))
    inverse = op.rsqrt(node.emit(op.add(variance, relax.const(epsilon, element_type(x)))))
    return relax.Tuple([result, mean, inverse][: node.results])


def rms_norm(node: Node) -> relax.Expr | None:
    """RMSNormalization over all axes, which TVM's rms_norm cannot compute; others are left to TVM's importer."""
    data = node.tensor()
    if node.integer("axis", -1) % data.ty.ndim:
        return None
    x = cast(data, wide_dtype(element_type(data)), node.builder)
    square = node.emit(op.mean(node.emit(op.multiply(x, x)), keepdims=True))
    inverse = op.rsqrt(node.emit(op.add(square, relax.const(node.number("epsilon", 1e-5), element_type(x)))))
    normal = cast(node.emit(op.multiply(x, node.emit(inverse))), element_type(data), node.builder)
    return op.multiply(normal, node.tensor(1))


def _expanded(node: Node, tensor: relax.Expr, extents: tuple[Extent, ...]) -> relax.Expr:
    """A tensor broadcast to these extents, itself if it has them."""
    if known_extents(tensor) == extents:
        return tensor
    return node.emit(op.broadcast_to(tensor, relax.ShapeExpr(list(extents))))


CONVERTERS: dict[str, Converter] = {
    "GlobalLpPool": global_lp_pool,
    "LayerNormalization": layer_norm,
    "LpPool": lp_pool,
    "RMSNormalization": rms_norm,
}
"""By operator of ONNX."""
