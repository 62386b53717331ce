# SPDX-License-Identifier: Apache-2.0
"""Whether the samples of a batch depend on each other in a model, which micro-batches would change."""

from __future__ import annotations

from tvm import relax

from relax_ops.per_sample.analysis import state_after, state_of
from relax_ops.per_sample.states import Mixed, State, Summed
from relax_ops.vmap.mapped_axis import MappedAxis
from tvm_convgrad.training.ir.graph import bindings_of, is_call
from tvm_convgrad.training.model.model import Model


def mixing_of(model: Model) -> Mixed | None:
    """The first operator by which an output of a model depends on other samples than its own, and what it does.

    Batch norms with running statistics do not count: what they do in training is a setting of the step.

    Returns:
        None where each sample has its own outputs. `Mixed.is_known` is False where that cannot be told, because the
        rule of an operator does not follow the samples.

    Example:
        >>> mixing_of(load_model("contrastive.pt2"))
        Mixed(reason='relax.matmul: it multiplies each sample by every other', is_known=True)
    """
    function = model.module[model.function]
    states: dict[relax.Var, State] = dict.fromkeys(function.params[: model.leading], MappedAxis(0))
    for binding in bindings_of(function):
        if is_call(binding.value, "relax.nn.batch_norm"):
            states[binding.var] = (state_of(binding.value.args[0], states), None, None)
        else:
            states[binding.var] = state_after(binding.value, states)
    results = state_of(function.body.body, states)
    outputs = results[: len(model.outputs)] if isinstance(results, tuple) else (results,)
    return next((found for found in map(_mixed, outputs) if found is not None), None)


def _mixed(state: State) -> Mixed | None:
    if isinstance(state, Summed):
        return Mixed("an output is a sum over the samples")
    return state if isinstance(state, Mixed) else None


__all__ = ["mixing_of"]
