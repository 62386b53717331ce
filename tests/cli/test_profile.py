# SPDX-License-Identifier: Apache-2.0
"""`convgrad profile`: all of a step's operators, in their phases, with what they compute and move."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import Command
from tests.images.pictures import pixels, write_folder
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.report.matching import product_macs
from tvm_convgrad.training.runtime.timeline import TimedCall


def test_every_operator_has_its_time_and_phase(
    convgrad: Command, tiny_model: str, tiny_data: Path, tmp_path: Path
) -> None:
    step, trace, plot = tmp_path / "step.so", tmp_path / "trace.json", tmp_path / "profile.png"
    assert convgrad("build", tiny_model, "-o", step, "--optimizer", "adam", "--clip-norm", 1.0).code == 0
    arguments = ["profile", step, "--steps", 3, "--trace", trace, "--plot", plot]
    found = convgrad(*arguments, "--json").json
    rows = found["operators"]
    assert sum(row["share"] for row in rows) == pytest.approx(1)
    assert found["operator_seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
    phases = {phase: sum(row["seconds"] for row in rows if row["phase"] == phase) for phase in found["phases"]}
    assert phases | {"virtual machine": found["virtual_machine_seconds"]} == pytest.approx(found["phases"])
    assert all(phases[phase] > 0 for phase in ("forward", "backward", "optimizer"))
    entries = convgrad("explain", step, "--json").json
    gradient = entries["gradients"][0]
    convolutions = {row["problem"].split()[0]: row for row in rows if row["problem"]}
    assert {name: row["phase"] for name, row in convolutions.items()} == {"forward": "forward", "wgrad": "backward"}
    wgrad = convolutions["wgrad"]
    problem = ConvProblem.from_descriptor(wgrad["problem"].split()[1])
    assert wgrad["gflop"] == pytest.approx(2e-9 * problem.macs)
    assert problem.kernel == ConvProblem.from_descriptor(gradient["descriptor"]).kernel
    assert wgrad["bytes"] == sum(4 * _count(shape) for shape in wgrad["shapes"])
    assert {row["gflop"] is None for row in rows if "matmul" in row["name"]} == {False}
    events = json.loads(trace.read_text())["traceEvents"]
    assert len(events) == sum(row["calls"] for row in rows)
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert plot.read_bytes().startswith(b"\x89PNG")

    shown = convgrad("profile", step, "--data", tiny_data, "--rows", 2, "--steps", 1)
    assert shown.code == 0
    assert "optimizer" in shown.out


@pytest.mark.parametrize(
    ("name", "shapes", "macs"),
    [
        ("matmul", [(8, 2, 3), (8, 3, 5), (8, 2, 5)], 240),
        ("fused_transpose_matmul_add", [(8, 3, 2), (8, 3, 5), (5,), (8, 2, 5)], 240),
        ("matmul", [(4, 8, 2, 3), (3, 5), (4, 8, 2, 5)], 960),
        ("matmul_forward_kernel", [(96, 1, 4, 7), (96, 1, 1, 7), (96,), (96, 1, 4, 96)], 96 * 4 * 7 * 96),
        ("matmul_backward_weight_kernel2", [(6, 1, 4, 10), (6, 1, 4, 7), (10, 1, 1, 7), (10,)], 24 * 70),
        ("matmul", [(2, 3), (3, 5), (7,)], 0),
        ("relu", [(2, 3), (3, 5), (2, 5)], 0),
    ],
)
def test_products_are_counted_by_their_shapes(name: str, shapes: list[tuple[int, ...]], macs: int) -> None:
    assert product_macs(TimedCall(name, "forward", tuple(shapes), 0, 0.0, 1.0)) == macs


def test_free_extents_need_data_and_have_no_rates(convgrad: Command, tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("vl_convert")
    helper, tensors = onnx.helper, onnx.numpy_helper
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        helper.make_node("GlobalAveragePool", ["a"], ["b"]),
        helper.make_node("Flatten", ["b"], ["y"]),
    ]
    x = helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["n", 3, "height", "width"])
    y = helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 4])
    weight = tensors.from_array(np.ones((4, 3, 3, 3), "float32"), "w")
    graph = helper.make_graph(nodes, "net", [x], [y], [weight])
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "net.onnx"
    )
    np.savez(tmp_path / "data.npz", x=np.ones((8, 3, 6, 5), "float32"), y=np.zeros(8, "int64"))
    step = tmp_path / "step.so"
    assert convgrad("build", tmp_path / "net.onnx", "-o", step).code == 0
    convgrad("profile", step).assert_sentence("free extents besides the batch (height, width)", "--data")
    page = tmp_path / "page.html"
    arguments = ["profile", step, "--data", tmp_path / "data.npz", "--batch-size", 4, "--steps", 1]
    rows = convgrad(*arguments, "--html", page, "--json").json["operators"]
    problems = [row for row in rows if row["problem"]]
    assert {row["problem"] for row in problems} >= {"forward mb4ic3ih{height}iw{width}oc4kh3kw3ph1pw1"}
    assert {row["gflop"] for row in problems} == {None}
    assert page.read_text().startswith("<!doctype html>")


def test_a_batch_of_images_is_taken_as_run_takes_it(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    write_folder(tmp_path / "train", pixels(9, 6, 6, 1))
    arguments = ["profile", tiny_step, "--steps", 1, "--augment", "flip", "--data"]
    assert convgrad(*arguments, tmp_path, "--json").json["batch"] == 8
    convgrad(*arguments, tmp_path / "train" / "ant").assert_sentence("train")


def test_a_profile_as_a_page(convgrad: Command, tiny_step: Path, tiny_dynamic_step: Path, tmp_path: Path) -> None:
    """Every call that was measured is in the graph once, and convolutions have their times in the table."""
    pytest.importorskip("vl_convert")
    for step in (tiny_step, tiny_dynamic_step):
        page = tmp_path / "profile.html"
        found = convgrad("profile", step, "--steps", 2, "--html", page, "--json").json
        text = page.read_text(encoding="utf-8")
        calls = "|".join(re.findall(r'data-calls="([^"]*)"', text)).split("|")
        assert len(calls) == sum(row["calls"] for row in found["operators"])
        table = text.partition('<table id="table"')[2].partition("</table>")[0]
        times = re.findall(r'data-key="seconds" data-sort="([-\d.e]+)"', table)
        convolutions = [row for row in found["operators"] if row["problem"]]
        assert sum(map(float, times)) == pytest.approx(1e3 * sum(row["seconds"] for row in convolutions))
        assert sum(row["calls"] for row in convolutions) == len(times)
        others = text.partition('<table id="others"')[2].partition("</table>")[0]
        assert others.count("<tr data-number") == len(found["operators"]) - len(convolutions)


def _count(shape: list[int]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def test_a_step_trains_as_before_after_it_was_measured(tiny_step: Path) -> None:
    """The virtual machine calls nobody any more, and the state has moved as by plain steps."""
    import numpy as np

    from tvm_convgrad.training.runtime.data import random_samples
    from tvm_convgrad.training.runtime.session import Session
    from tvm_convgrad.training.runtime.timeline import record

    measured, plain = Session(tiny_step), Session(tiny_step)
    samples = random_samples(plain.inputs, plain.target, plain.classes, plain.batch or 8)
    record(measured, samples.inputs, samples.target, steps=2, warm=1)
    for _ in range(1 + 2 + 1 + 2):
        plain.step(samples.inputs[0], samples.target)
    for name, array in plain.state.items():
        np.testing.assert_array_equal(measured.state[name], array)
    assert measured.step(samples.inputs[0], samples.target)[0] == plain.step(samples.inputs[0], samples.target)[0]


def test_wrong_options(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    convgrad("profile", tmp_path / "none.so").assert_sentence("no such file")
    convgrad("profile", tiny_step, "--trace", tmp_path / "no" / "trace").assert_sentence("make it first")
    convgrad("profile", tiny_step, "--data", tmp_path / "none.npz").assert_sentence("no such data file")
