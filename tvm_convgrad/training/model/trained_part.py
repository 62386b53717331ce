# SPDX-License-Identifier: Apache-2.0
"""Training a part of a model: the parameters that patterns name; all others are frozen.

No gradient of a frozen parameter is computed, and nothing is kept for it. Batch norms whose scale and shift are frozen
normalise by their running statistics, unless the step's option `bn` is "train-all".
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from tvm import relax

from tvm_convgrad.core.errors import ModelError
from tvm_convgrad.training.ir.graph import Environment, builder_with_tir, function_scope, replay
from tvm_convgrad.training.model.model import Model

_SHOWN = 5


def train_only(model: Model, patterns: Sequence[str]) -> Model:
    """The model with the parameters trained that a pattern matches, and the others frozen.

    Args:
        model: of `frontends.load_model` or `model.from_module`.
        patterns: names of parameters or of the modules that they belong to, with the wildcards *, ? and [ ]: "fc" is
            fc.weight and fc.bias, "layer4.*" everything under layer4. A weight with several names has all of them.

    Raises:
        ModelError: a pattern matches nothing (near names are shown), or the model is an ensemble.
    """
    if model.members is not None:
        raise ModelError(f"{model.source}: parts of an ensemble are not trained apart; freeze them in its one model.")
    names = {name: [name, *(other for other, own in model.tied.items() if own == name)] for name in model.parameters}
    for pattern in patterns:
        if not any(_matches(each, pattern) for given in names.values() for each in given):
            raise ModelError(f"{model.source} has no parameter that {pattern!r} matches; {_near(model, pattern)}.")
    trained = [
        name for name, given in names.items() if any(_matches(each, pattern) for each in given for pattern in patterns)
    ]
    frozen = [name for name in model.parameters if name not in trained]
    original, inputs = model.relax_function, model.leading
    fresh = [relax.Var(str(param.name), param.ty) for param in original.params]
    by_name = dict(zip(model.parameters, fresh[inputs:], strict=False))
    states = fresh[inputs + len(model.parameters) :]
    builder = builder_with_tir(model.module)
    order = [*fresh[:inputs], *(by_name[name] for name in trained), *states, *(by_name[name] for name in frozen)]
    with function_scope(builder, model.function, order):
        with builder.dataflow():
            results = replay(builder, original, Environment(original.params, fresh)).fields
            kept = [by_name[name] for name in frozen]
            outputs = [builder.emit_output(result) for result in (*results, *kept)]
        builder.emit_func_output(relax.Tuple(outputs))
    return replace(
        model,
        module=builder.get(),
        parameters={name: model.parameters[name] for name in trained},
        states={**model.states, **{name: model.parameters[name] for name in frozen}},
        frozen=model.frozen | set(frozen),
    )


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or fnmatchcase(name, pattern)


def _near(model: Model, pattern: str) -> str:
    """Names that the pattern may have meant: of parameters, and of the modules that they belong to."""
    names = [*model.parameters, *(other for other, own in model.tied.items() if own in model.parameters)]
    modules = {".".join(name.split(".")[:depth]) for name in names for depth in range(1, name.count(".") + 2)}
    near = difflib.get_close_matches(pattern.rstrip(".*"), sorted(modules), _SHOWN, 0.5)
    shown = near or list(model.parameters)[:_SHOWN]
    return f"{'near names are' if near else 'the first ones are'} {', '.join(shown)}"


__all__ = ["train_only"]
