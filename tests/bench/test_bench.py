# SPDX-License-Identifier: Apache-2.0
"""The bench of layers: its tables against known totals, what one run leaves, going on with it, and the peak."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm

from tests.bench.layers import ROOFLINE, SMALL
from tests.cli.command import Command
from tvm_convgrad.bench import measure as measuring
from tvm_convgrad.bench import peak
from tvm_convgrad.bench.measure import Measurement
from tvm_convgrad.bench.peak import (
    DOT_PEAK,
    DTYPE,
    FMA_PEAK,
    HALVES,
    TILE_PEAK,
    Peak,
    peak_kernel,
    registers_of_sums,
)
from tvm_convgrad.bench.roofline import triad_kernel
from tvm_convgrad.bench.suites import KINDS, NETWORKS, SUITES, Layer, suite
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.codegen.tile_product import INSTRUCTIONS
from tvm_convgrad.core.cpu_features import local_features, tile_refusal
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.measure import timing
from tvm_convgrad.measure.timing import Call
from tvm_convgrad.training.compile.targets import parse_target
from tvm_convgrad.verify.interpreter import execute

# Multiply-accumulates of one image at 224 x 224, in 1e9, linear classifiers left out, as the papers (or fvcore) count;
# I3D counts 108 for 64 frames.
MACS = {"resnet50": 4.09, "mobilenet_v2": 0.300, "vgg16": 15.35, "convnext_t": 4.45, "i3d": 108 / 4}


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


@pytest.mark.parametrize(("refusal", "of"), [("", TILE_PEAK), ("a hypervisor hides it", FMA_PEAK)])
def test_processes_without_tiles_have_another_peak(monkeypatch: pytest.MonkeyPatch, refusal: str, of: str) -> None:
    """Dot products are slower than multiply-adds on CPUs with AMX."""
    monkeypatch.setattr(peak, "tile_refusal", lambda _: refusal)
    monkeypatch.setattr(peak, "_loaded", lambda _function, _target: lambda *_: None)
    found = Peak(
        parse_target('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids"}'), 3, "bfloat16"
    )
    assert found.of == of
    tiles = 3 * peak.TILE_SUMS * peak.TILE_STEPS * 16 * 16 * 16 * 4
    assert found.flop == (3 * 24 * 16 * 2 * peak.STEPS if refusal else tiles)


def test_the_peak_of_tiles_computes() -> None:
    """Each step adds 16 words of 0.5 * 0.5 + 0.5 * 0.5 to every sum; interpreted, as few CPUs have tiles."""
    sums = np.full(3 * 16 * 16, np.nan, DTYPE)
    factors = np.full(16 * 16, HALVES, DTYPE)
    assert execute(peak.tile_peak_kernel(3, "bfloat16", steps=5), [factors, sums]) == ""
    np.testing.assert_array_equal(sums, np.float32(5 * 16 * 0.5))
    target = parse_target('{"kind": "llvm", "mtriple": "x86_64-linux-gnu", "mcpu": "sapphirerapids"}')
    source = tvm.compile(tvm.IRModule({"main": peak.tile_peak_kernel(2, "bfloat16")}), target).mod.inspect_source("s")
    loop = source[source.index("tdpbf16ps") : source.rindex("tdpbf16ps")]
    assert loop.count("tdpbf16ps") % peak.TILE_SUMS == peak.TILE_SUMS - 1
    assert "tile" not in loop.replace("convgrad_tile", ""), "nothing else is done in the loop"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sixteen_bit_layers_are_measured_beside_their_peak(
    convgrad: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.setattr("tvm_convgrad.bench.layers.measure_roofline", lambda peak: replace(ROOFLINE, of=peak.of))
    file, short = tmp_path / "out.json", {"bfloat16": "bf16", "float16": "f16"}[dtype]
    plain, types = "mb1ic4ih6oc8kh3", f"_dt={short}:{short}:{short}"
    given = plain + types if dtype == "bfloat16" else plain  # a descriptor without types has those of --dtype
    done = convgrad("bench", "--problem", given, "--dtype", dtype, "--against", "stock", "--seconds", 0, "--json", file)
    assert done.code == 0, done.err
    found = json.loads(file.read_text())
    machine = machine_of(parse_target("native"))
    assert machine is not None
    tiles = dtype in machine.tiles and not tile_refusal(INSTRUCTIONS[dtype])
    dots = dtype in machine.dots and machine.gains_by_dots
    assert found["roofline"]["of"] == (TILE_PEAK if tiles else DOT_PEAK if dots else FMA_PEAK)
    assert all(each["peak"] > 0 and each["descriptor"].endswith(types) for each in found["measurements"])
