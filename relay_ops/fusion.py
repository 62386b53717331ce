# SPDX-License-Identifier: Apache-2.0
"""Convolutions with what follows them as one CPU kernel: a pass to run before `relay.build`, with a target in scope.

    conv(x, w) [+ acc] [+ bias] [-> relu]          forward and transposed convolutions, and dgrad
    acc + wgrad(dy, x)

An intermediate that anything else reads is left alone. The result is a call of FUSED, an operator that only this pass
makes. Relay's own fusion puts bias and relu into the same function, but behind the convolution, so that they read and
write its whole result once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import tvm
from tvm import relay, te

from relay_ops import cpu_kernels
from relay_ops.cpu_kernels import STOCK, TRANSPOSED, Taken
from relay_ops.ir import PREFIX, call_of, types_of
from tvm_convgrad.core.catalogue import BACKWARD_DATA, DIRECTIONS, NEW_OPS, Direction
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels import chooser
from tvm_convgrad.kernels.epilogue import NO_EPILOGUE, Epilogue

FUSED = "tvm_convgrad.fused_convolution"
"""The operator; its one argument is the tuple (first operand, second operand[, bias][, acc])."""

CONVOLUTIONS = frozenset((*STOCK, *TRANSPOSED, *(PREFIX + entry.name for entry in NEW_OPS)))

OPAQUE = ("Compiler", "Composite", "Primitive")
"""Attributes of functions that belong to somebody else."""


class Chain(NamedTuple):
    """A convolution and what one kernel does with it.

    Attributes:
        kernel: of the convolution.
        call: the convolution.
        epilogue: what follows it.
        bias, before: expressions of its operands, if it has them.
    """

    kernel: Taken
    call: relay.Call
    epilogue: Epilogue = NO_EPILOGUE
    bias: relay.Expr | None = None
    before: relay.Expr | None = None


def FuseEpilogues() -> tvm.transform.Pass:
    """The pass that fuses bias, relu and sums into the convolutions that kernels are taken for on the target in scope.

    Raises:
        SetupError: no target is in scope when it runs.
    """

    @tvm.transform.module_pass(opt_level=0, name="ConvgradFuseEpilogues")
    def fuse(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        target = tvm.target.Target.current(allow_none=True)
        if target is None:
            raise SetupError("FuseEpilogues: no target is in scope, and kernels are made for one; use `with target:`")
        typed = relay.transform.InferType()(module)
        for variable, function in list(typed.functions.items()):
            if isinstance(function, relay.Function) and not _is_opaque(function):
                typed.update_func(variable, _Fuser(function, target).visit(function))
        return relay.transform.InferType()(typed)

    return fuse


class _Fuser(relay.ExprMutator):
    """Replaces the last call of each chain of a typed function."""

    def __init__(self, function: relay.Function, target: tvm.target.Target) -> None:
        super().__init__()
        self._target = target
        self._readers: dict[relay.Expr, int] = {}
        self._is_outer = True
        relay.analysis.post_order_visit(function, self._count)

    def _count(self, node: relay.Expr) -> None:
        for child in _children(node):
            self._readers[child] = self._readers.get(child, 0) + 1

    def visit_function(self, fn: relay.Function) -> relay.Function:
        """Functions of other compilers are left as they are."""
        return fn if _is_opaque(fn) else super().visit_function(fn)

    def visit_call(self, call: relay.Call) -> relay.Expr:
        """The fused call of a chain that ends here; any other call with its arguments visited."""
        chain = self._chain(call)
        if chain is None or chain.epilogue == NO_EPILOGUE:
            return super().visit_call(call)
        values = [*chain.call.args, chain.bias, chain.before]
        operands = [self.visit(value) for value in values if value is not None]
        return _fused_call(chain, operands)

    def _chain(self, expr: relay.Expr) -> Chain | None:
        """The longest chain that ends at an expression."""
        if not isinstance(expr, relay.Call) or not isinstance(expr.op, tvm.ir.Op):
            return None
        name = str(expr.op.name)
        if name in CONVOLUTIONS:
            kernel = cpu_kernels.taken(expr.op, expr.attrs, types_of(expr), self._target)
            return None if isinstance(kernel, str) else Chain(kernel, expr)
        if name == "nn.relu":
            return self._extended(expr.args[0], lambda chain: _with(chain, relu=True))
        if name == "nn.bias_add":
            return self._extended(
                expr.args[0], lambda chain: _with_bias(chain, expr.args[1], int(expr.attrs.axis), expr)
            )
        if name == "add":
            first, second = expr.args
            for value, other in ((first, second), (second, first)):
                found = self._extended(value, partial(_with_sum, other=other, result=expr))
                if found is not None:
                    return found
        return None

    def _extended(self, value: relay.Expr, extend: Callable[[Chain], Chain | None]) -> Chain | None:
        if self._readers.get(value) != 1:
            return None
        chain = self._chain(value)
        longer = None if chain is None or chain.epilogue.relu else extend(chain)
        if longer is None:
            return None
        kernel = longer.kernel
        return None if chooser.epilogue_refusal(kernel.choice, kernel.direction.name, longer.epilogue) else longer


def _with(chain: Chain, **fields: bool) -> Chain:
    return chain._replace(epilogue=replace(chain.epilogue, **fields))


def _with_bias(chain: Chain, bias: relay.Expr, axis: int, result: relay.Expr) -> Chain | None:
    """The chain with a vector added along an axis, if that is the channels'."""
    rank = len(result.checked_type.shape)
    if chain.epilogue.bias or axis % rank != _channel_axis(chain.kernel):
        return None
    return _with(chain, bias=True)._replace(bias=bias)


