# SPDX-License-Identifier: Apache-2.0
"""A model with known weights as one function, `predict`: what an inference library has in the place of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import tvm
from tvm import relax

from relax_ops.active import rules
from relax_ops.compat import array_of
from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import Environment, builder_with_tir, fresh_parameters, function_scope, replay
from tvm_convgrad.training.model.model import BATCH_NORM, Array, Model, TensorSchema, schema_of
from tvm_convgrad.training.model.own_loss import MODEL_LOSS
from tvm_convgrad.training.step import dropout, mode
from tvm_convgrad.training.step.folding import FoldBatchNorms
from tvm_convgrad.training.step.layout import convert_layout
from tvm_convgrad.training.step.objective import objective_of
from tvm_convgrad.training.step.options import StepOptions
from tvm_convgrad.training.step.precision import narrow
from tvm_convgrad.training.step.storage import may_be_mask

PREDICT = "predict"
_SHOWN = 3


@dataclass(frozen=True)
class Predictor:
    """A model whose weights are constants.

    Attributes:
        module: has the function predict(inputs...) -> predictions.
        inputs, prediction: the tensors that it takes and gives.
        options: those that decide about it, plain enough for JSON.
    """

    module: tvm.IRModule
    inputs: tuple[TensorSchema, ...]
    prediction: TensorSchema
    options: dict[str, Any]


@rules()
def build_predictor(model: Model, values: Mapping[str, Array], options: StepOptions | None = None) -> Predictor:
    """The inference function of a model, with batch norms folded.

    Args:
        model: of `frontends.load_model` or `model.from_module`.
        values: of parameters, frozen ones and running statistics by name; others are left aside.
        options: of which `dtype`, `results` and `layout` count here; `mean` and `std` are kept in the manifest.

    Raises:
        ModelError: a value is missing or has another shape (all such are named), or the model is an ensemble.
    """
    chosen = options or StepOptions()
    if model.members is not None:
        raise ModelError(f"{model.source}: an ensemble has no inference library; build one of a member's values.")
    objective = objective_of(model, replace(chosen, loss=MODEL_LOSS) if model.target is not None else chosen)
    if not objective.predicts:
        raise ModelError(
            f"{model.source} returns its loss alone, and an inference library predicts; let it return predictions, too."
        )
    initial = {**model.parameters, **model.states}
    wrong = [
        name
        for name, value in initial.items()
        if name not in values or (values[name].shape, values[name].dtype) != (value.shape, value.dtype)
    ]
    if wrong:
        more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise ModelError(
            f"{model.source}: no values of their shapes are given for {', '.join(wrong[:_SHOWN])}{more}; give those of "
            "a step that was built of this model."
        )
    original = model.relax_function
    fresh = [relax.Var(str(param.name), param.ty) for param in original.params[: len(model.inputs)]]
    constants = [relax.const(values[name], str(value.dtype)) for name, value in initial.items()]
    builder = builder_with_tir(model.module)
    rewrites = {BATCH_NORM: FoldBatchNorms(original).rewrite, dropout.OP: dropout.identity, mode.OP: mode.predicting}
    with function_scope(builder, PREDICT, fresh):
        with builder.dataflow():
            arguments = objective.without_target(builder, fresh, constants)
            results = replay(builder, original, Environment(original.params, arguments), rewrites)
            output = builder.emit_output(objective.predictions(results.fields))
        builder.emit_func_output(output)
    module = relax.transform.DeadCodeElimination([PREDICT])(builder.get())
    module = convert_layout(_narrowed(module, constants, chosen), chosen.layout)
    return Predictor(
        module,
        model.inputs,
        schema_of(relax.Var("prediction", module[PREDICT].ret_ty), "prediction"),
        {
            "dtype": chosen.dtype,
            "results": chosen.results,
            "layout": chosen.layout,
            **chosen.normalisation,
            "source": model.source,
        },
    )


def _narrowed(module: tvm.IRModule, weights: Sequence[relax.Expr], chosen: StepOptions) -> tvm.IRModule:
    """The module of `predict` in the precision that was chosen, with the same products narrowed as in a step's.

    The weights are constants, products with which would stay float32, as those with the importer's tables do. So they
    are in a tuple while it is narrowed, as in a step.
    """
    if chosen.dtype == "float32":
        return module
    function, builder = module[PREDICT], builder_with_tir(module)
    fresh, state = fresh_parameters(function), relax.Var("state", relax.TupleType([each.ty for each in weights]))
    with function_scope(builder, PREDICT, [*fresh, state]):
        with builder.dataflow():
            fields = [builder.emit(relax.TupleGetItem(state, number)) for number in range(len(weights))]
            environment = Environment([*function.params, *weights], [*fresh, *fields])
            output = builder.emit_output(replay(builder, function, environment))
        builder.emit_func_output(output)
    masks = [number for number, each in enumerate(weights) if may_be_mask(array_of(each), chosen.dtype)]
    module = narrow(builder.get(), chosen.dtype, chosen.results, masks)
    function, builder = module[PREDICT], builder_with_tir(module)
    fresh = fresh_parameters(function)[:-1]
    with function_scope(builder, PREDICT, fresh):
        with builder.dataflow():
            environment = Environment(function.params, [*fresh, relax.Tuple(weights)])
            output = builder.emit_output(replay(builder, function, environment))
        builder.emit_func_output(output)
    return relax.transform.DeadCodeElimination([PREDICT])(builder.get())


__all__ = ["PREDICT", "Predictor", "build_predictor"]
