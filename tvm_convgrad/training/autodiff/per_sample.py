# SPDX-License-Identifier: Apache-2.0
"""Gradients of each sample's loss: all of them, their norms only, or their sum with each one clipped (DP-SGD).

The backward pass runs once for the whole batch; where it would sum over the samples to get a parameter's gradient, the
terms are taken instead (relax_ops.per_sample): of a convolution by the batching rule of wgrad, with the samples as
groups. Norms need the terms of one layer at a time only, and none where Gram matrices are cheaper. Clipping needs no
terms: the sum of c_n times the gradient of sample n is the gradient of the sum of c_n times its loss (Li et al., 2021,
"ghost clipping").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import tvm
from tvm import relax

from relax_ops.active import rules
from relax_ops.expressions import known_extents
from relax_ops.per_sample.analysis import state_of, track
from relax_ops.per_sample.states import Mixed, Summed, Zeros
from relax_ops.vmap.mapped_axis import MappedAxis
from tvm_convgrad.core.errors import ModelError, UnsupportedError
from tvm_convgrad.training.autodiff.differentiate import emit_with_gradients
from tvm_convgrad.training.ir.counting import scalar
from tvm_convgrad.training.ir.graph import (
    Environment,
    bindings_of,
    builder_with_tir,
    element_type,
    fresh_parameters,
    function_scope,
    replay,
    static_shape,
)

Result = Literal["gradients", "norms", "clipped"]
SUFFIX = "_per_sample"
_SMALLEST_NORM = 1e-12


def PerSampleGradients(
    function: str = "main", *, parameters: Sequence[str], samples: Sequence[str], result: Result = "gradients"
) -> tvm.transform.Pass:
    """A pass that adds `<function>_per_sample` to a module, as relax.transform.Gradient adds `<function>_adjoint`.

    Args:
        function: name of a Relax function without control flow, whose (first) result is the vector of the samples'
            losses.
        parameters: names of the parameters to differentiate with respect to.
        samples: names of the parameters whose axis 0 is the sample; all other ones are shared by all samples.
        result: what the new function returns after the results of `function`:
            "gradients": for each of `parameters` the gradient of each loss: (samples, *shape of the parameter);
            "norms": a float32 vector: the norm of each sample's gradient over all of `parameters`;
            "clipped": the norms, and for each of `parameters` the sum over the samples of gradient * min(1, clip /
            norm). The new function has one more parameter, `clip`, a float32 scalar.

    Raises (when it is applied):
        ModelError: there is no such function or parameter; an operator has no gradient; or an operator mixes samples,
            such as batch norm with batch statistics. The message names the operator and the reason.
    """
    if result not in get_args(Result):
        raise UnsupportedError(
            f"PerSampleGradients: result={result!r} is unknown; choose one of {', '.join(get_args(Result))}."
        )

    @tvm.transform.module_pass(opt_level=0, name="PerSampleGradients")
    @rules()
    def apply(module: tvm.IRModule, _context: tvm.transform.PassContext) -> tvm.IRModule:
        original = _checked(module, function, (*parameters, *samples))
        builder = builder_with_tir(module)
        for variable in module.get_global_vars():
            if not isinstance(module[variable], tvm.tirx.PrimFunc):
                builder.add_func(module[variable], variable.name_hint)
        _emit(builder, function, original, list(parameters), set(samples), result)
        new = builder.get()
        added = function + SUFFIX
        small = tvm.IRModule({variable: new[variable] for variable in new.get_global_vars()})
        passes = [
            relax.transform.EliminateCommonSubexpr(),
            relax.transform.CanonicalizeBindings(),
            relax.transform.DeadCodeElimination([function, added]),
        ]
        return tvm.transform.Sequential(passes)(small)

    return apply


def _checked(module: tvm.IRModule, function: str, names: Sequence[str]) -> relax.Function:
    known = {variable.name_hint for variable in module.get_global_vars()}
    if function not in known or not isinstance(module[function], relax.Function):
        raise ModelError(f"PerSampleGradients: the module has no Relax function {function!r}.")
    original = module[function]
    params = [str(param.name) for param in original.params]
    missing = [name for name in names if name not in params]
    if missing:
        raise ModelError(f"PerSampleGradients: {function!r} has no parameter {', '.join(missing)}; it has {params}.")
    first = original.ret_ty.fields[0] if isinstance(original.ret_ty, relax.TupleType) else original.ret_ty
    if not isinstance(first, relax.TensorType) or first.ndim != 1:
        raise ModelError(
            f"PerSampleGradients: {function!r} must return the samples' losses first, a vector, but returns {first}; "
            "leave out the mean over the samples."
        )
    return original


def _emit(
    builder: relax.BlockBuilder,
    name: str,
    original: relax.Function,
    parameters: list[str],
    samples: set[str],
    result: Result,
) -> None:
    """The new function. The losses are weighted by a vector: of ones, then of what clips the gradients."""
    fresh = {str(param.name): relax.Var(str(param.name), param.ty) for param in original.params}
    clip = [relax.Var("clip", relax.TensorType((), "float32"))] if result == "clipped" else []
    weighted = _with_gradients(builder, original, parameters)
    with function_scope(builder, name + SUFFIX, [*fresh.values(), *clip]):
        with builder.dataflow():
            environment = Environment(original.params, list(fresh.values()))
            outputs = _fields(builder, replay(builder, original, environment))
            ones = builder.emit(relax.op.ones_like(outputs[0]))
            gradients = _gradients(builder, weighted, [*fresh.values(), ones])
            known = {var: MappedAxis(0) for name, var in fresh.items() if name in samples} | {ones: MappedAxis(0)}
            states = track(gradients.bindings, known)
            each = [
                _summed(builder, parameter, value, states, known_extents(ones)[0], fresh[parameter])
                for parameter, value in zip(parameters, gradients.values, strict=True)
            ]
            if result == "gradients":
                outputs += [state.terms(builder) for state in each]
            else:
                norms = _norms(builder, each)
                outputs.append(norms)
                if result == "clipped":
                    factors = _factors(builder, norms, clip[0], element_type(ones))
                    outputs += _gradients(builder, weighted, [*fresh.values(), factors]).values
            outputs = [builder.emit_output(output) for output in outputs]
        builder.emit_func_output(relax.Tuple(outputs))


def _fields(builder: relax.BlockBuilder, value: relax.Expr) -> list[relax.Expr]:
    if isinstance(value, relax.Tuple):
        return list(value.fields)
    if isinstance(value.ty, relax.TupleType):
        return [builder.emit(relax.TupleGetItem(value, index)) for index in range(len(value.ty.fields))]
    return [builder.emit(value)]


def _with_gradients(
    module_builder: relax.BlockBuilder, original: relax.Function, parameters: list[str]
) -> relax.Function:
    """f(parameters of the function, weights) -> gradients of the sum of the weighted losses."""
    module = module_builder.get()
    builder = builder_with_tir(module)
    fresh = fresh_parameters(original)
    losses_type = original.ret_ty.fields[0] if isinstance(original.ret_ty, relax.TupleType) else original.ret_ty
    weights = relax.Var("weights", losses_type)
    with function_scope(builder, "total", [*fresh, weights]):
        with builder.dataflow():
            losses = _fields(builder, replay(builder, original, Environment(original.params, fresh)))[0]
            total = builder.emit_output(relax.op.sum(builder.emit(relax.op.multiply(losses, weights))))
        builder.emit_func_output(relax.Tuple([total]))
    function = builder.get()["total"]
    builder = builder_with_tir(builder.get())
    arguments = fresh_parameters(function)
    wanted = [index for index, param in enumerate(function.params) if str(param.name) in parameters]
    order = [str(function.params[index].name) for index in wanted]
    with function_scope(builder, "gradients", arguments):
        with builder.dataflow():
            _, found = emit_with_gradients(builder, function, arguments, wanted, "PerSampleGradients")
            by_name = dict(zip(order, found, strict=True))
            output = builder.emit_output(relax.Tuple([by_name[name] for name in parameters]))
        builder.emit_func_output(output)
    return builder.get()["gradients"]


class _Emitted:
    """Gradients emitted into the open block: their values, and all bindings with the emitted variables."""

    def __init__(self, values: list[relax.Expr], bindings: list[tuple[relax.Var, relax.Expr]]) -> None:
        self.values, self.bindings = values, bindings


def _gradients(builder: relax.BlockBuilder, function: relax.Function, arguments: Sequence[relax.Expr]) -> _Emitted:
    environment = Environment(function.params, arguments)
    values = _fields(builder, replay(builder, function, environment))
    bindings = []
    for binding in bindings_of(function):
        variable = environment[binding.var]
        if isinstance(variable, relax.Var) and variable not in arguments:
            bindings.append((variable, builder.lookup_binding(variable)))
    return _Emitted(values, bindings)


def _summed(
    builder: relax.BlockBuilder, name: str, value: relax.Expr, states: Any, count: Any, parameter: relax.Expr
) -> Summed:
    """The state of a parameter's gradient, which must be a sum over the samples, or not depend on them: zero.

    Of a single sample it is that sample's; operators along an axis of one element are sums that need not be written.
    """
    state = state_of(value, states)
    if isinstance(state, Summed):
        return state
    if state is None or isinstance(state, Zeros) or (isinstance(count, tvm.tirx.IntImm | int) and int(count) == 1):
        shape = relax.ShapeExpr([count, *static_shape(parameter)])
        return Summed(lambda b: b.emit(relax.op.broadcast_to(value, shape)))
    reason = state.reason if isinstance(state, Mixed) else "its gradient is not a sum over the samples"
    if isinstance(state, Mixed) and not state.is_known:
        remedy = "The samples are not followed through that operator; write it by others, or freeze what it reads."
    else:
        remedy = "Samples must stay independent up to the loss: freeze batch norm, or use group norm."
    raise ModelError(
        f"PerSampleGradients: the gradient of {name!r} does not fall into those of the samples: {reason}. {remedy}"
    )


def _norms(builder: relax.BlockBuilder, each: Sequence[Summed]) -> relax.Expr:
    """The norms over all parameters, a float32 vector."""
    total = None
    for state in each:
        squares = state.squares(builder)
        if element_type(squares) != "float32":
            squares = builder.emit(relax.op.astype(squares, "float32"))
        total = squares if total is None else builder.emit(relax.op.add(total, squares))
    return builder.emit(relax.op.sqrt(total))


def _factors(builder: relax.BlockBuilder, norms: relax.Expr, clip: relax.Var, dtype: str) -> relax.Expr:
    """min(1, clip / norm), as weights of the losses."""
    safe = builder.emit(relax.op.maximum(norms, scalar(_SMALLEST_NORM, "float32")))
    ratio = builder.emit(relax.op.divide(clip, safe))
    factors = builder.emit(relax.op.minimum(ratio, scalar(1.0, "float32")))
    return factors if dtype == "float32" else builder.emit(relax.op.astype(factors, dtype))