def _with_sum(chain: Chain, other: relay.Expr, result: relay.Expr) -> Chain | None:
    """The chain with a tensor added: one of the result's type, or a bias that is broadcast."""
    if not isinstance(other.checked_type, relay.TensorType) or result.checked_type != chain.call.checked_type:
        return None
    if other.checked_type == result.checked_type:
        if chain.epilogue.accumulate:
            return None
        return _with(chain, accumulate=True)._replace(before=other)
    shape, full = other.checked_type.concrete_shape, result.checked_type.concrete_shape
    axis = _channel_axis(chain.kernel)
    aligned = (1,) * (len(full) - len(shape)) + shape
    wanted = tuple(extent if i == axis else 1 for i, extent in enumerate(full))
    return _with_bias(chain, relay.reshape(other, (full[axis],)), axis, result) if aligned == wanted else None


def _channel_axis(kernel: Taken) -> int:
    """The axis of channels of forward's and dgrad's result; -1 of a weight's gradient, which has no bias."""
    layouts = {"data": kernel.problem.data_layout, "grad": kernel.problem.grad_layout}
    return layouts.get(kernel.direction.result, "").find("C")


def _children(node: relay.Expr) -> Iterator[relay.Expr]:
    """What an expression reads."""
    for name in ("args", "fields"):
        yield from getattr(node, name, None) or () if isinstance(node, (relay.Call, relay.Tuple)) else ()
    for name in ("tuple_value", "body", "value", "cond", "true_branch", "false_branch", "ref", "data"):
        child = None if isinstance(node, (relay.Constant, relay.Call)) else getattr(node, name, None)
        if isinstance(child, relay.Expr):
            yield child


def _is_opaque(function: relay.Function) -> bool:
    return function.attrs is not None and any(name in function.attrs for name in OPAQUE)


def _fused_call(chain: Chain, operands: list[relay.Expr]) -> relay.Call:
    kernel = chain.kernel
    described = {
        "direction": kernel.direction.name,
        "problem": kernel.problem.descriptor,
        **{name: int(value) for name, value in asdict(chain.epilogue).items()},
    }
    attrs = tvm.ir.make_node("DictAttrs", **described)
    return relay.Call(tvm.ir.Op.get(FUSED), [relay.Tuple(operands)], attrs)


def _described(attrs: tvm.ir.Attrs) -> tuple[Direction, ConvProblem, Epilogue]:
    """What the attributes of a fused call say."""
    fields = {name: bool(attrs[name]) for name in asdict(NO_EPILOGUE)}
    return DIRECTIONS[str(attrs["direction"])], ConvProblem.from_descriptor(str(attrs["problem"])), Epilogue(**fields)


def register_fused() -> None:
    """Declare the operator, its type, strategy and legalization."""
    relay.op.op.register(FUSED, "A convolution with bias, relu and sum, computed by one CPU kernel.")
    op = tvm.ir.Op.get(FUSED)
    op.set_num_inputs(1)
    op.add_argument("operands", "Tuple of Tensors", "First operand, second operand, bias, what is added to.")
    op.set_support_level(2)
    op.set_attrs_type_key("DictAttrs")
    relay.op.op.register_stateful(FUSED, False)
    op.add_type_rel("tvm_convgrad.fused_convolution", _relation)
    relay.op.op.register_pattern(FUSED, relay.op.op.OpPattern.OUT_ELEMWISE_FUSABLE)
    relay.op.op.register_strategy(FUSED, _strategy())
    relay.op.op.register_legalize(FUSED, _legalize)


def _relation(types: Sequence[relay.Type], attrs: tvm.ir.Attrs) -> relay.TensorType | None:
    if not isinstance(types[0], relay.TupleType):
        return None
    direction, problem, _ = _described(attrs)
    return relay.TensorType(*problem.tensors[direction.result])


def _strategy() -> tvm.target.GenericFunc:
    @tvm.target.override_native_generic_func("tvm_convgrad.fused_convolution_strategy")
    def strategy(
        attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], out_type: relay.Type, target: tvm.target.Target
    ) -> relay.op.OpStrategy:
        direction, problem, epilogue = _described(attrs)
        kernel = cpu_kernels.kernel_for(direction, problem, target)
        if isinstance(kernel, str):
            raise UnsupportedError(f"{FUSED} on {target}: {kernel}; run FuseEpilogues with the target of the build")
        found = relay.op.OpStrategy()
        cpu_kernels.implement(found, kernel, epilogue)
        return found

    return strategy


def _legalize(attrs: tvm.ir.Attrs, inputs: Sequence[relay.Expr], types: Sequence[relay.Type]) -> relay.Expr | None:
    """The operators that it was fused from, on a target without the kernel."""
    direction, problem, epilogue = _described(attrs)
    if not isinstance(cpu_kernels.kernel_for(direction, problem, tvm.target.Target.current(allow_none=True)), str):
        return None
    first, second, *others = (relay.TupleGetItem(inputs[0], i) for i in range(len(types[0].fields)))
    if direction.operands[1] == "weight":
        second = relay.reshape(second, problem.weight_shape)  # of a channel multiplier
    value: relay.Expr = call_of(direction, problem, first, second)
    if epilogue.accumulate:
        value = relay.add(others.pop(), value)
    if epilogue.bias:
        layout = problem.data_layout if direction is BACKWARD_DATA else problem.grad_layout
        value = relay.nn.bias_add(value, others.pop(), layout.index("C"))
    return relay.nn.relu(value) if epilogue.relu else value


__all__ = ["FUSED", "FuseEpilogues", "register_fused"]
