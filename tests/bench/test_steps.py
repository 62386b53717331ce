# SPDX-License-Identifier: Apache-2.0
"""`bench --step`: the networks are the published ones, both contenders train alike, what cannot be compared is said."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.cli.command import Command
from tvm_convgrad.bench.contenders import BUILT_IN, Training, alone
from tvm_convgrad.bench.steps import SETTINGS, StepMeasurement
from tvm_convgrad.core.errors import SetupError

PARAMETERS = {
    "resnet18_cifar": 11_173_962,  # kuangliu/pytorch-cifar
    "resnet18": 11_689_512,  # torchvision's documentation, as the next two
    "mobilenet_v2": 3_504_872,
    "convnext_t": 28_589_128,
    "groupnorm_cifar": 195_978,  # our own
}


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command on one thread: more of them only wait for each other where tests run side by side."""
    monkeypatch.setattr("tvm_convgrad.bench.steps.use_threads", lambda _wanted: 1)
    return Command(monkeypatch, capfd)


def write_pt2(path: Path, *, train: bool = True) -> Path:
    """A small network with a batch norm, exported for batches of 4."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    layers = (nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))
    module = nn.Sequential(*layers).train(train)
    torch.export.save(torch.export.export(module, (torch.zeros(4, 2, 6, 6),)), path)
    return path


@pytest.mark.parametrize("name", BUILT_IN)
def test_networks_are_the_published_ones(name: str) -> None:
    torch = pytest.importorskip("torch")
    from tvm_convgrad.bench.networks import NETWORKS, network

    assert set(PARAMETERS) == set(BUILT_IN) == set(NETWORKS)
    module, size = network(name)
    assert sum(parameter.numel() for parameter in module.parameters()) == PARAMETERS[name]
    classes = 10 if name.endswith("_cifar") else 1000
    with torch.no_grad():
        assert module(torch.zeros(2, 3, size, size)).shape == (2, classes)


def test_per_sample_gradients_against_pytorch(convgrad: Command, tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("torch")
    from tvm_convgrad.bench import networks

    monkeypatch.setattr("tvm_convgrad.bench.per_sample.use_threads", lambda _wanted: 1)
    monkeypatch.setattr("tvm_convgrad.bench.per_sample.RESULTS", ("clipped",))  # each takes a compilation
    monkeypatch.setitem(networks.NETWORKS, "groupnorm_cifar", (lambda: networks.GroupNormCifar(10, 8, 1), 8))
    file = tmp_path / "samples.json"
    done = convgrad("bench", "--step", "groupnorm_cifar", "--per-sample", "--batch", 4, "--seconds", 0, "--json", file)
    assert done.code == 0, done.err
    entries = json.loads(file.read_text())["per_sample"]
    assert [entry["result"] for entry in entries] == ["clipped"]
    assert all(entry["batch"] == 4 and entry["pairs"] >= 5 for entry in entries)
    assert all(min(entry["ours"], entry["theirs"], entry["ratio"]) > 0 for entry in entries)
    assert "per-sample gradients" in done.out
    convgrad("bench", "--step", "x.pt2", "--per-sample").assert_sentence("resnet18_cifar")


def test_a_bridge_is_measured(convgrad: Command, tmp_path: Path) -> None:
    """In a process of its own, which takes the choices that the first one has kept."""
    pytest.importorskip("torch")
    file = tmp_path / "bridge.json"
    arguments = ("bench", "--bridge", "torch", "--step", "groupnorm_cifar", "--batch", 1, "--layout", "NHWC")
    done = convgrad(*arguments, "--seconds", 0, "--threads", 1, "--calls", "--json", file)
    assert done.code == 0, done.err
    (entry,) = json.loads(file.read_text())["steps"]
    assert (entry["model"], entry["batch"], entry["layout"], entry["pairs"]) == ("groupnorm_cifar", 1, "NHWC", 5)
    assert entry["kernels"] + entry["mixed"] + entry["own"] == 14
    assert min(entry["with_bridge"], entry["without"], entry["ratio"]) > 0
    assert "with, ms" in done.out
    assert len(entry["calls"]) == 14
    assert sum(each["uses"] for each in entry["calls"]) == 2 * 10
    assert all(min(each["flop"], each["processor_ratio"]) > 0 and each["pairs"] >= 5 for each in entry["calls"])
    assert "14 calls" in done.out


def test_the_account_of_a_step() -> None:
    """Half of a step is convolutions: it cannot be more than twice as fast."""
    from tvm_convgrad.bench.bridge_calls import CallMeasurement, account
    from tvm_convgrad.bench.bridge_pairs import Pairs, Turn

    def call(uses: int, with_bridge: float, without: float) -> CallMeasurement:
        pairs = Pairs((Turn(with_bridge, with_bridge),) * 3, (Turn(without, 2 * without),) * 3)
        return CallMeasurement.of("call", uses, "kernel", 6_000_000, pairs)

    found = account(8.0, [call(1, 1.0, 1.0), call(2, 0.5, 0.4), call(1, 0.25, 0.2)])
    assert (found.share, found.speedup, found.most) == pytest.approx((0.5, 4.0 / 2.25, 2.0))
    assert (found.calls, found.slower, found.worst) == (3, 2, pytest.approx(0.8))
    assert (found.processor_slower, found.processor_worst) == (0, pytest.approx(1.6))
    assert (found.rate, found.own_rate) == pytest.approx((24e6 / 2.25, 6e6))


@pytest.mark.jax
def test_the_bridge_to_jax_is_measured(convgrad: Command, tmp_path: Path) -> None:
    """Two layers, of the first no dgrad: five kernels."""
    pytest.importorskip("jax")
    file = tmp_path / "bridge.json"
    arguments = ("bench", "--bridge", "jax", "--step", "small", "--batch", 2, "--layout", "NCHW,NHWC", "--seconds", 0)
    done = convgrad(*arguments, "--calls", "--json", file)
    assert done.code == 0, done.err
    entries = json.loads(file.read_text())["steps"]
    assert [(entry["model"], entry["layout"], entry["pairs"]) for entry in entries] == [
        ("small", "NCHW", 5),
        ("small", "NHWC", 5),
    ]
    for entry in entries:
        assert entry["kernels"] + entry["own"] == 5
        assert [each["uses"] for each in entry["calls"]] == [1] * 5
        assert min(entry["with_bridge"], entry["without"], entry["ratio"]) > 0
    assert "training steps of JAX" in done.out
    convgrad("bench", "--bridge", "jax", "--threads", 1).assert_sentence("--threads has no effect on --bridge jax")


@pytest.mark.jax
def test_networks_of_jax() -> None:
    jax = pytest.importorskip("jax")
    from tvm_convgrad.bench.bridge import BRIDGES
    from tvm_convgrad.bench.jax_networks import JAX_NETWORKS, Tape

    assert BRIDGES["jax"].models == tuple(JAX_NETWORKS)
    for name, count in {"resnet18": 11_689_512, "mobilenet_v2": 3_504_872}.items():  # torchvision's
        for layout, shape in (("NCHW", (1, 3, 32, 32)), ("NHWC", (1, 32, 32, 3))):
            tape = Tape(layout)
            logits = jax.eval_shape(
                lambda x, tape=tape, name=name: JAX_NETWORKS[name][0](tape, x), jax.ShapeDtypeStruct(shape, "float32")
            )
            assert logits.shape == (1, 1000)
            assert sum(each.size for each in tape.made) == count


def test_networks_of_bridges() -> None:
    torch = pytest.importorskip("torch")
    from tvm_convgrad.bench.bridge import MODELS
    from tvm_convgrad.bench.bridge_networks import BRIDGE_NETWORKS

    assert set(MODELS) == set(BRIDGE_NETWORKS)
    parameters = {"resnet50": 25_557_032, "cnn3d": 3_618_608, "unet": 1_944_202}  # torchvision's; our own
    for name, count in parameters.items():
        make, (channels, *extents) = BRIDGE_NETWORKS[name]
        module = make()
        assert sum(parameter.numel() for parameter in module.parameters()) == count, name
        with torch.no_grad():
            assert module(torch.zeros(1, channels, *(extent // 2 for extent in extents))).shape[0] == 1


@pytest.mark.parametrize("optimizer", SETTINGS)
def test_a_file_against_pytorch(convgrad: Command, tmp_path: Path, optimizer: str) -> None:
    pytest.importorskip("torch")
    file, model = tmp_path / "step.json", write_pt2(tmp_path / "net.pt2")
    arguments: list[Any] = ["--optimizer", optimizer, "--seconds", 0, "--json", file]
    done = convgrad("bench", "--step", model, "--layout", "NCHW", *arguments)
    assert done.code == 0, done.err
    (entry,) = json.loads(file.read_text())["steps"]
    assert set(entry) == {field.name for field in fields(StepMeasurement)}
    assert (entry["batch"], entry["layout"], entry["optimizer"]) == (4, "NCHW", optimizer)
    assert entry["loss"] == pytest.approx(entry["baseline_loss"], rel=1e-4)
    assert entry["variant"] in ("torch contiguous", "torch channels_last")
    assert min(entry["ours"], entry["theirs"], entry["ratio"], entry["compile_seconds"]) > 0
    assert entry["pairs"] >= 5
    assert isinstance(entry["memory"], int)
    assert isinstance(entry["baseline_memory"], int)
    assert "training steps" in done.out


def test_other_files_have_no_baseline(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    path, function = tiny_model.split(":")
    file, other = tmp_path / "step.json", f"{shutil.copy(path, tmp_path / 'other.py')}:{function}"
    done = convgrad("bench", "--step", f"{tiny_model},{other}", "--seconds", 0, "--json", file)
    assert done.code == 0, done.err
    entries = json.loads(file.read_text())["steps"]
    wanted = [(model, layout) for model in (tiny_model, other) for layout in ("NCHW", "NHWC")]
    assert [(entry["model"], entry["layout"]) for entry in entries] == wanted
    assert all(
        entry["theirs"] is entry["ratio"] is entry["variant"] is entry["baseline_memory"] is None for entry in entries
    )
    assert all(entry["ours"] > 0 and entry["compile_seconds"] > 0 for entry in entries)


@pytest.mark.onednn
def test_a_library_computes_the_step(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    file = tmp_path / "step.json"
    arguments = ["--layout", "NCHW", "--seconds", 0, "--json", file]
    losses = []
    for impl in ("onednn", "kernel"):
        done = convgrad("bench", "--step", tiny_model, "--impl", impl, *arguments)
        assert done.code == 0, done.err
        (entry,) = json.loads(file.read_text())["steps"]
        assert entry["impl"] == impl
        losses.append(entry["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_models_that_do_not_train_alike(convgrad: Command, tmp_path: Path) -> None:
    """In eval mode PyTorch normalises by running statistics, a step by those of the batch."""
    pytest.importorskip("torch")
    model = write_pt2(tmp_path / "net.pt2", train=False)
    convgrad("bench", "--step", model, "--layout", "NCHW", "--seconds", 0).assert_sentence("train mode")


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["resnet19"], "resnet18_cifar"),
        (["TINY,resnet19"], "--step resnet19"),
        (["missing.onnx"], "does not exist"),
        (["TINY", "--json", "/no/such/folder/x.json"], "/no/such/folder"),
    ],
)
def test_refusals(convgrad: Command, tiny_model: str, arguments: list[str], part: str) -> None:
    convgrad("bench", "--step", *(word.replace("TINY", tiny_model) for word in arguments)).assert_sentence(part)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [(["--optimizer", "lion"], "sgd, adam, adamw"), (["--loss", "hinge"], "cross_entropy, nll, bce, mse")],
)
def test_wrong_choices(convgrad: Command, tiny_model: str, arguments: list[str], part: str) -> None:
    done = convgrad("bench", "--step", tiny_model, *arguments)
    assert (done.code, done.out) == (2, "")
    assert part in " ".join(done.err.replace("│", " ").split())


def test_memory_of_a_contender_that_fails(tmp_path: Path) -> None:
    training = Training("x.onnx", str(tmp_path / "none.so"), (1, 1), (1,), 2, "sgd", SETTINGS["sgd"], "cross_entropy")
    with pytest.raises(SetupError, match="ours could not be measured in a process"):
        alone("ours", training, 1)
