# SPDX-License-Identifier: Apache-2.0
"""A run that goes on from a checkpoint repeats one that was not interrupted, bit for bit, whatever it was built with.

The cases are drawn from the product of all options: a covering sample, in which each pair of values occurs (greedy, of
a fixed seed), and some more that change from day to day. A case's id says all that it was built with.
"""

from __future__ import annotations

import datetime
import itertools
import math
import os
import random
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
from tvm import relax

from relax_ops.single_run import QUICK_CONFIG
from tests.linked import PLAIN
from tvm_convgrad.core.errors import ArtifactError
from tvm_convgrad.report.gradients import describe_convolutions
from tvm_convgrad.training.compile.artifact_writer import make_manifest, save_artifact
from tvm_convgrad.training.compile.lower import compile_with_plan
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.training.frontends.onnx.model import from_onnx
from tvm_convgrad.training.model.model import Model, from_module
from tvm_convgrad.training.runtime.checkpoint import CHECKPOINT, Progress, load, load_latest, save
from tvm_convgrad.training.runtime.data import Samples
from tvm_convgrad.training.runtime.envelope import seal
from tvm_convgrad.training.runtime.loop import train
from tvm_convgrad.training.runtime.session import Session
from tvm_convgrad.training.step.build import build_step

BATCH, CLASSES = 4, 3
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd"},
    "momentum": {"optimizer": "sgd", "momentum": 0.9, "nesterov": True},
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw"},
    "lamb": {"optimizer": "lamb"},
}


class Case(NamedTuple):
    """What a step is built of."""

    source: str
    optimizer: str
    norm: bool
    dropout: bool
    dtype: str
    dynamic: bool
    accumulate: int
    frozen: bool

    @property
    def name(self) -> str:
        switches = [name for name in ("norm", "dropout", "dynamic", "frozen") if getattr(self, name)]
        return "-".join([self.source, self.optimizer, self.dtype, *switches, f"x{self.accumulate}"])


VALUES = (
    ("relax", "onnx", "pt2"),
    tuple(OPTIMIZERS),
    (False, True),
    (False, True),
    ("float32", "float16", "bfloat16"),
    (False, True),
    (1, 2),
    (False, True),
)
PRODUCT = [Case(*values) for values in itertools.product(*VALUES)]
ALL = [
    case
    for case in PRODUCT
    if not (case.source == "onnx" and case.frozen)  # ONNX has no frozen parameters
    and not (case.dynamic and case.accumulate > 1)  # micro-batches need a fixed batch
]


def pairs(case: Case) -> set[Any]:
    """The pairs of values of a case, each with its place."""
    return set(itertools.combinations(enumerate(case), 2))


def sample() -> list[Case]:
    """The covering sample, and some that change every day (or with CONVGRAD_SEED)."""
    order, left = random.Random(0).sample(ALL, len(ALL)), set().union(*map(pairs, ALL))
    chosen = []
    while left:
        chosen.append(max(order, key=lambda case: len(pairs(case) & left)))
        left -= pairs(chosen[-1])
    seed = os.environ.get("CONVGRAD_SEED", str(datetime.date.today().toordinal()))
    return list(dict.fromkeys([*chosen, *random.Random(seed).sample(ALL, 3)]))


CASES = sample()


def weights(norm: bool) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    arrays = {"w": rng.normal(0, 0.5, (4, 2, 3, 3)), "out": rng.normal(0, 0.5, (4, CLASSES))}
    if norm:
        arrays |= {"gamma": np.ones(4), "beta": np.zeros(4), "mean": np.zeros(4), "var": np.ones(4)}
    return {name: array.astype("float32") for name, array in arrays.items()}


