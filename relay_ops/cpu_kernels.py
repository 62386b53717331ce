# SPDX-License-Identifier: Apache-2.0
"""Generated CPU kernels as Relay's strategy: for the six operators, and for nn.conv{1,2,3}d and their transposes.

The kernel is what `tvm_convgrad.kernels.chooser` takes for the problem and the target, as in Relax. Its statement is
the body of a `te.extern`, so that Relay lowers, fuses and exports it as any other operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple

import tvm
from tvm import relay, te, topi
from tvm.auto_scheduler import is_auto_scheduler_enabled
from tvm.meta_schedule import is_meta_schedule_enabled

from relay_ops.ir import PREFIX, multiplied_problem_of, problem_of, transposed_problem_of
from tvm_convgrad.codegen import tir
from tvm_convgrad.codegen.hardware import Machine, machine_of
from tvm_convgrad.codegen.loops import INDEX
from tvm_convgrad.core.catalogue import BACKWARD_DATA, BY_NAME, FORWARD, Direction
from tvm_convgrad.core.errors import DTypeError, ProblemError, UnsupportedError
from tvm_convgrad.core.geometry import DTYPE_BYTES, SPATIAL
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.core.switches import KERNELS, VARIABLE, disabled
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.choice import Choice
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue

PRIORITY = 30
"""Of the kernels among Relay's implementations, above all of TVM's own; what AutoTVM has measured comes before."""

STOCK = tuple(f"{PREFIX}conv{rank}d" for rank in SPATIAL)
TRANSPOSED = tuple(f"{PREFIX}conv{rank}d_transpose" for rank in SPATIAL)

STOCK_RAISES = (RuntimeError, ValueError, AssertionError, LookupError, TypeError)
"""What TVM's strategies, and their computations, raise for layouts, groupings and strides that they lack. Relay calls
the computation of every implementation, also of those that it does not take."""

COPIED_AT_ONCE = 4096
"""Elements that one step of a parallel copy moves."""

_enabled: ContextVar[bool] = ContextVar("tvm_convgrad_relay_kernels", default=True)


@contextmanager
def without_kernels() -> Iterator[None]:
    """A context in which Relay compiles as if there were no generated kernels."""
    token = _enabled.set(False)
    try:
        yield
    finally:
        _enabled.reset(token)


class Taken(NamedTuple):
    """The kernel for a call.

    Attributes:
        direction: of `problem`, which the call computes.
        machine: of the call's target.
        choice: of the chooser; a kernel.
    """

    direction: Direction
    problem: ConvProblem
    machine: Machine
    choice: Choice


def taken(
    op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type], target: tvm.target.Target | None
) -> Taken | str:
    """The kernel for a call, or why there is none.

    Args:
        op: one of the six operators, or a stock convolution or transposed convolution.
        attrs: the call's attributes.
        types: of its operands and its result.
        target: what it is compiled for.
    """
    try:
        direction, problem = _problem_of(op, attrs, types)
    except (ProblemError, DTypeError, UnsupportedError) as error:
        return str(error)
    return kernel_for(direction, problem, target)


def kernel_for(direction: Direction, problem: ConvProblem, target: tvm.target.Target | None) -> Taken | str:
    """The kernel for a direction of a problem, or why there is none."""
    if not _enabled.get():
        return "without_kernels() turns kernels off"
    if disabled(KERNELS):
        return f"{VARIABLE}={KERNELS} turns generated kernels off"
    machine = machine_of(target)
    if machine is None:
        return "the target is not a CPU that kernels are made for"
    if is_auto_scheduler_enabled() or is_meta_schedule_enabled():
        return "a scheduler of TVM is asked for, and kernels cannot be scheduled"
    if "bfloat16" in {dtype for _, dtype in problem.tensors.values()}:
        return "the TVM versions that have Relay do not lower the kernels' bfloat16"
    choice = chooser.choose(problem, direction.name, machine)
    return Taken(direction, problem, machine, choice) if choice.is_kernel else choice.reason


def _problem_of(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> tuple[Direction, ConvProblem]:
    name = str(op.name)
    if name in TRANSPOSED:
        return BACKWARD_DATA, transposed_problem_of(op, attrs, types)
    direction = BY_NAME[name.removeprefix(PREFIX)].direction
    if direction is not FORWARD:
        return direction, problem_of(op, attrs, list(types)[:2])
    multiplied = multiplied_problem_of(op, attrs, types)
    if multiplied is None:
        return direction, problem_of(op, attrs, types)
    if multiplied.kernel_layout != str(attrs.kernel_layout):
        raise UnsupportedError(f"{name}: kernels take a channel multiplier only on the axis behind O")
    return direction, multiplied


def add_implementation(
    found: relay.op.OpStrategy,
    op: tvm.ir.Op,
    attrs: tvm.ir.Attrs,
    inputs: Sequence[te.Tensor],
    out_type: relay.Type,
    target: tvm.target.Target,
) -> str:
    """Add the kernel for a call to its implementations.

    Args:
        found: the strategy to add it to; the others are those of Relay's FTVMStrategy.

    Returns:
        Why there is none, or nothing.
    """
    types = [*(relay.TensorType(tensor.shape, tensor.dtype) for tensor in inputs), out_type]
    kernel = taken(op, attrs, types, target)
    if isinstance(kernel, str):
        return kernel
    implement(found, kernel, NO_EPILOGUE)
    return ""


def implement(found: relay.op.OpStrategy, kernel: Taken, epilogue: Epilogue) -> None:
    """Add a kernel with an epilogue, whose inputs are (first, second[, bias][, what is added to])."""

    def compute(attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], out_type: relay.Type) -> list[te.Tensor]:
        return [as_tensor(kernel, list(inputs), out_type, epilogue)]

    name = f"conv{kernel.problem.rank}d_{kernel.direction.name}.{kernel.choice.name.replace(' ', '_')}"
    found.add_implementation(compute, schedule, name=name, plevel=PRIORITY)


def as_tensor(kernel: Taken, inputs: list[te.Tensor], out_type: relay.Type, epilogue: Epilogue) -> te.Tensor:
    """The result of a kernel as a te.extern over its operands."""
    function = chooser.build(kernel.problem, kernel.direction.name, kernel.machine, kernel.choice, "", epilogue)
    before = inputs.pop() if epilogue.accumulate else None
    parameters = [function.buffer_map[variable] for variable in function.params]
    operands = [_declared(tensor.op.name, tensor.shape, tensor.dtype) for tensor in inputs]
    result = _declared("result", out_type.shape, out_type.dtype)
    body = _placed(function.body, parameters, [*operands, result])
    if before is not None:
        operands.append(_declared("before", before.shape, before.dtype))
        inputs.append(before)
        body = tir.sequence([_copy(operands[-1], result, kernel.machine), body])
    return te.extern(
        [out_type.shape],
        inputs,
        lambda ins, outs: body,
        name=f"conv{kernel.problem.rank}d_{kernel.direction.name}",
        tag="tvm_convgrad",
        in_buffers=operands,
        out_buffers=[result],
        dtype=out_type.dtype,
    )


def _declared(name: str, shape: Sequence[tir.Expr], dtype: str) -> tir.Buffer:
    return tvm.tir.decl_buffer(shape, dtype, name, data_alignment=DTYPE_BYTES[str(dtype)])


def _placed(statement: tir.Stmt, parameters: Sequence[tir.Buffer], buffers: Sequence[tir.Buffer]) -> tir.Stmt:
    """A kernel's statement with accesses of `buffers` in place of those of flat aliases of its parameters.

    The pass that flattens what comes from te (StorageFlatten) knows no aliases. So element i of the alias becomes
    element (0, …, 0, i) of the tensor, which is at the same address.
    """
    by_data = {old.data: new for old, new in zip(parameters, buffers, strict=True)}
    zero = tir.IntImm(INDEX, 0)

    def replaced(node: tir.Stmt | tir.Expr) -> tir.Stmt | tir.Expr | None:
        buffer = by_data.get(node.buffer.data)
        if isinstance(node, tvm.tir.DeclBuffer):
            return node.body if buffer is not None else None
        if buffer is None:
            return None
        place = [*([zero] * (len(buffer.shape) - 1)), node.indices[0]]
        if isinstance(node, tir.BufferStore):
            return tir.BufferStore(buffer, node.value, place)
        return tvm.tir.BufferLoad(buffer, place)

    nodes = ["tir.BufferLoad", "tir.BufferStore", "tir.DeclBuffer"]
    return tvm.tir.stmt_functor.ir_transform(statement, None, replaced, nodes)


def _copy(source: tir.Buffer, target: tir.Buffer, machine: Machine) -> tir.Stmt:
    """Copy a tensor, on all cores if it is large."""
    total = math.prod(int(extent) for extent in target.shape)
    lanes = machine.lanes(str(target.dtype))
    zero = [tir.IntImm(INDEX, 0)] * (len(target.shape) - 1)

    def moved(first: tir.Expr, width: int) -> tir.Stmt:
        place = [*zero, first if width == 1 else tir.Ramp(first, tir.IntImm(INDEX, 1), width)]
        return tir.BufferStore(target, tvm.tir.BufferLoad(source, place), place)

    def loop(start: int | tir.Expr, count: int, width: int) -> tir.Stmt:
        step = tir.Var("step", INDEX)
        return tir.For(step, 0, count, tir.ForKind.SERIAL, moved(start + step * width, width))

    at_once = COPIED_AT_ONCE // lanes * lanes
    block = tir.Var("block", INDEX)
    whole, rest = total // at_once, total % at_once
    vectors, single = rest // lanes, rest % lanes
    parts = []
    if whole:
        inner = loop(block * at_once, at_once // lanes, lanes)
        parts.append(tir.For(block, 0, whole, tir.ForKind.PARALLEL, inner))
    if vectors:
        parts.append(loop(whole * at_once, vectors, lanes))
    if single:
        parts.append(loop(total - single, single, 1))
    return tir.sequence(parts)


def schedule(attrs: tvm.ir.Attrs, outs: Sequence[te.Tensor], target: tvm.target.Target) -> te.Schedule:
    """The kernel as it is; what Relay fused behind it is one loop nest, parallel and vectorized."""
    found = te.create_schedule([out.op for out in outs])
    te.schedule.AutoInlineInjective(found)
    for out in outs:
        if isinstance(out.op, te.ComputeOp):
            topi.x86.injective.schedule_injective_from_existing(found, out)
    return found


def strategies() -> dict[str, tvm.target.GenericFunc]:
    """FTVMStrategy of the stock convolutions: TVM's own implementations, and above them the kernel where one is."""
    return {name: _with_kernel(tvm.ir.Op.get(name)) for name in (*STOCK, *TRANSPOSED)}


