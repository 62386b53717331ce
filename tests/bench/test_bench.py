# SPDX-License-Identifier: Apache-2.0
"""The bench: layer tables against known totals, what one run leaves, going on with it, and what it refuses."""

from __future__ import annotations

import importlib.util
import itertools
import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from tests.cli.command import Command
from tvm_convgrad.bench import measure as measuring
from tvm_convgrad.bench import peak
from tvm_convgrad.bench.markdown import document
from tvm_convgrad.bench.measure import Measurement, geometric_mean
from tvm_convgrad.bench.peak import DOT_PEAK, DTYPE, FMA_PEAK, HALVES, Peak, peak_kernel, registers_of_sums
from tvm_convgrad.bench.results import Results, dense_kind, means
from tvm_convgrad.bench.roofline import Roofline, triad_kernel
from tvm_convgrad.bench.suites import KINDS, NETWORKS, SUITES, Layer, suite
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.cpu_features import local_features
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.measure import timing
from tvm_convgrad.measure.timing import Call
from tvm_convgrad.training.compile.targets import parse_target

# Multiply-accumulates of one image at 224 x 224, in 1e9, linear classifiers left out, as the papers (or fvcore) count;
# I3D counts 108 for 64 frames.
MACS = {"resnet50": 4.09, "mobilenet_v2": 0.300, "vgg16": 15.35, "convnext_t": 4.45, "i3d": 108 / 4}
SMALL = "mb1ic4ih6oc8oh6kh3ph1"
ROOFLINE = Roofline(gflops=100.0, bandwidth=10.0, threads=2, machine="AVX2")