def relax_model(case: Case) -> Model:
    """Conv, batch norm, relu, mean, dropout, linear."""
    values = weights(case.norm)
    batch = tvm.tirx.Var("n", "int64") if case.dynamic else BATCH
    x = relax.Var("x", relax.TensorType((batch, 2, 5, 5), "float32"))
    p = {name: relax.Var(name, relax.TensorType(value.shape, "float32")) for name, value in values.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", [x, *p.values()]):
        with builder.dataflow():
            y = builder.emit(relax.op.nn.conv2d(x, p["w"], padding=1))
            if case.norm:
                y = builder.emit(relax.op.nn.batch_norm(y, *(p[n] for n in ("gamma", "beta", "mean", "var")), axis=1))
                y = builder.emit(relax.TupleGetItem(y, 0))
            y = builder.emit(relax.op.mean(builder.emit(relax.op.nn.relu(y)), [2, 3]))
            if case.dropout:
                y = builder.emit(builder.emit(relax.op.nn.dropout(y, 0.3))[0])
            y = builder.emit_output(relax.op.matmul(y, p["out"]))
        builder.emit_func_output(y)
    frozen = ("w", "gamma", "beta") if case.frozen else ()
    return from_module(builder.get(), parameters=values, frozen=[name for name in frozen if name in values])


def onnx_model(case: Case) -> Model:
    """The same network by way of ONNX."""
    from onnx import TensorProto, helper, numpy_helper

    batch = "n" if case.dynamic else BATCH
    nodes, last = [helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1])], "c"
    if case.norm:
        nodes.append(helper.make_node("BatchNormalization", [last, "gamma", "beta", "mean", "var"], ["b"]))
        last = "b"
    nodes += [helper.make_node("Relu", [last], ["r"]), helper.make_node("GlobalAveragePool", ["r"], ["g"])]
    nodes.append(helper.make_node("Flatten", ["g"], ["f"]))
    values, last = weights(case.norm), "f"
    initializers = [numpy_helper.from_array(value, name) for name, value in values.items()]
    if case.dropout:
        initializers.append(numpy_helper.from_array(np.array(0.3, "float32"), "ratio"))
        nodes.append(helper.make_node("Dropout", [last, "ratio"], ["d"]))
        last = "d"
    nodes.append(helper.make_node("MatMul", [last, "out"], ["y"]))
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 2, 5, 5])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, CLASSES])],
        initializers,
    )
    return from_onnx(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))


def torch_model(case: Case) -> Model:
    """The same network by way of torch.export: its batch norm counts its batches in a scalar."""
    torch = pytest.importorskip("torch")
    from tvm_convgrad.training.frontends.torch_export.model import from_exported_program

    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor(1.5))  # a scalar that is trained

        def forward(self, x):
            return x.mean((2, 3)) * self.scale

    torch.manual_seed(0)
    norm = [torch.nn.BatchNorm2d(4)] if case.norm else []
    drop = [torch.nn.Dropout(0.3)] if case.dropout else []
    first = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1), *norm)
    network = torch.nn.Sequential(first, torch.nn.ReLU(), Mean(), *drop, torch.nn.Linear(4, CLASSES)).train()
    first.requires_grad_(not case.frozen)
    shapes = ({0: torch.export.Dim("n", min=2)},) if case.dynamic else None
    return from_exported_program(torch.export.export(network, (torch.zeros(BATCH, 2, 5, 5),), dynamic_shapes=shapes))


def built(case: Case, model: Model, path: Path) -> Path:
    """The artifact of a case, compiled as fast as can be."""
    options = OPTIMIZERS[case.optimizer]
    step = build_step(model, lr=0.05, dtype=case.dtype, accumulate=case.accumulate, seed=3, **options)
    with tvm.transform.PassContext(config=QUICK_CONFIG):
        executable, plan = compile_with_plan(step, PLAIN)
        save_artifact(executable, make_manifest(step, parse_target("llvm"), describe_convolutions(plan)), path)
    return path


def data(case: Case) -> Samples:
    rng = np.random.default_rng(1)
    count = 2 * BATCH * case.accumulate + 1
    return Samples((rng.normal(size=(count, 2, 5, 5)).astype("float32"),), rng.integers(0, CLASSES, count))


