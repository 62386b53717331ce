# SPDX-License-Identifier: Apache-2.0
"""From a model to a compiled training step.

    load_model(path, batch=None) -> Model       a file of one of the formats in frontends/formats
    from_exported_program(...)   -> Model       a torch.export.ExportedProgram
    from_module(module, ...)     -> Model       a Relax module
    ensemble(models)             -> Model       several models as one; member(values, number) is one of their states
    build_step(model, ...)       -> StepModule  one IRModule with step, predict and init
    compile_step(step)           -> executable of TVM
    per_sample_module(model, …)  -> IRModule    gradients of each sample; PerSampleGradients is the pass that makes them
    OwnLoss(outputs, target)                    where a model that has its loss puts it, and its predictions
    Session(path)                               a compiled step at work: step, predict, gradients, apply
    load_latest(folder)          -> Checkpoint

The public functions of the module, as a virtual machine sees them (`state` is one tuple of tensors):

    step(x..., target, lr: float32 scalar, state) -> (loss, predictions, new_state)
    predict(x..., state)                          -> predictions
    init()                                        -> state

A step that was built with `split` has three more:

    gradients(x..., target, state)      -> (loss, predictions, flat gradients, new running statistics)
    apply(flat gradients, lr, state)    -> new_state
    evaluate(x..., target, state)       -> (loss, predictions)

The order of `state` is the order of `StepModule.state`: parameters, running statistics and frozen parameters,
optimizer, counters. `step` and `apply` take over the state given to them, whose tensors hold the new one afterwards;
go on with the state that they return. Other arguments stay as they are, and `init` gives fresh tensors each time. A
model with several inputs takes them in the order of `StepModule.inputs`. Symbolic extents are shared by name in the
schemas.

Imports go one way (tests/training/test_directions.py):

    ir         Relax functions as lists of bindings
    model      ir                      the one form of a model; programs with gradients
    autodiff   ir                      gradients of a function; of each sample
    frontends  ir, model, importer     reading files
    step       ir, model, autodiff     loss, gradients, optimizer, state
    schedule                           loops of TIR functions on CPUs
    passes     ir, schedule            what is done to a finished step before it is compiled
    runtime                            artifacts, sessions, checkpoints; imports nothing of the compiler
    compile    all but frontends       lowering, targets, writing artifacts
"""

from __future__ import annotations

import importlib
from typing import Any

_PLACES = {
    "OwnLoss": "model.own_loss",
    "PerSampleGradients": "autodiff.per_sample",
    "Session": "runtime.session",
    "build_step": "step.build",
    "compile_module": "compile.lower",
    "compile_step": "compile.lower",
    "ensemble": "model.ensemble",
    "from_exported_program": "frontends.torch_export.model",
    "from_module": "model.model",
    "load_latest": "runtime.checkpoint",
    "load_model": "frontends",
    "member": "model.ensemble",
    "per_sample_module": "step.per_sample",
}
"""The modules of what is offered here. They are imported when used: a session needs no compiler."""

__all__ = [
    "OwnLoss",
    "PerSampleGradients",
    "Session",
    "build_step",
    "compile_module",
    "compile_step",
    "ensemble",
    "from_exported_program",
    "from_module",
    "load_latest",
    "load_model",
    "member",
    "per_sample_module",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
    globals()[name] = value
    return value
