# SPDX-License-Identifier: Apache-2.0
"""How the six operators become code in Relay: the legalization to stock operators, and a strategy for what is left.

The strategy takes a generated kernel on CPUs (`cpu_kernels`). Where there is none, legalization (Relay runs it from
opt_level 1) takes the compositions of `legalize`, which are right for every grouping and layout; where it has not run
the strategy computes the formula itself, on any target.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relay, te

from legalize.forms import WEIGHT_FORMS, compose_backward_data, compose_backward_weight
from relay_ops import cpu_kernels
from relay_ops.builder import RelayBuilder, Tensor
from relay_ops.ir import PREFIX, problem_of, with_batch
from relay_ops.symbolic import ShapeFunction
from tvm_convgrad.core.catalogue import BACKWARD_DATA, NEW_OPS, Direction, OpEntry
from tvm_convgrad.core.geometry import SPATIAL, Size, transposed_extent
from tvm_convgrad.core.problem import ConvProblem

DATA_FORM = "dilated"
"""The composition taken for dgrad: Relay's transposed convolutions have no dilation."""


def composed(
    direction: Direction, problem: ConvProblem, first: relay.Expr, second: relay.Expr, form: str = ""
) -> relay.Expr:
    """A composition of stock operators that computes wgrad or dgrad, as a Relay expression.

    Args:
        direction: BACKWARD_WEIGHT or BACKWARD_DATA.
        problem: static.
        first, second: its operands, Relay expressions in the problem's layouts.
        form: a key of legalize.forms; empty is the one that legalization takes.

    Raises:
        UnsupportedError: the form is unknown, or Relay cannot express it.
    """
    shapes = problem.tensors
    operands: list[Tensor] = []
    for name, expr in zip(direction.operands, (first, second), strict=True):
        shape, dtype = shapes[name]
        operands.append(Tensor(expr, tuple(int(e) for e in shape), dtype))
    builder, (a, b) = RelayBuilder(), operands
    if direction is BACKWARD_DATA:
        return compose_backward_data(builder, problem, a, b, problem.data_shape, form or DATA_FORM).expr
    return compose_backward_weight(builder, problem, a, b, form or next(iter(WEIGHT_FORMS))).expr


def legalizations() -> dict[str, Callable[..., relay.Expr | None]]:
    """FTVMLegalize by operator."""
    return {PREFIX + entry.name: _legalization(entry) for entry in NEW_OPS}


def strategies() -> dict[str, tvm.target.GenericFunc]:
    """FTVMStrategy by operator, each a generic function of its own, which a target may override.

    What TVM's own strategy of nn.conv2d_backward_weight has for a target (cuDNN) stays, at its priority.
    """
    return {PREFIX + entry.name: _strategy(entry) for entry in NEW_OPS}


def _legalization(entry: OpEntry) -> Callable[..., relay.Expr | None]:
    op = tvm.ir.Op.get(PREFIX + entry.name)

    def legalize(attrs: tvm.ir.Attrs, inputs: Sequence[relay.Expr], types: Sequence[relay.Type]) -> relay.Expr | None:
        if any(isinstance(extent, tvm.tir.Any) for kind in types[:2] for extent in kind.shape):
            return None  # a batch that is Any is the strategy's: compositions have it in their attributes
        if cpu_kernels.left_to_strategy(op, attrs, types):
            return None
        return composed(entry.direction, problem_of(op, attrs, list(types)[:2]), inputs[0], inputs[1])

    return legalize


def _strategy(entry: OpEntry) -> tvm.target.GenericFunc:
    op = tvm.ir.Op.get(PREFIX + entry.name)
    stock = op.get_attr("FTVMStrategy")  # TVM's own: this runs before ours is registered

    @tvm.target.override_native_generic_func(f"tvm_convgrad.{entry.name}_strategy")
    def strategy(
        attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], out_type: relay.Type, target: tvm.target.Target
    ) -> relay.op.OpStrategy:
        def problem(inputs: Sequence[te.Tensor]) -> ConvProblem:
            types = [relay.TensorType(tensor.shape, tensor.dtype) for tensor in inputs]
            return problem_of(op, attrs, with_batch(op, attrs, types))

        def compute(attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], out_type: relay.Type) -> list[te.Tensor]:
            found = problem(inputs)
            first = found.grad_layout if entry.direction.operands[0] == "grad" else found.data_layout
            return [formula(entry.direction, found, inputs[0], inputs[1], batch=inputs[0].shape[first.index("N")])]

        found = None
        if stock is not None and stock_refuses(problem(inputs)) is None:
            found = _implementations(stock, attrs, inputs, out_type, target)
        found = found or relay.op.OpStrategy()
        found.add_implementation(compute, _schedule, name=f"{entry.name}.formula")
        cpu_kernels.add_implementation(found, op, attrs, inputs, out_type, target)
        return found

    return strategy


