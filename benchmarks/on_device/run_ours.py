# SPDX-License-Identifier: Apache-2.0
"""Our step, `step FOLDER THREADS SECONDS`, or both gradients of a convolution, `layer`: measured as theirs are."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tvm
from process import LR, batch, measure, norm

from tvm_convgrad.codegen.hardware import native_target
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.device.files import Runtime
from tvm_convgrad.measure.program import tvm_call
from tvm_convgrad.threads import use_threads
from tvm_convgrad.training.runtime.session import Session

LIBRARY = "ours.so"


def load_step(folder: Path) -> Callable[[], float]:
    """The compiled step, as `convgrad build` has made it."""
    session, arrays = Session(folder / LIBRARY), batch(folder)
    return lambda: session.step(arrays["x"], arrays["y"], lr=LR)[0]


def load_layer(folder: Path) -> Callable[[], float]:
    """Both gradients of a convolution."""
    arrays = batch(folder)
    problem = ConvProblem.from_descriptor(json.loads((folder / "layer.json").read_text()))
    operands = {"grad": arrays["dy"], "data": arrays["x"], "weight": arrays["w"]}
    calls = [
        tvm_call(each, problem, operands, native_target(), "kernel") for each in ("backward_data", "backward_weight")
    ]

    return lambda: [call.run() for call in calls][1]


def main() -> None:
    """Measure, as the command line says."""
    action, folder = sys.argv[1], Path(sys.argv[2])
    use_threads(int(sys.argv[3]))
    tvm.runtime.tensor(np.zeros(1, "float32"))  # TVM is loaded before the memory is looked at
    runtime = Runtime.installed()
    made = [folder / LIBRARY] if action == "step" else []
    load, read = (load_step, float) if action == "step" else (load_layer, lambda result: norm(result.numpy()))
    measure(lambda: load(folder), read, float(sys.argv[4]), [runtime.tvm, runtime.ffi], made)


if __name__ == "__main__":
    main()
