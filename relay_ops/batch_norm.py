# SPDX-License-Identifier: Apache-2.0
"""nn.batch_norm in training: normalisation by the statistics of the batch, and running ones that follow them.

Relay's nn.batch_norm normalises with the mean and variance that it is given; frontends give the running ones. The pass
`BatchStatistics` gives it those of the batch instead, as ordinary expressions, so that gradients pass through them
(Ioffe and Szegedy, 2015), and makes its second and third result the running statistics after the step.
"""

from __future__ import annotations

import tvm
from tvm import relay

from tvm_convgrad.core.dtypes import wide_dtype
from tvm_convgrad.core.errors import ProblemError, UnsupportedError


def BatchStatistics(momentum: float = 0.1) -> tvm.transform.Pass:
    """A pass that turns every nn.batch_norm into that of training, with PyTorch's definitions.

    With sums over all axes but the channels', n elements a channel, m the momentum:

        mean = sum(x) / n                   running_mean' = (1 - m) running_mean + m mean
        variance = sum((x - mean)^2) / n    running_var'  = (1 - m) running_var  + m variance n / (n - 1)

    The running statistics are the second and third result of the operator: a step that keeps them returns them.

    Args:
        momentum: the share of the batch, in [0, 1].

    Raises:
        ProblemError: `momentum` is not in [0, 1].
        UnsupportedError: an extent of the data is Any, so that n is not known, or n is 1.
    """
    if not 0 <= momentum <= 1:
        raise ProblemError(f"BatchStatistics: momentum={momentum} must be in [0, 1]: it is the share of the batch")

    def transform(module: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        typed = relay.transform.InferType()(module)
        functions = {
            var: _Rewriter(momentum).visit(function) if isinstance(function, relay.Function) else function
            for var, function in typed.functions.items()
        }
        return relay.transform.InferType()(tvm.IRModule(functions, typed.type_definitions))

    return tvm.transform.module_pass(transform, opt_level=0, name="BatchStatistics")


class _Rewriter(relay.ExprMutator):
    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.momentum = momentum

    def visit_tuple_getitem(self, op: relay.TupleGetItem) -> relay.Expr:
        """A result of nn.batch_norm itself, where that has become a tuple of expressions."""
        value = self.visit(op.tuple_value)
        return value.fields[op.index] if isinstance(value, relay.Tuple) else relay.TupleGetItem(value, op.index)

    def visit_call(self, call: relay.Call) -> relay.Expr:
        """The call, or what training has in the place of nn.batch_norm."""
        made = super().visit_call(call)
        if not isinstance(call.op, tvm.ir.Op) or call.op.name != "nn.batch_norm":
            return made
        data, gamma, beta, running_mean, running_var = made.args
        axis = int(call.attrs.axis)
        tensor, statistic = call.args[0].checked_type, call.args[4].checked_type.dtype
        count = _elements(tensor, axis)
        wide = wide_dtype(tensor.dtype)
        x = _cast(data, tensor.dtype, wide)
        mean = relay.mean(x, axis=[axis], exclude=True, keepdims=True)
        centred = x - mean
        variance = relay.mean(centred * centred, axis=[axis], exclude=True)
        channels = [_cast(c, wide, statistic) for c in (relay.squeeze(mean, _others(tensor, axis)), variance)]
        normal = relay.Call(call.op, [data, gamma, beta, *channels], call.attrs, call.type_args, call.span)
        share = relay.const(self.momentum, statistic)
        unbiased = relay.const(self.momentum * count / (count - 1), statistic)
        kept = relay.const(1 - self.momentum, statistic)
        return relay.Tuple(
            [
                relay.TupleGetItem(normal, 0),
                running_mean * kept + channels[0] * share,
                running_var * kept + channels[1] * unbiased,
            ]
        )


def _others(tensor: relay.TensorType, axis: int) -> list[int]:
    rank = len(tensor.shape)
    return [i for i in range(rank) if i != axis % rank]


def _elements(tensor: relay.TensorType, axis: int) -> int:
    """How many elements a channel has."""
    count = 1
    for i in _others(tensor, axis):
        if not isinstance(tensor.shape[i], tvm.tir.IntImm):
            raise UnsupportedError(
                f"BatchStatistics: axis {i} of the data of nn.batch_norm is Any; the variance's correction needs its "
                "number: give the program's variables static types"
            )
        count *= int(tensor.shape[i])
    if count == 1:
        raise UnsupportedError(
            "BatchStatistics: nn.batch_norm has one element a channel, which has no variance; train with more samples"
        )
    return count


def _cast(value: relay.Expr, have: str, want: str) -> relay.Expr:
    return value if have == want else relay.cast(value, want)
