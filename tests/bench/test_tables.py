# SPDX-License-Identifier: Apache-2.0
"""The tables of the bench: means, counts of low ratios, shares of the peak, and numbers that are not finite."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.layers import ROOFLINE, SMALL
from tvm_convgrad.bench.markdown import document
from tvm_convgrad.bench.measure import Measurement, geometric_mean
from tvm_convgrad.bench.results import Results, cpu_name, dense_kind, means


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


@pytest.mark.parametrize(
    ("info", "wanted"),
    [
        ("model\t: 17\nmodel name\t: AMD EPYC\ncpu family\t: 25\n", "AMD EPYC, family 25 model 17"),
        ("model name\t: AMD EPYC 9655\ncpu family\t: 26\nmodel\t: 2\n", "AMD EPYC 9655"),
        ("model name\t: a CPU\n", "a CPU"),
    ],
)
def test_a_cpu_whose_number_is_hidden_is_named_by_family_and_model(info: str, wanted: str, tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(info)
    assert cpu_name(path) == wanted
