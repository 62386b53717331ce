# SPDX-License-Identifier: Apache-2.0
"""From a Relay function to one that gives its result and its gradients, as a plain graph that Relay can build."""

from __future__ import annotations

import tvm
from tvm import relay

from relay_ops.simplify import simplify_gradients
from relay_ops.symbolic import has_any, without_likes
from tvm_convgrad.core.errors import ConvGradError, ModelError, UnsupportedError


def value_and_gradients(function: relay.Function, more: bool = False) -> tvm.IRModule:
    """A module whose main takes what `function` takes and returns the flat tuple (result, d parameter 1, …).

    relay.transform.FirstOrderGradient gives nested tuples and let bindings, whose graph neither ConvertLayout nor
    the graph executor takes as it is.

    Args:
        function: a Relay function of tensors that returns one tensor and calls no global function (run
            relay.transform.Inline first); gradients are those of its sum. Each of its parameters may have one extent
            Any, which is the same number in all, such as the batch: relay.vm runs the result, built with
            disabled_pass=["SimplifyExpr"] (stock's raises for some graphs with Any).
        more: the function returns a flat tuple of tensors instead; gradients are those of the first, and the others,
            such as running statistics, are returned behind them.

    Raises:
        ModelError: the function returns no tensor, or with `more` no tuple of tensors.
        UnsupportedError: an operator has no gradient with an extent Any; `relay_ops.symbolic.bind_batch` gives it a
            number.
    """
    typed = relay.transform.InferType()(tvm.IRModule.from_expr(function))
    main = typed["main"]
    if more:
        return _with_more(main)
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
    symbolic = has_any(main)
    if symbolic:
        typed = relay.transform.SimplifyInference()(typed)  # stock makes zeros of known extents for unused results
    with tvm.transform.PassContext(opt_level=3):
        try:
            nested = plain(typed)["main"]
        except tvm.error.TVMError as error:
            if not symbolic or isinstance(error, ConvGradError):
                raise
            last = str(error).strip().splitlines()[-1]
            raise UnsupportedError(
                f"value_and_gradients: Relay has no gradient of this program while an extent of its parameters is Any "
                f"({last}); give it a number, relay_ops.symbolic.bind_batch(function, 8), for each batch"
            ) from error
    value, gradients = _field(nested.body, 0), _field(nested.body, 1)
    flat = relay.Tuple([value, *(_field(gradients, i) for i in range(len(nested.params)))])
    step = relay.transform.InferType()(tvm.IRModule.from_expr(relay.Function(nested.params, flat)))
    return without_likes(step) if symbolic else step


def _with_more(main: relay.Function) -> tvm.IRModule:
    kinds = main.ret_type.fields if isinstance(main.ret_type, relay.TupleType) else []
    if not kinds or not all(isinstance(kind, relay.TensorType) for kind in kinds):
        raise ModelError(f"with more=True the function must return a tuple of tensors, not {main.ret_type}")
    step = value_and_gradients(relay.Function(main.params, _field(main.body, 0)))["main"]
    own = dict(zip(main.params, step.params, strict=True))
    others = [relay.bind(_field(main.body, i), own) for i in range(1, len(kinds))]
    whole = relay.Function(step.params, relay.Tuple([*step.body.fields, *others]))
    # The forward pass stands there twice now, once for the gradients and once for the other results.
    once = tvm.transform.Sequential(
        [
            relay.transform.InferType(),
            simplify_gradients(),  # the gradients' copy is simplified already, and both must read alike
            relay.transform.EliminateCommonSubexpr(),
            relay.transform.InferType(),
        ]
    )
    with tvm.transform.PassContext(opt_level=3):
        return once(tvm.IRModule.from_expr(whole))


def _field(value: relay.Expr, index: int) -> relay.Expr:
    return value.fields[index] if isinstance(value, relay.Tuple) else relay.TupleGetItem(value, index)
