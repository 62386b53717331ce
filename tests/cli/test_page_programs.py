# SPDX-License-Identifier: Apache-2.0
"""Python programs of the pages run as they stand, with small models for the names that they take as given.

Other tests run those of README, the guides, docs/CLOSURE.md and docs/ARCHITECTURE.md.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import tvm
from tvm import relax

from tests import tiny
from tests.cli.command import Command
from tests.training.small_models import relax_module, weights
from tvm_convgrad.training import from_module

DOCS = Path(__file__).parents[2] / "docs"


def programs(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def execute(page: str, program: str, names: dict[str, object]) -> dict[str, object]:
    exec(compile(program, page, "exec"), names)
    return names


def test_a_vmap_rule() -> None:
    builder = relax.BlockBuilder()
    grad = relax.Var("grad", relax.TensorType((3, 2, 5, 6, 6), "float32"))
    data = relax.Var("data", relax.TensorType((3, 2, 4, 6, 6), "float32"))
    with builder.function("main", [grad, data]):
        names = execute("BATCHING.md", programs("BATCHING.md")[0], {"builder": builder, "grad": grad, "data": data})
        dw = names["dw"]
        assert isinstance(dw, relax.Expr)
        builder.emit_func_output(dw)
    assert list(map(int, dw.ty.shape.values)) == [3, 5, 4, 3, 3]


def test_gradients_of_each_sample() -> None:
    x = relax.Var("x", relax.TensorType((4, 5), "float32"))
    target = relax.Var("target", relax.TensorType((4, 3), "float32"))
    w, b = relax.Var("w", relax.TensorType((5, 3), "float32")), relax.Var("b", relax.TensorType((3,), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, target, w, b]):
        with builder.dataflow():
            y = builder.emit(relax.op.add(relax.op.matmul(x, w), b))
            losses = builder.emit_output(relax.op.sum(relax.op.square(relax.op.subtract(y, target)), axis=1))
        builder.emit_func_output(losses)
    given = {"module": builder.get(), "model": from_module(relax_module(batch=8), parameters=weights())}
    names = execute("BATCHING.md", programs("BATCHING.md")[1], dict(given))
    assert "main_per_sample" in str(names["module"])


def test_an_ensemble() -> None:
    names = execute("BATCHING.md", programs("BATCHING.md")[2], {"module": relax_module(batch=8)})
    assert "step" in names


def test_batches_from_python(convgrad: Command, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    assert convgrad("build", tiny.write_model(tmp_path), "-o", step).code == 0
    (program,) = programs("DATA.md")
    fit = execute("DATA.md", program, {})["fit"]
    x, y = tiny.make_arrays(tiny.BATCH, 0)
    state = fit(str(step), [(x, y)], epochs=2)  # type: ignore[operator]
    assert all(np.isfinite(np.asarray(value)).all() for value in state.values())


def test_rules_for_a_pipeline() -> None:
    x = relax.Var("x", relax.TensorType((2, 4, 6, 6), "float32"))
    w = relax.Var("w", relax.TensorType((8, 4, 3, 3), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, w]):
        with builder.dataflow():
            loss = builder.emit_output(relax.op.sum(relax.op.nn.relu(relax.op.nn.conv2d(x, w))))
        builder.emit_func_output(loss)
    (program,) = programs("TVM.md")
    names = execute("TVM.md", program, {"module": builder.get(), "relax": relax, "tvm": tvm, "target": "llvm"})
    assert "NHWC" in str(names["module"])


def test_a_forced_kernel() -> None:
    random = np.random.default_rng(0)
    grad, data = (random.integers(-4, 5, shape).astype("float32") for shape in ((1, 3, 5, 5), (1, 2, 5, 5)))
    (program,) = programs("KERNELS.md")
    execute("KERNELS.md", program, {"grad": grad, "data": data})


def test_a_model_with_its_own_loss(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    (program,) = programs("BUILD.md")
    definition, export = program.rsplit("\n\n\n", 1)
    names: dict[str, object] = {"torch": torch, "x": torch.ones(4, 3), "target": torch.zeros(4, dtype=torch.int64)}
    detector = execute("BUILD.md", definition, names)["Detector"]

    class Small(detector):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            super().__init__()
            self.network, self.criterion = torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss()

    execute("BUILD.md", export, names | {"Detector": Small})
    (line,) = re.findall(
        r"^convgrad (build detector.*)$", (DOCS / "BUILD.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert convgrad(*line.split()).code == 0


def test_a_loop_over_ranks(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    assert convgrad("build", tiny.write_model(tmp_path), "-o", "step.so", "--split").code == 0
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    (program,) = programs("DISTRIBUTED.md")
    try:
        names = execute("DISTRIBUTED.md", program, {"batches_of": lambda rank: [tiny.make_arrays(tiny.BATCH, rank)]})
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert np.isfinite(names["loss"])  # type: ignore[call-overload]