def check_resumed(case: Case, path: Path, folder: Path) -> None:
    """Three epochs of two steps at once, and stopped in the midst of the second one."""
    samples, size = data(case), BATCH * case.accumulate
    whole, progress = Session(path), Progress("a", "d", 7, size, 0.05)
    assert any(not spec.shape for spec in whole.artifact.state) == (
        case.optimizer in ("adam", "adamw", "lamb") or case.dropout or case.source == "pt2"
    )
    list(train(whole, samples, progress, 3))
    assert all(map(math.isfinite, progress.losses))
    first, begun = Session(path), Progress("a", "d", 7, size, 0.05)
    for _ in itertools.islice(train(first, samples, begun, 3), 3):
        pass
    save(folder, begun, first.state)
    checkpoint, complaints = load_latest(folder)
    assert checkpoint is not None
    assert not complaints
    second = Session(path)
    second.state = checkpoint.state
    list(train(second, samples, checkpoint.progress, 3))
    assert checkpoint.progress.losses == progress.losses
    found, wanted = second.state, whole.state
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        assert (found[name].shape, found[name].dtype) == (array.shape, array.dtype)
        assert found[name].tobytes() == array.tobytes(), name


def named(*sources: str) -> Any:
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.name) for case in CASES if case.source in sources]
    )


@named("relax", "onnx")
def test_resumed_run_repeats_the_bits(case: Case, tmp_path: Path) -> None:
    if case.source == "onnx":
        pytest.importorskip("onnx")
    model = relax_model(case) if case.source == "relax" else onnx_model(case)
    check_resumed(case, built(case, model, tmp_path / "step.so"), tmp_path / "checkpoints")


@named("pt2")
def test_resumed_run_of_a_pytorch_model_repeats_the_bits(case: Case, tmp_path: Path) -> None:
    check_resumed(case, built(case, torch_model(case), tmp_path / "step.so"), tmp_path / "checkpoints")


def test_the_sample_covers_all_pairs() -> None:
    assert set().union(*map(pairs, CASES)) == set().union(*map(pairs, ALL))
    assert len(CASES) < 30


def test_checkpoint_with_scalars_of_version_0_1_0_loads(tmp_path: Path) -> None:
    """Bytes laid out by hand as version 0.1.0 wrote them: scalars with the shape [], in a row, then the seal."""
    losses, step, weight = np.array([0.5, 0.25]), np.array(7, "int64"), np.arange(6, dtype="float32").reshape(2, 3).T
    arrays = [
        {"name": "losses", "dtype": "float64", "shape": [2], "offset": 0},
        {"name": "state/step", "dtype": "int64", "shape": [], "offset": 16},
        {"name": "state/w", "dtype": "float32", "shape": [3, 2], "offset": 24},
    ]
    place = {"artifact": "a", "data": "d", "seed": 1, "batch_size": 4, "lr": 0.1, "epoch": 1, "position": 0}
    payload = losses.tobytes() + step.tobytes() + np.ascontiguousarray(weight).tobytes()
    content, _ = seal(CHECKPOINT, payload, {"progress": place, "arrays": arrays})
    path = tmp_path / "step-0000000002.ckpt"
    path.write_bytes(content)
    found = load(path)
    assert found.progress == Progress("a", "d", 1, 4, 0.1, epoch=1, position=0, losses=[0.5, 0.25])
    assert found.state["step"].shape == ()
    assert found.state["step"] == 7
    np.testing.assert_array_equal(found.state["w"], weight)
    again = save(tmp_path / "again", found.progress, {"step": step, "w": weight})
    assert again.read_bytes() == content  # nothing has changed for old readers either


def test_scalars_of_a_state_keep_their_rank(tiny_model: str, tmp_path: Path) -> None:
    from tests.conftest import build_tiny

    session = Session(build_tiny(tiny_model, tmp_path / "step.so", optimizer="adam"))
    state = session.state
    assert state["step"].shape == ()
    session.state = state | {"step": 5}  # whatever numpy reads as a scalar
    assert session.state["step"] == 5
    with pytest.raises(ArtifactError, match="'step' has 1 axes"):
        session.state = state | {"step": np.array([5])}