@pytest.fixture
def convgrad(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The command on one thread, without the second that measuring the machine's limits takes."""
    monkeypatch.setattr("tvm_convgrad.bench.layers.use_threads", lambda _wanted: 1)
    monkeypatch.setattr("tvm_convgrad.bench.layers.measure_roofline", lambda _peak: ROOFLINE)
    return Command(monkeypatch, capfd)


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("name", MACS)
def test_layers_add_up_to_the_network(name: str, layout: str) -> None:
    layers = suite(name, 1, layout)
    tolerance = 0.05 if name == "i3d" else 0.01  # its padding is another one
    total = sum(problem.macs * count for problem, count in layers.items()) / 1e9
    assert total == pytest.approx(MACS[name], rel=tolerance)


def test_kinds_are_of_their_kind() -> None:
    assert set(SUITES) == set(NETWORKS) | set(KINDS)
    layers = {name: suite(name, 2, "NHWC") for name in KINDS}
    assert all(problem.groups == 32 for problem in layers["resnext50"])
    assert sum(layers["resnext50"].values()) == 16
    assert {problem.dilation[0] for problem in layers["deeplab"]} == {2, 4, 12, 24, 36}
    assert all(problem.rank == 3 and problem.data_layout == "NDHWC" for problem in layers["i3d"])
    assert [(p.out_channels, p.grad_extents[0], p.data_extents[0]) for p in layers["unet"]] == [
        (1024, 16, 32),
        (512, 32, 64),
        (256, 64, 128),
        (128, 128, 256),
    ]


@pytest.mark.parametrize("target", ["native", "llvm", '{"kind": "llvm", "mcpu": "haswell"}'])
def test_kernels_of_the_roofline_compute(target: str) -> None:
    """Both do the work that is counted: sum * 0.5 + 0.5 comes to rest at 1, and the triad's sums are exact."""
    compiled_for = parse_target(target)
    machine = machine_of(compiled_for)
    assert machine is not None
    lanes, items = machine.lanes(DTYPE), 3
    peak = tvm.compile(tvm.IRModule({"main": peak_kernel(machine, items)}), compiled_for)["main"]
    result = tvm.runtime.tensor(np.full(items * registers_of_sums(machine) * lanes, np.nan, DTYPE))
    peak(tvm.runtime.tensor(np.full(2 * lanes, 0.5, DTYPE)), result)
    assert (result.numpy() == 1).all()
    elements = items * lanes * 7
    a, b = (np.arange(elements, dtype=DTYPE) + first for first in (2, 5))
    c = tvm.runtime.tensor(np.full(elements, np.nan, DTYPE))
    triad = tvm.compile(tvm.IRModule({"main": triad_kernel(machine, elements, items)}), compiled_for)["main"]
    triad(tvm.runtime.tensor(a), tvm.runtime.tensor(b), c)
    np.testing.assert_array_equal(c.numpy(), a + np.tile(a[:lanes], items * 7) * b)


def test_attainable_is_the_lower_limit() -> None:
    assert (ROOFLINE.attainable(1.0), ROOFLINE.attainable(10.0), ROOFLINE.attainable(1000.0)) == (10.0, 100.0, 100.0)


def test_what_a_run_leaves(convgrad: Command, tmp_path: Path) -> None:
    file, picture, table = tmp_path / "out.json", tmp_path / "roofline.png", tmp_path / "table.md"
    done = convgrad(
        "bench",
        "--problem",
        SMALL,
        "--against",
        "stock",
        "--seconds",
        0,
        "--json",
        file,
        "--roofline",
        picture,
        "--markdown",
        table,
    )
    assert done.code == 0, done.err
    content = json.loads(file.read_text())
    assert content["roofline"] == asdict(ROOFLINE)
    assert content["failures"] == []
    entries = content["measurements"]
    assert [entry["direction"] for entry in entries] == ["backward_weight", "backward_data"]
    problem = ConvProblem.from_descriptor(SMALL)
    for entry in entries:
        assert set(entry) == {field.name for field in fields(Measurement)}
        assert entry["kernel"] not in ("composition", "stock")
        assert entry["baseline"] == entry["variant"] == "stock"
        assert entry["pairs"] in (1, timing.MIN_PAIRS)
        assert min(entry["ratio"], entry["ours"], entry["theirs"], entry["compile_seconds"]) > 0
        assert entry["gflops"] == pytest.approx(2e-9 * problem.macs / entry["ours"])
        assert entry["peak"] > 0
        assert entry["intensity"] == 2 * problem.macs / problem.bytes
        assert entry["descriptor"] == problem.descriptor
    assert {row["direction"] for row in content["means"]} == {"backward_weight", "backward_data", "gradients"}
    assert picture.read_bytes().startswith(b"\x89PNG")
    (line,) = [line for line in table.read_text().splitlines() if f"`{problem.descriptor}`" in line]
    shares = [f"{entries[0][rate] / entries[0]['peak']:.0%}" for rate in ("gflops", "baseline_gflops")]
    assert line.count(f"{entries[0]['ratio']:.2f} ({entries[0]['gflops']:.0f}, {', '.join(shares)})") >= 1
    assert "| wgrad (GFLOP/s, peak, its peak) | dgrad (GFLOP/s, peak, its peak) |" in table.read_text()
    assert problem.descriptor in "".join(done.out.split())
    again = convgrad("bench", "--problem", entries[0]["descriptor"], "--against", "stock", "--seconds", 0)
    assert again.code == 0


def test_slow_baseline_is_measured_once(convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call that checked the result is the only one where it took longer than all pairs may."""
    file = tmp_path / "out.json"
    monkeypatch.setattr(measuring, "_checked", lambda *_arguments: 100.0)
    done = convgrad("bench", "--problem", SMALL, "--direction", "forward", "--against", "stock", "--json", file)
    (entry,) = json.loads(file.read_text())["measurements"]
    assert entry["pairs"] == 1
    assert entry["peak"] > 0
    assert entry["theirs"] == 100.0
    assert "1 of 1 layers were measured by a single pair" in done.err


@pytest.mark.parametrize("baseline", ["torch", "jax"])
@pytest.mark.parametrize(
    "descriptor",
    [
        "mb2ic4ih7iw9oc6kh3kw2sh2sw1ph1pw0",
        "g2mb2ic4ih7oc6kh3dh1ph2_lay=NHWC:OHWI:NHWC",
        "g4mb2ic4ih7oc4kh3ph1_lay=CNHW:IHWO:NCHW",
        "mb2ic3iw9oc4kw3pw1_lay=NWC:WIO:NWC",
        "mb1ic2id5oc3kd3sd2pd1_lay=NDHWC:ODHWI:NDHWC",
    ],
)
def test_baselines_compute_the_same(convgrad: Command, tmp_path: Path, descriptor: str, baseline: str) -> None:
    """The bench itself refuses results that differ; here each direction, layout and rank comes through."""
    pytest.importorskip("torch" if baseline == "torch" else "jax")
    file = tmp_path / "out.json"
    done = convgrad(
        "bench", "--problem", descriptor, "--direction", "all", "--against", baseline, "--seconds", 0, "--json", file
    )
    assert done.code == 0, done.err
    entries = json.loads(file.read_text())["measurements"]
    assert [(e["direction"], e["baseline"]) for e in entries] == [
        (direction, baseline) for direction in ("backward_weight", "backward_data", "forward")
    ]


@pytest.mark.parametrize(
    ("suffix", "variant"), [("", "torch contiguous"), ("_lay=NHWC:OHWI:NHWC", "torch channels_last")]
)
def test_pytorch_in_the_same_layout(convgrad: Command, tmp_path: Path, suffix: str, variant: str) -> None:
    pytest.importorskip("torch")
    file = tmp_path / "out.json"
    arguments = ["--direction", "forward", "--against", "torch-same", "--seconds", 0, "--json", file]
    assert convgrad("bench", "--problem", SMALL + suffix, *arguments).code == 0
    (entry,) = json.loads(file.read_text())["measurements"]
    assert (entry["baseline"], entry["variant"]) == ("torch-same", variant)


def test_results_that_differ_are_refused(convgrad: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*arguments: Any) -> Any:
        (call,) = stock(*arguments)
        return [replace(call, read=lambda result: call.read(result) + 1)]

    stock = measuring.BASELINES["stock"]
    monkeypatch.setitem(measuring.BASELINES, "stock", wrong)
    done = convgrad("bench", "--problem", SMALL, "--direction", "forward", "--against", "stock")
    assert done.code == 1
    assert "ours and stock differ" in done.err


def test_resume_goes_on(convgrad: Command, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    command = ["bench", "--problem", SMALL, "--against", "stock", "--seconds", 0, "--json", file]
    assert convgrad(*command).code == 0
    content = json.loads(file.read_text())
    content["measurements"] = content["measurements"][:1]
    content["measurements"][0]["ours"] = 123.0  # to be seen again
    file.write_text(json.dumps(content))
    done = convgrad(*command, "--resume")
    assert done.code == 0, done.err
    again = json.loads(file.read_text())["measurements"]
    assert [entry["direction"] for entry in again] == ["backward_weight", "backward_data"]
    assert again[0]["ours"] == 123.0
    assert len(re.findall(r"^ *[\d.]+x ", done.err, re.MULTILINE)) == 1
    convgrad(*command[:-2], "--seconds", 0.25, "--json", file, "--resume").assert_sentence("seconds = 0.0", "--resume")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format": []}', '{"format": 3, "environment": {}}'])
def test_resume_of_something_else(convgrad: Command, tmp_path: Path, content: str) -> None:
    file = tmp_path / "out.json"
    file.write_text(content)
    convgrad("bench", "--problem", SMALL, "--against", "stock", "--json", file, "--resume").assert_sentence(str(file))
    assert file.read_text() == content


def test_resume_of_an_older_format(convgrad: Command, tmp_path: Path) -> None:
    """Before format 4 measurements had other keys: a "face" and a "rival" for their direction and baseline."""
    file = tmp_path / "out.json"
    command = [
        "bench",
        "--problem",
        SMALL,
        "--direction",
        "forward",
        "--against",
        "stock",
        "--seconds",
        0,
        "--json",
        file,
    ]
    assert convgrad(*command).code == 0
    content = json.loads(file.read_text())
    for entry in content["measurements"]:
        entry["face"], entry["rival"] = entry.pop("direction"), entry.pop("baseline")
    older = json.dumps({**content, "format": 3})
    file.write_text(older)
    convgrad(*command, "--resume").assert_sentence(str(file), "of format 3", "with 4 only", "leave out --resume")
    assert file.read_text() == older


def test_the_peak_takes_turns_with_the_contenders() -> None:
    """Behind ours in each round, not behind the baseline, whose threads spin for a while."""
    log: list[str] = []
    calls = [Call(name, lambda name=name: log.append(name), np.asarray) for name in ("ours", "one", "two")]  # type: ignore[misc]
    times = timing.pairs(calls, 0.0, lambda: log.append("peak"))
    assert {name: len(found) for name, found in times.items()} == dict.fromkeys(
        ("ours", "one", "two"), timing.MIN_PAIRS
    )
    turns = [name for name, _ in itertools.groupby(log)]
    assert turns == ["ours", "peak", "one", "two"] * timing.MIN_PAIRS


def test_a_turn_of_the_peak_counts_its_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rate is that of all runs of the turn, by a clock on which each run takes 2 ms."""
    kernel, clock = Peak(parse_target("native"), 1), [0.0]
    monkeypatch.setattr(peak.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(kernel, "run", lambda: clock.append(clock.pop() + 0.002))
    assert kernel.turn() == pytest.approx(kernel.flop / 0.002 * 1e-9)
    assert clock[0] == pytest.approx(0.006)  # three runs fill 5 ms
    assert kernel.burst(0.001) == pytest.approx(kernel.flop / 0.002 * 1e-9)


def test_a_problem_of_two_suites_is_measured_once(
    convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = ConvProblem.from_descriptor(SMALL)
    layers = [Layer("resnet50", problem, 3), Layer("vgg16", problem, 2)]
    monkeypatch.setattr("tvm_convgrad.bench.layers.layers_of", lambda *_: layers)
    file = tmp_path / "out.json"
    done = convgrad("bench", "--direction", "forward", "--against", "stock", "--seconds", 0, "--json", file)
    assert done.code == 0, done.err
    first, second = json.loads(file.read_text())["measurements"]
    assert (first.pop("suite"), first.pop("count")) == ("resnet50", 3)
    assert (second.pop("suite"), second.pop("count")) == ("vgg16", 2)
    assert first == second


def test_the_peak_of_dot_products_computes() -> None:
    """Each step adds 0.5 * 0.5 + 0.5 * 0.5 to the word's float32; where the CPU has the instruction it is executed."""
    target = parse_target('{"kind": "llvm", "mcpu": "znver4"}')
    machine = machine_of(target)
    assert machine is not None
    assert machine.dots == ("bfloat16",)
    library = tvm.compile(tvm.IRModule({"main": peak_kernel(machine, 2, dots=True)}), target)
    if "avx512bf16" not in local_features():
        pytest.skip("compiled, and not run: this CPU has no AVX512-BF16")
    lanes = machine.lanes(DTYPE)
    result = tvm.runtime.tensor(np.full(2 * registers_of_sums(machine) * lanes, np.nan, DTYPE))
    library["main"](tvm.runtime.tensor(np.full(2 * lanes, HALVES, DTYPE)), result)
    np.testing.assert_array_equal(result.numpy(), np.float32(HALVES) + np.float32(peak.STEPS * 0.5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_layers_are_measured_beside_their_peak(
    convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr("tvm_convgrad.bench.layers.measure_roofline", lambda peak: replace(ROOFLINE, of=peak.of))
    file, short = tmp_path / "out.json", {"bfloat16": "bf16", "float16": "f16"}[dtype]
    problem = f"mb1ic4ih6oc8kh3_dt={short}:{short}:{short}"
    done = convgrad(
        "bench", "--problem", problem, "--dtype", dtype, "--against", "stock", "--seconds", 0, "--json", file
    )
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    machine = machine_of(parse_target("native"))
    assert machine is not None
    assert found["roofline"]["of"] == (DOT_PEAK if dtype in machine.dots else FMA_PEAK)
    assert all(each["peak"] > 0 for each in found["measurements"])


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


STEP = ["--step", "resnet18"]
PER_SAMPLE = [*STEP, "--per-sample"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--suite", "all", *STEP], ["--suite is of layers", "leave out --step, or --suite."]),
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
        (["--optimizer", "adam"], ["--optimizer is of whole training steps: give --step MODEL"]),
        (["--loss", "cross_entropy", "--problem", SMALL], ["--loss is of whole training steps"]),
        (["--per-sample", "--problem", SMALL], ["--per-sample goes with --step"]),
        (["--suite", "vgg16", "--problem", SMALL], ["--suite is part of the descriptor of --problem"]),
        (["--bridge", "torch", "--problem", SMALL], ["--problem is not of --bridge"]),
        (["--bridge", "torch", "--per-sample", "--impl", "kernel"], ["--per-sample and --impl are not of --bridge"]),
        (["--calls", "--problem", SMALL], ["--calls goes with --bridge"]),
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


def made(ratio: float, **changes: Any) -> Measurement:
    base = Measurement(
        suite="vgg16", layout="NCHW", batch=1, count=2, direction="forward", descriptor=SMALL, kernel="k",
        baseline="torch", variant="torch contiguous", ours=1.0, theirs=ratio, ratio=ratio, pairs=5, gflops=50.0,
        baseline_gflops=50.0 / ratio, peak=80.0, intensity=1.0, compile_seconds=1.0,
    )  # fmt: skip
    return replace(base, **changes)


def test_low_ratios_are_counted_as_printed() -> None:
    results = Results({"cpu": "some CPU"}, ROOFLINE)
    directions = ("backward_weight", "backward_data", "forward")
    results.measurements = [
        made(ratio, direction=direction) for ratio, direction in zip((0.944, 0.946, 2.0), directions, strict=True)
    ]
    results.measurements.append(made(0.5, baseline="jax"))
    torch, jax = (part for part in document(results, "bench").split("## Against ") if "geometric means" in part)
    assert "| 0.94 (50, 62%, 66%) | 0.95 (50, 62%, 66%) | 2.00 (50, 62%, 31%) |" in document(results, "bench")
    assert "FMA peak 100 GFLOP/s at the start, 80 (80 to 80) beside layers, memory" in document(results, "bench")
    assert torch.endswith("\n\n1 of 3 measurements are under 0.95.\n\n")
    assert jax.endswith("\n\n1 of 1 measurements are under 0.95.\n\n")


def test_what_is_not_finite_is_null_in_the_file(tmp_path: Path) -> None:
    """JSON has no NaN; read back, it is one again, and the missing peak of a GPU stays missing."""
    file = tmp_path / "out.json"
    results = Results({"cpu": "some CPU"}, ROOFLINE, file)
    results.add(made(math.nan, peak=None))
    content = json.loads(file.read_text(), parse_constant=pytest.fail)
    assert (content["measurements"][0]["ratio"], content["measurements"][0]["ours"]) == (None, 1.0)
    again = Results.resume(file, {"cpu": "some CPU"})
    assert again is not None
    assert math.isnan(again.measurements[0].ratio)
    assert again.measurements[0].peak is None


def test_means() -> None:
    found = [
        made(2.0),
        made(8.0, count=1),
        made(3.0, direction="backward_weight"),
        made(27.0, direction="backward_data", layout="NHWC"),
        made(5.0, baseline="jax"),
    ]
    rows = {(r["baseline"], r["suite"], r["layout"], r["batch"], r["direction"]): r for r in means(found, ROOFLINE)}
    forward = rows["torch", "vgg16", "NCHW", 1, "forward"]
    assert forward["ratio"] == pytest.approx(4.0)
    assert (forward["layers"], forward["worst"], forward["total"]) == (2, 2.0, pytest.approx((2 * 2 + 8) / 3))
    assert forward["peak"] == pytest.approx(50 / 80)
    assert forward["baseline_peak"] == pytest.approx(50 / 80 / 4)
    # Under this roofline one FLOP a byte gives 10 GFLOP/s, less than was measured: the bound is what was measured.
    assert forward["bound"] == pytest.approx(4.0)
    dense = {(r["baseline"], r["direction"]): r for r in means([made(2.0, intensity=1e6)], ROOFLINE)}
    assert dense["torch", "forward"]["bound"] == pytest.approx(80 / 25)  # the peak beside it over the baseline's rate
    assert rows["torch", "vgg16", "all", 1, "gradients"]["ratio"] == pytest.approx(9.0)
    assert rows["torch", "all", "all", "all", "all"]["layers"] == 4
    assert rows["jax", "vgg16", "NCHW", 1, "forward"]["ratio"] == pytest.approx(5.0)
    assert not any(key[0] == "jax" and key[1] == "all" for key in rows)  # the same as that one row
    assert geometric_mean([1.0, 4.0]) == pytest.approx(2.0)


def test_shares_are_of_the_peak_beside_each_layer() -> None:
    """The clock fell between two layers; where none was measured (GPUs) it is the peak of the start."""
    (row,) = means([made(1.0, peak=100.0), made(1.0, peak=50.0, gflops=25.0, baseline_gflops=25.0)], ROOFLINE)
    assert (row["peak"], row["baseline_peak"]) == pytest.approx((0.5, 0.5))
    (row,) = means([made(2.0, peak=None)], ROOFLINE)
    assert (row["peak"], row["baseline_peak"]) == pytest.approx((0.5, 0.25))
    results = Results({"cpu": "some CPU"}, ROOFLINE)
    assert results.sustained == ROOFLINE
    results.measurements = [made(1.0, peak=value) for value in (60.0, 90.0, 70.0)]
    assert results.sustained == replace(ROOFLINE, gflops=70.0)


@pytest.mark.parametrize(
    ("descriptor", "kind"),
    [
        ("mb8ic64ih14oc64kh3ph1", "3x3"),
        ("mb8ic64ih14oc128kh1sh2", "1x1"),
        ("mb8ic63ih14oc128kh1", None),
        ("mb8ic64ih14oc63kh3ph1", None),
        ("g2mb8ic128ih14oc128kh3ph1", None),
        ("mb8ic64ih14oc64kh5ph2", None),
        ("mb8ic64iw14oc64kw3pw1", None),
        ("mb8ic64id8oc64kd3pd1", None),
    ],
)
def test_dense_layers(descriptor: str, kind: str | None) -> None:
    assert dense_kind(descriptor) == kind


def test_means_of_dense_layers() -> None:
    """Over all suites and layouts, by batch, each kind of kernel by itself; forward is no part of the gradients."""
    large = {"direction": "backward_data", "suite": "resnet50"}
    found = [
        made(2.0, descriptor="mb1ic64ih14oc64kh3ph1", **large),
        made(8.0, descriptor="mb1ic64ih14oc128kh1", layout="NHWC", **large),
        made(32.0, descriptor="mb1ic64ih14oc128kh1", direction="forward"),
        made(100.0, **large),
    ]
    rows = {(r["suite"], r["direction"]): r for r in means(found, ROOFLINE) if r["suite"].startswith("dense")}
    # The 1x1 layer's dgrad and forward are rows of their suite and layout already, and all dense gradients are dgrads.
    assert set(rows) == {("dense 3x3", "gradients"), ("dense", "backward_data")}
    row = rows["dense", "backward_data"]
    assert (row["layers"], row["layout"], row["batch"]) == (2, "all", 1)
    assert row["ratio"] == pytest.approx(4.0)
