# SPDX-License-Identifier: Apache-2.0
"""From a Relay function to one that gives its result and its gradients, as a plain graph that Relay can build."""

from __future__ import annotations

import tvm
from tvm import relay

from relay_ops.simplify import simplify_gradients
from tvm_convgrad.core.errors import ModelError


def value_and_gradients(function: relay.Function) -> relay.Function:
    """A module whose main takes what `function` takes and returns the flat tuple (result, d parameter 1, …).

    relay.transform.FirstOrderGradient gives nested tuples and let bindings, whose graph neither ConvertLayout nor
    the graph executor takes as it is.

    Args:
        function: a Relay function of tensors that returns one tensor and calls no global function (run
            relay.transform.Inline first); gradients are those of its sum.

    Raises:
        ModelError: the function returns no tensor.
    """
    typed = relay.transform.InferType()(tvm.IRModule.from_expr(function))
    main = typed["main"]
    if not isinstance(main.ret_type, relay.TensorType):
        raise ModelError(f"gradients are taken of functions that return one tensor, not {main.ret_type}")
    plain = tvm.transform.Sequential(
        [
            relay.transform.FirstOrderGradient(),
            relay.transform.InferType(),
            relay.transform.ToGraphNormalForm(),
            relay.transform.DeadCodeElimination(inline_once=True),
            simplify_gradients(),
        ]
    )
    with tvm.transform.PassContext(opt_level=3):
        nested = plain(typed)["main"]
    value, gradients = _field(nested.body, 0), _field(nested.body, 1)
    flat = relay.Tuple([value, *(_field(gradients, i) for i in range(len(nested.params)))])
    return relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(nested.params, flat)))


def _field(value: relay.Expr, index: int) -> relay.Expr:
    return value.fields[index] if isinstance(value, relay.Tuple) else relay.TupleGetItem(value, index)
