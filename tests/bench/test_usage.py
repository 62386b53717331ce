# SPDX-License-Identifier: Apache-2.0
"""What the bench refuses: layers that cannot be measured, options that mean nothing, missing baselines."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.bench.layers import SMALL
from tests.cli.command import Command


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--problem", "mb1ic4ih6oc8kh3_dt=bf16:bf16:bf16"], ["float32"]),
        (["--problem", "mb{n}ic4ih6oc8kh3"], ["static extents"]),
        (["--problem", "nothing"], ["nothing"]),
        (["--problem", SMALL, "--json", "/no/such/folder/x.json"], ["/no/such/folder does not exist"]),
        (["--problem", SMALL, "--roofline", "/no/such/folder/x.png"], ["/no/such/folder does not exist"]),
        (["--problem", SMALL, "--impl", "cudnn"], ["--impl cudnn", "kernel, transforms, onednn"]),
    ],
)
def test_refusals(convgrad: Command, arguments: list[str], parts: list[str]) -> None:
    convgrad("bench", *arguments, "--against", "stock").assert_sentence(*parts)


def test_jax_is_measured_in_float32_only(convgrad: Command) -> None:
    parts = ["--against jax", "float16", "leave jax out"]
    convgrad("bench", "--suite", "vgg16", "--dtype", "float16", "--against", "jax").assert_sentence(*parts)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--suite", "resnet51"],
        ["--suite", "resnet50,all"],
        ["--batch", "0"],
        ["--batch", "8,x"],
        ["--layout", "NCWH"],
        ["--target", "rocm"],
        ["--dtype", "int8"],
        ["--impl", "kernel,onednn"],
        ["--direction", "backwards"],
        ["--against", "tensorflow"],
        ["--resume"],
        ["--dtype", "float16", "--step", "resnet18", "--per-sample"],
        ["--threads", "0"],
        ["--bridge", "tensorflow"],
        ["--step", "resnet18_cifar", "--bridge", "torch"],
    ],
)
def test_wrong_usage(convgrad: Command, arguments: list[str]) -> None:
    done = convgrad("bench", *arguments)
    assert done.code == 2
    assert arguments[0] in done.err


def test_the_message_of_an_unknown_suite_names_groups(convgrad: Command) -> None:
    assert "use all, kinds, or some of resnet50" in " ".join(convgrad("bench", "--suite", "resnet51").err.split())


STEP = ["--step", "resnet18"]
PER_SAMPLE = [*STEP, "--per-sample"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (
            ["--suite", "all", *STEP],
            ["--suite is of layers", "leave out --step; to measure the step, leave out --suite."],
        ),
        (["--problem", SMALL, *STEP], ["--problem is of layers"]),
        (["--direction", "forward", *STEP], ["--direction is of layers"]),
        (["--against", "torch", *STEP], ["--against is of layers", "beside PyTorch"]),
        (["--markdown", "x.md", *STEP], ["--markdown is of layers"]),
        (["--roofline", "x.png", *STEP], ["--roofline is of layers"]),
        (["--json", "x.json", "--resume", *STEP], ["--resume is of layers"]),
        (["--direction", "forward", "--against", "jax", *PER_SAMPLE], ["--direction and --against are of layers"]),
        (["--layout", "NHWC", *PER_SAMPLE], ["--layout is not of --per-sample"]),
        (["--optimizer", "adam", "--loss", "mse", *PER_SAMPLE], ["--optimizer and --loss are not of --per-sample"]),
        (["--impl", "onednn", *PER_SAMPLE], ["--per-sample measures the generated kernels"]),
        (["--optimizer", "adam"], ["--optimizer is of whole training steps: to measure one, give --step MODEL"]),
        (["--loss", "cross_entropy", "--problem", SMALL], ["--loss is of whole training steps"]),
        (["--per-sample", "--problem", SMALL], ["--per-sample needs --step"]),
        (["--suite", "vgg16", "--problem", SMALL], ["--suite is part of the descriptor of --problem"]),
        (["--bridge", "torch", "--problem", SMALL], ["--problem is not of --bridge"]),
        (["--bridge", "torch", "--per-sample", "--impl", "kernel"], ["--per-sample and --impl are not of --bridge"]),
        (["--calls", "--problem", SMALL], ["--calls is for --bridge"]),
        (["--batch", "8", "--layout", "NCHW", "--problem", SMALL], ["--batch and --layout are part of the descriptor"]),
    ],
)
def test_options_that_mean_nothing(convgrad: Command, arguments: list[str], parts: list[str]) -> None:
    """Refused by what was given, also where it is the default."""
    done = convgrad("bench", *arguments)
    assert done.code == 2
    said = " ".join(done.err.replace("│", " ").split())
    for part in parts:
        assert part in said


def test_per_sample_gradients_are_of_cpus(convgrad: Command) -> None:
    convgrad("bench", "--step", "groupnorm_cifar", "--per-sample", "--target", "cuda").assert_sentence("not a CPU")


def test_baselines_of_other_devices_are_refused(convgrad: Command) -> None:
    convgrad("bench", "--problem", SMALL, "--against", "cudnn").assert_sentence("cudnn", "jax, stock, onednn")


def test_refused_layers_fail_the_run(convgrad: Command, tmp_path: Path) -> None:
    """PyTorch has no asymmetric padding: the other problem is measured all the same."""
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    lopsided = "mb1ic4ih6oc8kh3ph0rh1"
    done = convgrad(
        "bench", "--problem", lopsided, "--problem", SMALL, "--direction", "forward", "--seconds", 0, "--json", file
    )
    assert done.code == 1
    assert "1 could not be measured" in done.err
    content = json.loads(file.read_text())
    assert [entry["descriptor"] for entry in content["measurements"]] == [SMALL]
    assert "asymmetric" in content["failures"][0]["reason"]


@pytest.mark.parametrize(("baseline", "extra"), [("jax", "[bench]"), ("torch", "[torch]")])
def test_missing_baseline(convgrad: Command, monkeypatch: pytest.MonkeyPatch, baseline: str, extra: str) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == baseline else found(name, *rest)
    )
    convgrad("bench", "--problem", SMALL, "--against", f"stock,{baseline}").assert_sentence("not installed", extra)