def stock_refuses(problem: ConvProblem) -> str | None:
    """Why TVM's strategy of nn.conv2d_backward_weight is not asked: its cuDNN call would raise or be wrong.

    Args:
        problem: static, of two dimensions.
    """
    layouts = (problem.grad_layout, problem.data_layout, problem.kernel_layout)
    if layouts not in (("NCHW", "NCHW", "OIHW"), ("NHWC", "NHWC", "OHWI")):
        return f"the layouts of grad, data and weight are {', '.join(layouts)}; it takes NCHW with OIHW, NHWC with OHWI"
    if any(low != high for low, high in problem.padding):
        return f"padding is {problem.padding}; it takes the same on both sides of an axis"
    if len({problem.grad_dtype, problem.data_dtype, problem.kernel_dtype}) != 1:
        return f"the types are {problem.grad_dtype}, {problem.data_dtype} and {problem.kernel_dtype}; it takes one"
    if problem.groups != 1 and not problem.groups == problem.in_channels == problem.out_channels:
        return f"groups is {problem.groups}; it takes 1 or depthwise convolutions without a multiplier"
    return None


def _implementations(
    stock: tvm.target.GenericFunc,
    attrs: tvm.ir.Attrs,
    inputs: Sequence[te.Tensor],
    out_type: relay.Type,
    target: tvm.target.Target,
) -> relay.op.OpStrategy | None:
    """What TVM's own strategy has for a target; None where it raises that it has nothing."""
    try:
        return stock(attrs, inputs, out_type, target)
    except RuntimeError as error:
        if "only supported with cudnn" not in str(error):
            raise
        return None


def shape_functions() -> dict[str, ShapeFunction]:
    """FShapeFunc by operator: of dgrad, whose result has the batch of dY. That of wgrad is known."""
    return {PREFIX + entry.name: _data_shape for entry in NEW_OPS if entry.direction is BACKWARD_DATA}


def _data_shape(attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], outputs: Sequence[te.Tensor]) -> list[te.Tensor]:
    """The shape of dX from those of dY and W: see core.geometry.transposed_extent."""
    grad_layout, kernel_layout = str(attrs.data_layout), str(attrs.kernel_layout)
    rank = len(grad_layout) - 2
    padding = [int(pad) for pad in attrs.padding]
    padding = padding * 2 if len(padding) == rank else padding

    def extent(letter: str) -> tvm.tir.PrimExpr:
        grad, weight = inputs
        if letter == "N":
            return grad[grad_layout.index("N")]
        if letter == "C":
            return weight[kernel_layout.index("I")] * int(attrs.groups)
        i = SPATIAL[rank].index(letter)
        return transposed_extent(
            grad[grad_layout.index(letter)],
            weight[kernel_layout.index(letter)],
            int(attrs.strides[i]),
            int(attrs.dilation[i]),
            padding[i],
            padding[rank + i],
            int(attrs.output_padding[i]),
        )

    def at(place: tvm.tir.Var) -> tvm.tir.PrimExpr:
        found = tvm.tir.const(0, "int64")
        for i, letter in enumerate(str(attrs.out_layout) or grad_layout):
            found = tvm.tir.Select(place == i, extent(letter), found)
        return found

    return [te.compute((rank + 2,), at, name="shape")]


