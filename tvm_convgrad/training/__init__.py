# SPDX-License-Identifier: Apache-2.0
"""From a model to a compiled training step.

    frontends.load_model(path, batch=None) -> Model    .onnx, .pt2, file.py:function, Relax .json
    step.build_step(model, ...)            -> StepModule (one IRModule with step, predict, init)
    lower.compile_step(step, target)       -> tvm executable

The three public functions of the module, as a virtual machine sees them (`state` is one tuple of tensors):

    step(x..., target, lr: float32 scalar, state) -> (loss, predictions, new_state)
    predict(x..., state)                          -> predictions
    init()                                        -> state

The order of `state` is the order of `StepModule.state`: parameters, running statistics and frozen parameters,
optimizer, counters. A step takes over the state given to it, whose tensors hold the new one afterwards; go on with the
state that it returns. Other arguments stay as they are, and `init` gives fresh tensors each time. A model with several
inputs takes them in the order of `StepModule.inputs`. Symbolic extents are shared by name in the schemas.
"""

from __future__ import annotations
