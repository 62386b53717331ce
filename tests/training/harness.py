# SPDX-License-Identifier: Apache-2.0
"""Running a training step on numpy arrays."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import numpy as np
import tvm
from tvm import relax

from tests.linked import quick_module, quick_step
from tvm_convgrad.training.compile.lower import compile_with_plan


class Runner:
    """A compiled step with its state; compiled in a fifth of the time, for this architecture, without a target.

    Without a target `predict` is compiled when it is called first: most tests only train.
    """

    def __init__(self, step, target=None, backends=("none",)):
        self.step_module = step
        if target is None:
            self.machine = quick_step(replace(step, module=_part(step, predicts=False)))
        else:
            self.machine = relax.VirtualMachine(compile_with_plan(step, target, backends)[0], tvm.cpu())
            self._predict = self.machine["predict"]
        self.state = self.machine["init"]()

    def reset(self):
        """Go back to the initial state."""
        self.state = self.machine["init"]()

    def step(self, *arrays, lr):
        """One step on inputs and target; gives loss and predictions."""
        tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
        loss, predictions, self.state = self.machine["step"](*tensors, tvm.runtime.tensor(np.float32(lr)), self.state)
        return float(loss.numpy()), predictions.numpy()

    def predict(self, *arrays):
        tensors = [tvm.runtime.tensor(np.ascontiguousarray(array)) for array in arrays]
        return self._predict(*tensors, self.state).numpy()

    @cached_property
    def _predict(self):
        return quick_module(_part(self.step_module, predicts=True))["predict"]

    def named(self, *roles):
        """The tensors of the state with these roles, by name."""
        schemas = self.step_module.state
        return {
            schema.name: value.numpy()
            for schema, value in zip(schemas, self.state, strict=True)
            if not roles or schema.role in roles
        }


def _part(step, predicts):
    """The module of a step with its function `predict` alone, or with all others."""
    module = step.module
    functions = {key: body for key, body in module.functions.items() if (key.name_hint == "predict") == predicts}
    return tvm.IRModule(functions, attrs=module.attrs, global_infos=module.global_infos)


def relative_error(found, expected):
    """The largest difference, relative to the largest value expected (at least 1e-6)."""
    found, expected = np.asarray(found, "float64"), np.asarray(expected, "float64")
    assert found.shape == expected.shape
    return float(np.abs(found - expected).max(initial=0.0) / max(np.abs(expected).max(initial=0.0), 1e-6))