def formula(
    direction: Direction,
    problem: ConvProblem,
    first: te.Tensor,
    second: te.Tensor,
    batch: tvm.tir.PrimExpr | None = None,
) -> te.Tensor:
    """wgrad or dgrad as one te.compute over all elements of the result, in the problem's layouts.

    Args:
        direction: BACKWARD_WEIGHT or BACKWARD_DATA.
        problem: static.
        first, second: te tensors of its operands.
        batch: the operands' batch, where it is not the problem's.
    """
    batch = problem.batch if batch is None else batch
    summed = problem.accumulator
    spatial = SPATIAL[problem.rank]
    out_per_group = problem.out_channels // problem.groups
    in_per_group = problem.in_channels // problem.groups
    kernel = dict(zip(spatial, problem.kernel, strict=True))
    step = dict(zip(spatial, problem.strides, strict=True))
    spread = dict(zip(spatial, problem.dilation, strict=True))
    low = dict(zip(spatial, (pair[0] for pair in problem.padding), strict=True))
    x_extent = dict(zip(spatial, problem.data_extents, strict=True))
    y_extent = dict(zip(spatial, problem.grad_extents, strict=True))
    layouts = {"data": problem.data_layout, "weight": problem.kernel_layout, "grad": problem.grad_layout}
    tensors = dict(zip(direction.operands, (first, second), strict=True))

    def at(name: str, **indices: Size) -> tvm.tir.PrimExpr:
        return tensors[name](*(indices[letter] for letter in layouts[name])).astype(summed)

    def weight_element(*place: Size) -> tvm.tir.PrimExpr:
        w = dict(zip(problem.kernel_layout, place, strict=True))
        n = te.reduce_axis((0, batch), "n")
        y = {a: te.reduce_axis((0, y_extent[a]), f"y_{a.lower()}") for a in spatial}
        x = {a: y[a] * step[a] + w[a] * spread[a] - low[a] for a in spatial}
        inside = [c for a in spatial for c in (x[a] >= 0, x[a] < x_extent[a])]
        channel = tvm.tir.floordiv(w["O"], out_per_group) * in_per_group + w["I"]
        product = at("grad", N=n, C=w["O"], **y) * at("data", N=n, C=channel, **x)
        zero = tvm.tir.const(0, summed)
        return te.sum(tvm.tir.if_then_else(tvm.tir.all(*inside), product, zero), axis=[n, *y.values()])

    def data_element(*place: Size) -> tvm.tir.PrimExpr:
        x = dict(zip(problem.data_layout, place, strict=True))
        o = te.reduce_axis((0, out_per_group), "o")
        k = {a: te.reduce_axis((0, kernel[a]), f"k_{a.lower()}") for a in spatial}
        reach = {a: x[a] + low[a] - k[a] * spread[a] for a in spatial}
        y = {a: tvm.tir.floordiv(reach[a], step[a]) for a in spatial}
        inside = [c for a in spatial for c in (reach[a] >= 0, y[a] < y_extent[a], y[a] * step[a] == reach[a])]
        channel = tvm.tir.floordiv(x["C"], in_per_group) * out_per_group + o
        product = at("grad", N=x["N"], C=channel, **y) * at(
            "weight", O=channel, I=tvm.tir.floormod(x["C"], in_per_group), **k
        )
        zero = tvm.tir.const(0, summed)
        return te.sum(tvm.tir.if_then_else(tvm.tir.all(*inside), product, zero), axis=[o, *k.values()])

    shape, dtype = problem.tensors[direction.result]
    if direction is BACKWARD_DATA:
        shape = tuple(batch if letter == "N" else e for letter, e in zip(problem.data_layout, shape, strict=True))
    name = f"conv{problem.rank}d_{direction.name}"
    total = te.compute(shape, data_element if direction is BACKWARD_DATA else weight_element, name=name)
    return total if dtype == summed else te.compute(shape, lambda *i: total(*i).astype(dtype), name=f"{name}_cast")


def _schedule(attrs: tvm.ir.Attrs, outs: Sequence[te.Tensor], target: tvm.target.Target) -> te.Schedule:
    """One loop nest a stage; on a GPU each element of the result is a thread's, on a CPU the outer axis is parallel."""
    schedule = te.create_schedule([out.op for out in outs])
    for stage in schedule.stages:
        if not isinstance(stage.op, te.ComputeOp):
            continue
        if "gpu" in target.keys:
            fused = stage.fuse(*stage.op.axis)
            block, thread = stage.split(fused, factor=64)
            stage.bind(block, te.thread_axis("blockIdx.x"))
            stage.bind(thread, te.thread_axis("threadIdx.x"))
        elif "cpu" in target.keys:
            stage.parallel(stage.op.axis[0])
    return schedule
