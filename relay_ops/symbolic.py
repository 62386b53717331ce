# SPDX-License-Identifier: Apache-2.0
"""Gradients of programs whose batch is Any, so that Relay's virtual machine runs them.

All Any of a program stand for the same number.

Relay's gradient rules write zeros_like, ones_like, collapse_sum_like and broadcast_to_like, of which its VM runs none
with an extent Any: they have no shape function, or their code reads no element of the tensor whose shape they take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tvm
from tvm import relay, te

from tvm_convgrad.core.errors import ModelError, UnsupportedError


def has_any(function: relay.Function) -> bool:
    """Whether parameters have an extent Any: one each at most, and the same in all, such as the batch.

    Raises:
        UnsupportedError: a parameter has several.
    """
    counts = {
        param.name_hint: sum(isinstance(extent, tvm.tir.Any) for extent in param.checked_type.shape)
        for param in function.params
        if isinstance(param.checked_type, relay.TensorType)
    }
    for name, count in counts.items():
        if count > 1:
            raise UnsupportedError(
                f"gradients with Any: parameter {name} has more than one extent Any; one, the batch, may be: give the "
                "others numbers"
            )
    return any(counts.values())


def bind_batch(function: relay.Function, batch: int) -> relay.Function:
    """The function with `batch` in the place of every Any in the types of its parameters.

    Raises:
        ModelError: `batch` is not positive.
    """
    if batch < 1:
        raise ModelError(f"bind_batch: batch={batch} must be at least 1")
    params = []
    for param in function.params:
        kind = param.type_annotation
        if isinstance(kind, relay.TensorType):
            shape = [batch if isinstance(extent, tvm.tir.Any) else extent for extent in kind.shape]
            kind = relay.TensorType(shape, kind.dtype)
        params.append(relay.Var(param.name_hint, kind))
    body = relay.bind(function.body, dict(zip(function.params, params, strict=True)))
    bound = relay.Function(params, body, None, function.type_params, function.attrs)
    return relay.transform.InferType()(tvm.IRModule.from_expr(bound))["main"]


def without_likes(module: tvm.IRModule) -> tvm.IRModule:
    """A typed graph whose Any all stand for one batch, without the operators that only a shape is taken from."""
    main = _Rewriter().visit(module["main"])
    return relay.transform.InferType()(tvm.IRModule.from_expr(main))


class _Rewriter(relay.ExprMutator):
    """Sees the types of the calls as they were."""

    def visit_call(self, call: relay.Call) -> relay.Expr:
        """A call, its arguments rewritten, or what has the same value."""
        if not isinstance(call.op, tvm.ir.Op):
            return super().visit_call(call)
        name, own = call.op.name, call.checked_type
        if name == "add":
            for zero, other in (call.args, reversed(call.args)):
                if _is(zero, "zeros_like", "zeros") and _same(other.checked_type, own):
                    return self.visit(other)
        if name == "multiply":
            for one, other in (call.args, reversed(call.args)):
                if _is(one, "ones_like", "ones") and _same(other.checked_type, own):
                    return self.visit(other)
        if name == "collapse_sum_like" and _same(call.args[0].checked_type, own):
            return self.visit(call.args[0])
        if name in ("zeros_like", "ones_like") and _symbolic(own):
            shape = relay.shape_of(self.visit(call.args[0]), "int64")
            return _of_type((relay.zeros if name == "zeros_like" else relay.ones)(shape, own.dtype), own)
        if name == "broadcast_to_like" and _symbolic(own):
            shape = relay.shape_of(self.visit(call.args[1]), "int64")
            return _of_type(relay.broadcast_to(self.visit(call.args[0]), shape), own)
        if name in ("less", "where"):
            args = [
                relay.const(0, arg.checked_type.dtype) if _is(arg, "zeros_like") else self.visit(arg)
                for arg in call.args
            ]
            return relay.Call(call.op, args, call.attrs)
        return super().visit_call(call)


def _is(value: relay.Expr, *names: str) -> bool:
    return isinstance(value, relay.Call) and isinstance(value.op, tvm.ir.Op) and value.op.name in names


def _same(a: relay.Type, b: relay.Type) -> bool:
    """Whether two types are equal, Any being one extent."""
    return str(a) == str(b)


def _of_type(value: relay.Expr, kind: relay.Type) -> relay.Expr:
    """A value of computed shape, whose type Relay takes for Any throughout, with the extents that are known."""
    shape = [int(extent) if isinstance(extent, tvm.tir.IntImm) else -1 for extent in kind.shape]
    return relay.reshape(value, shape) if shape.count(-1) == 1 else value


def _symbolic(kind: relay.Type) -> bool:
    return any(isinstance(extent, tvm.tir.Any) for extent in kind.shape)


ShapeFunction = Callable[[tvm.ir.Attrs, Sequence[te.Tensor], Sequence[te.Tensor]], list[te.Tensor]]


def shape_of_argument(position: int) -> ShapeFunction:
    """FShapeFunc of an operator whose result has the shape of one of its arguments."""

    def function(attrs: tvm.ir.Attrs, inputs: Sequence[te.Tensor], outputs: Sequence[te.Tensor]) -> list[te.Tensor]:
        source = inputs[position]
        return [te.compute(source.shape, lambda i: source[i], name="shape")]

    return function


STOCK_SHAPES = {
    "nn.log_softmax": shape_of_argument(0),
    "nn.avg_pool2d_grad": shape_of_argument(1),
    "nn.max_pool2d_grad": shape_of_argument(1),
}
"""Shape functions that stock Relay lacks, of operators that gradients of networks have."""
