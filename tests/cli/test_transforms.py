# SPDX-License-Identifier: Apache-2.0
"""`--transforms`: the step's 3x3 kernels compute by Winograd's transform, are named so, and train as without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tvm

from tests.cli.command import Command
from tests.kernels.harness import NATIVE
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.training.runtime.session import Session

MACHINE = machine_of(tvm.target.Target(NATIVE))

SOURCE = """
from tvm import relax


def make(batch=8):
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorType((batch, 32, 20, 20), "float32"))
    shapes = {"w1": (32, 32, 3, 3), "b1": (32,), "w2": (32, 32, 3, 3), "out": (32, 5)}
    p = {name: relax.Var(name, relax.TensorType(shape, "float32")) for name, shape in shapes.items()}
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            h = builder.emit(relax.op.nn.conv2d(x, p["w1"], padding=1))
            h = builder.emit(relax.op.add(h, relax.op.reshape(p["b1"], (1, 32, 1, 1))))
            h = builder.emit(relax.op.nn.relu(h))
            h = builder.emit(relax.op.nn.conv2d(h, p["w2"], padding=1))
            h = builder.emit(relax.op.mean(relax.op.nn.relu(h), [2, 3]))
            h = builder.emit_output(relax.op.matmul(h, p["out"]))
        builder.emit_func_output(h)
    return builder.get()
"""


@pytest.mark.skipif(MACHINE is None or not MACHINE.has_masks, reason="the kernels need masked stores")
def test_a_step_with_transforms_trains_as_one_without(convgrad: Command, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SOURCE)
    model, losses, kernels = f"{tmp_path}/net.py:make", {}, {}
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((8, 32, 20, 20), dtype="float32"), rng.integers(0, 5, 8)
    for option in ("--no-tuned", "--transforms"):
        step = tmp_path / f"step{option}.so"
        done = convgrad("build", model, "-o", step, "--target", "native", option)
        assert done.code == 0, done.err
        session = Session(step)
        losses[option] = [session.step(x, y)[0] for _ in range(3)]
        kernels[option] = [row["kernel"] for row in convgrad("explain", step, "--json").json["gradients"]]
    assert sorted(kernels["--transforms"]) == ["winograd dgrad", "winograd wgrad", "winograd wgrad"]
    assert not any(kernel.startswith("winograd") for kernel in kernels["--no-tuned"])
    np.testing.assert_allclose(losses["--transforms"], losses["--no-tuned"], rtol=1e-5)
    assert losses["--transforms"][2] < losses["--transforms"][0]
    asked = convgrad("explain", model, "--transforms", "--target", "native", "--json").json["gradients"]
    assert [row["kernel"] for row in asked] == kernels["--transforms"]
