# SPDX-License-Identifier: Apache-2.0
"""What --save-state writes: all that predictions depend on, frozen parameters too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tvm

from relax_ops.single_run import QUICK_CONFIG
from tests.cli.command import Command
from tests.linked import PLAIN
from tests.training.small_models import data, weights
from tests.training.test_frozen import FROZEN, STATISTICS, small
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.step.build import build_step


def test_save_state_has_frozen_parameters(convgrad: Command, tmp_path: Path) -> None:
    step, state = build_step(small(), lr=0.1), tmp_path / "state.npz"
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        executable, _ = compile_with_plan(step, PLAIN)
        save_artifact(executable, make_manifest(step, parse_target("llvm"), []), tmp_path / "step.so")
    x, labels = data(24)
    np.savez(tmp_path / "data.npz", x_train=x, y_train=labels)
    run = ["run", tmp_path / "step.so", "--data", tmp_path / "data.npz", "--epochs", 1, "--save-state", state]
    assert convgrad(*run, "--checkpoint-dir", tmp_path / "checkpoints").code == 0
    with np.load(state) as saved:
        assert set(saved) == set(weights())
        for name in (*FROZEN, *STATISTICS):
            np.testing.assert_array_equal(saved[name], weights()[name])
