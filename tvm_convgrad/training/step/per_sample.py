# SPDX-License-Identifier: Apache-2.0
"""A model's losses and their per-sample gradients as one module: the pass PerSampleGradients applied to its loss."""

from __future__ import annotations

import tvm
from tvm import relax

from relax_ops.active import rules
from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.training.autodiff.per_sample import PerSampleGradients, Result
from tvm_convgrad.training.ir.graph import Environment, builder_with_tir, fresh_parameters, function_scope, replay
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.step import batch_norm, dropout, mode
from tvm_convgrad.training.step.losses.combined import target_of, weighted_sum
from tvm_convgrad.training.step.losses.table import find_loss
from tvm_convgrad.training.step.names import DTYPES
from tvm_convgrad.training.step.options import check_choice
from tvm_convgrad.training.step.precision import narrow


@rules()
def per_sample_module(
    model: Model, *, loss: str = "cross_entropy", result: Result = "clipped", dtype: str = "float32"
) -> tvm.IRModule:
    """A module with the function `main_per_sample`, which computes the gradients of each sample of a model.

    The function takes (inputs, target, parameters, states[, clip]) and returns the loss of each sample, the
    predictions, and the results that the pass `PerSampleGradients` adds. As samples must be independent of each other,
    batch norms use their running statistics, and dropout is disabled.

    Args:
        model: result of `load_model` or `from_module`.
        loss, dtype: as in `build_step`; 16-bit operands of convolutions and matrix products are summed in float32.
        result: "gradients", "norms" or "clipped", as in `PerSampleGradients`.

    Returns:
        The module, for `compile_module`.

    Raises:
        ModelError: as `PerSampleGradients`.
        UnsupportedError: the loss or the element type is unknown, or the model returns its loss itself.
    """
    check_choice("dtype", dtype, DTYPES)
    module, samples = _losses_module(model, loss)
    names = [str(param.name) for param in module["main"].params]
    first = len(samples)
    parameters = names[first : first + len(model.parameters)]
    differentiated = PerSampleGradients("main", parameters=parameters, samples=samples, result=result)(module)
    kept = {v: differentiated[v] for v in differentiated.get_global_vars() if v.name_hint != "main"}
    return narrow(tvm.IRModule(kept), dtype)


def _losses_module(model: Model, loss: str) -> tuple[tvm.IRModule, list[str]]:
    """main(inputs, target, parameters, states) -> (losses, predictions), and the names of inputs and target."""
    if model.members is not None:
        raise UnsupportedError("an ensemble has no per-sample gradients here; take those of one member at a time.")
    if model.target is not None:
        raise UnsupportedError(
            f"{model.source} returns its loss itself, one number for the batch, which has no gradients of single "
            "samples; return predictions, and choose the loss here."
        )
    criterion, original = find_loss(loss), model.relax_function
    fresh = fresh_parameters(original)
    environment = Environment(original.params, fresh)
    inputs, rest = fresh[: len(model.inputs)], fresh[len(model.inputs) :]
    count = len(model.outputs)
    target = relax.Var("target", target_of(criterion, original.ret_ty.fields[:count], model.outputs, model.source))
    builder = builder_with_tir(model.module)
    rewrites = {batch_norm.OP: batch_norm.inference, dropout.OP: dropout.identity, mode.OP: mode.training}
    with function_scope(builder, "main", [*inputs, target, *rest]):
        with builder.dataflow():
            results = replay(builder, original, environment, rewrites).fields[:count]
            each = (criterion.each(builder, result, target) for result in results)
            losses = builder.emit_output(weighted_sum(builder, each, model.outputs))
            outputs = [losses, builder.emit_output(results[0])]
        builder.emit_func_output(relax.Tuple(outputs))
    return builder.get(), [str(var.name) for var in (*inputs, target)]