def _with_kernel(op: tvm.ir.Op) -> tvm.target.GenericFunc:
    stock = op.get_attr("FTVMStrategy")

    @tvm.target.override_native_generic_func(f"tvm_convgrad.{op.name}_strategy")
    def strategy(
        attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], out_type: relay.Type, target: tvm.target.Target
    ) -> relay.op.OpStrategy:
        own = relay.op.OpStrategy()
        refused = add_implementation(own, op, attrs, inputs, out_type, target)
        if refused:
            return stock(attrs, inputs, out_type, target)
        try:
            found = stock(attrs, inputs, out_type, target)
            for specialized in found.specializations:
                for implementation in specialized.implementations:
                    implementation.compute(attrs, inputs, out_type)
        except STOCK_RAISES:
            return own
        add_implementation(found, op, attrs, inputs, out_type, target)
        return found

    return strategy


def legalizations() -> dict[str, Callable[..., relay.Expr | None]]:
    """FTVMLegalize of the transposed convolutions: TVM's own, which changes their layout, where no kernel is."""
    return {name: _unless_kernel(tvm.ir.Op.get(name)) for name in TRANSPOSED}


def _unless_kernel(op: tvm.ir.Op) -> Callable[..., relay.Expr | None]:
    stock = op.get_attr("FTVMLegalize")

    def legalize(attrs: tvm.ir.Attrs, inputs: Sequence[relay.Expr], types: Sequence[relay.Type]) -> relay.Expr | None:
        if stock is None or left_to_strategy(op, attrs, types):
            return None
        return stock(attrs, inputs, types)

    return legalize


def left_to_strategy(op: tvm.ir.Op, attrs: tvm.ir.Attrs, types: Sequence[relay.Type]) -> bool:
    """Whether a kernel is taken for a call on the target in scope, so that legalization must leave it."""
    return not isinstance(taken(op, attrs, types, tvm.target.Target.current(allow_none=True)), str)


__all__ = [
    "Taken",
    "add_implementation",
    "implement",
    "kernel_for",
    "left_to_strategy",
    "legalizations",
    "strategies",
    "taken",
    "without_kernels",
]
