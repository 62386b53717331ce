# SPDX-License-Identifier: Apache-2.0
"""What a step minimises: a loss function of a model's predictions and a target, or the loss that it returns itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import relax

from tvm_convgrad.core.errors import UnsupportedError
from tvm_convgrad.core.index_range import IndexRange
from tvm_convgrad.training.ir.graph import element_type
from tvm_convgrad.training.model.model import Model
from tvm_convgrad.training.model.own_loss import MODEL_LOSS
from tvm_convgrad.training.step.losses.combined import ensemble_loss, target_of, weighted_sum
from tvm_convgrad.training.step.losses.loss import Loss
from tvm_convgrad.training.step.losses.table import find_loss
from tvm_convgrad.training.step.options import StepOptions


@dataclass(frozen=True)
class Objective:
    """The objective of a model's step. `loss` is None if the model returns its loss itself."""

    model: Model
    loss: Loss | None

    @property
    def predicts(self) -> bool:
        """Whether the model returns predictions."""
        return self.loss is not None or bool(self.model.predicted)

    def target(self) -> relax.Var:
        """A new variable for the target.

        Raises:
            ModelError: the loss does not take the model's outputs.
        """
        model, function = self.model, self.model.relax_function
        if self.loss is None:
            return relax.Var("target", function.params[len(model.inputs)].ty)
        types = function.ret_ty.fields[: model.returned]
        return relax.Var("target", target_of(self.loss, types, model.outputs, model.source))

    def target_range(self) -> IndexRange | None:
        """The values of the target that are in range; None for any."""
        model, types = self.model, self.model.relax_function.ret_ty.fields
        if self.loss is None:
            return None if model.target is None else model.target.range
        return self.loss.target_range(relax.Var("predictions", types[0]))

    def arguments(
        self, inputs: Sequence[relax.Expr], target: relax.Expr, weights: Sequence[relax.Expr]
    ) -> list[relax.Expr]:
        """The arguments of the model's function."""
        return [*inputs, *([target] if self.loss is None else []), *weights]

    def without_target(
        self, builder: relax.BlockBuilder, inputs: Sequence[relax.Expr], weights: Sequence[relax.Expr]
    ) -> list[relax.Expr]:
        """Arguments of the model's function for predictions, which do not depend on a target: it is zeros."""
        targets = self.model.relax_function.params[len(inputs) : self.model.leading]
        zeros = [builder.emit(relax.op.zeros(target.ty.shape, element_type(target))) for target in targets]
        return [*inputs, *zeros, *weights]

    def value(self, builder: relax.BlockBuilder, results: Sequence[relax.Expr], target: relax.Expr) -> relax.Expr:
        """The loss, of what the model's function returns."""
        outputs = list(results[: len(self.model.outputs)])
        if self.loss is None:
            return weighted_sum(builder, outputs, self.model.outputs)
        return weighted_sum(builder, (self.loss.value(builder, each, target) for each in outputs), self.model.outputs)

    def predictions(self, results: Sequence[relax.Expr]) -> relax.Expr | None:
        """The predictions, of what the model's function returns; None if it returns its loss alone."""
        if not self.predicts:
            return None
        return results[0 if self.loss is not None else self.model.returned - 1]


def objective_of(model: Model, options: StepOptions) -> Objective:
    """The objective that the options choose.

    Raises:
        UnsupportedError: they choose a loss function of a model that returns its loss itself, or the other way round;
            or a weighted mean of an ensemble.
    """
    if options.loss == MODEL_LOSS:
        if model.target is None:
            raise UnsupportedError(
                f"build_step: loss = {MODEL_LOSS!r}, but {model.source} was loaded as a model that returns "
                "predictions; load it with outputs=OwnLoss()."
            )
        return Objective(model, None)
    if model.target is not None:
        raise UnsupportedError(
            f"build_step: loss = {options.loss!r}, but {model.source} was loaded as a model that returns its loss "
            f"itself; build with loss={MODEL_LOSS!r}, or load it without OwnLoss."
        )
    loss = find_loss(options.loss, options.loss_settings)
    return Objective(model, loss if model.members is None else ensemble_loss(loss, model.members, model.own_data))


__all__ = ["Objective", "objective_of"]
