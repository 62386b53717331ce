# SPDX-License-Identifier: Apache-2.0
"""The page of `explain --html`: it says what `explain --json` says, needs nothing else, and its charts are right."""

from __future__ import annotations

import json
import platform
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from tvm.target import Target

from tests.cli.command import Command
from tvm_convgrad.codegen.hardware import CPUS, machine_of
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.roofline import roofline as least
from tvm_convgrad.report.html.charts import COLOURS, Dot, limits, memory, roofline
from tvm_convgrad.report.html.page import Content, page_of
from tvm_convgrad.training.runtime.memory import Moment, StepMemory

MEMORY = StepMemory(1 << 20, 1 << 19, (Moment("a", 1 << 20), Moment("b", 3 << 20), Moment("c", 0)))


def drawn() -> None:
    """Skip where the packages that draw a page are not installed."""
    pytest.importorskip("vl_convert")
    pytest.importorskip("jinja2")


class Parts(HTMLParser):
    """The rows of the table, the charts, and every address on the page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[dict[str, str]] = []
        self.addresses: list[str] = []
        self.key = ""
        self.feed(text.partition("<script>")[0])
        (charts,) = re.findall(r'id="charts">(.*?)</script>', text)
        self.charts: dict[str, Any] = json.loads(charts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.addresses += [value for name, value in attrs if name in ("src", "href") and value]
        if tag == "tr" and "id" in values:
            self.rows.append({})
        if tag == "td":
            self.key = values.get("data-key") or "refused"

    def handle_data(self, data: str) -> None:
        if self.rows:
            row = self.rows[-1]
            row[self.key] = row.get(self.key, "") + data


def dot(number: int, direction: str, gflop: float, size: int, seconds: float) -> Dot:
    return Dot(number, direction, f"p{number}", "kernel", "tile", ("other: because",), gflop, size, seconds, 0.5)


def test_dots_lie_where_their_numbers_say() -> None:
    machine = CPUS["AVX2"]
    dots = [dot(1, "wgrad", 2.0, 10**8, 0.5), dot(2, "forward", 1.0, 10**9, 1.0), dot(3, "dgrad", 1.0, 10**7, 0.1)]
    chart: Any = roofline(dots, limits(machine))
    shown = chart["layer"][1]["data"]["values"]
    assert {each["number"]: (each["FLOP/byte"], each["GFLOP/s"]) for each in shown} == {
        1: (20.0, 4.0),
        2: (1.0, 1.0),
        3: (100.0, 10.0),
    }
    assert [each["direction"] for each in shown] == ["forward", "dgrad", "wgrad"], "gradients lie in front"
    assert shown[0]["not taken"] == "other: because"
    low, ridge, high = chart["layer"][0]["data"]["values"]
    peak, bandwidth = limits(machine)
    assert ridge == {"x": pytest.approx(peak / bandwidth), "y": peak}
    assert low["y"] == pytest.approx(low["x"] * bandwidth)
    assert low["x"] < 1 < 100 < high["x"]
    assert chart["layer"][1]["encoding"]["color"]["scale"]["domain"] == list(COLOURS)


@pytest.mark.parametrize("name", CPUS)
def test_the_lines_are_the_roofline_of_the_cost_model(name: str) -> None:
    """A kernel whose time is the roofline's lies on one of the two lines."""
    machine = CPUS[name]
    for text in ("mb8ic64ih28oc64oh28kh3ph1", "g64mb8ic64ih28oc64oh28kh3ph1", "mb1ic2048ih7oc2048oh7kh1"):
        problem = ConvProblem.from_descriptor(text)
        best = dot(1, "wgrad", 2e-9 * problem.macs, problem.bytes, least(problem, machine))
        peak, bandwidth = limits(machine)
        assert best.gflops == pytest.approx(min(peak, best.intensity * bandwidth))


def test_memory_is_stacked_on_the_state() -> None:
    chart: Any = memory(MEMORY)
    values = [(each["call"], each["what"], each["MiB"]) for each in chart["layer"][0]["data"]["values"]]
    assert values[:4] == [
        (1, "state and batch", 1.5),
        (1, "values of the step", 1.0),
        (2, "state and batch", 1.5),
        (2, "values of the step", 3.0),
    ]
    assert [each["MiB in use"] for each in chart["layer"][1]["data"]["values"]] == [2.5, 4.5, 1.5]


def test_the_page_says_what_json_says(convgrad: Command, tiny_step: Path, tmp_path: Path) -> None:
    drawn()
    path = tmp_path / "report.html"
    listed = convgrad("explain", tiny_step, "--html", path, "--json").json
    text = path.read_text(encoding="utf-8")
    page = Parts(text)
    entries = [*listed["gradients"], *listed["forward"]]
    assert len(page.rows) == len(entries) > 1
    for row, entry in zip(page.rows, entries, strict=True):
        assert row["problem"].strip() == entry["descriptor"]
        assert entry["kernel"] in row["kernel"]
        assert entry["plan"] in row["kernel"]
        assert all(each["reason"] in row["refused"] for each in entry["refused"])
        assert row["roofline"].strip() == f"{entry['roofline']:.1%}"
    dots = page.charts["roofline"]["layer"][1]["data"]["values"]
    assert sorted(each["number"] for each in dots) == list(range(1, len(entries) + 1))
    assert len(page.charts["memory"]["layer"][1]["data"]["values"]) > 10
    assert [address for address in page.addresses if not address.startswith(("#", "data:"))] == []
    assert re.findall(r"@import|url\(|<link(?! rel=\"icon\" href=\"data:)|<iframe", text.partition("<script>")[0]) == []


def test_names_are_text(tmp_path: Path) -> None:
    """What looks like HTML in a model's name or a reason is shown, not run."""
    drawn()
    entry = {"op": "relax.nn.conv2d", "descriptor": "</script><script>alert(1)</script>", "kernel": "<b>", "fused": []}
    entry |= {"reason": "", "plan": "", "seconds": 1e-3, "roofline": 0.5, "gflop": 1.0, "bytes": 10**6, "per": "step"}
    entry["refused"] = [{"kernel": "x", "reason": "<img src=x>"}]
    content = Content("<i>m</i>", '{"kind": "llvm"}', 2, [], [entry], "no <u>plan</u>")
    text = page_of(content)
    own = text.replace(text[text.index("<script>") :], "")
    for harmful in ("<script>alert", "<img src=x", "<i>m", "<u>plan"):
        assert harmful not in own
    assert text.count("</script>") == 3, "one of the data, of Vega and of the page"
    assert "&lt;i&gt;m&lt;/i&gt;" in own


def test_what_is_not_known_is_said(convgrad: Command, tiny_dynamic_step: Path, tiny_model: str, tmp_path: Path) -> None:
    drawn()
    path = tmp_path / "report.html"
    assert convgrad("explain", tiny_dynamic_step, "--html", path).code == 0
    text = path.read_text(encoding="utf-8")
    assert "the batch size is chosen at run time, so that sizes are unknown" in text
    assert "No convolution has an estimate" in text
    assert Parts(text).charts == {}
    assert convgrad("explain", tiny_model, "--html", path).code == 0
    text = path.read_text(encoding="utf-8")
    assert "A model has no plan of memory until it is built" in text
    assert list(Parts(text).charts) == ["roofline"]


def test_a_library_for_another_machine(
    convgrad: Command, tiny_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot be loaded: the page has its convolutions, and says why it has no graph and no memory."""
    drawn()
    path = tmp_path / "report.html"
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert convgrad("explain", tiny_step, "--html", path).code == 0
    text = path.read_text(encoding="utf-8")
    assert text.count("is not a shared library for riscv64") == 2
    assert list(Parts(text).charts) == ["roofline"]


def test_a_gpu_has_no_roofline() -> None:
    drawn()
    assert machine_of(Target({"kind": "cuda", "arch": "sm_90"})) is None
    text = page_of(Content("m", '{"kind": "cuda", "arch": "sm_90"}', None, [], [], "none"))
    assert "kernels are generated for CPUs only, and the target is not a CPU" in text


def test_wrong_use(convgrad: Command, tiny_step: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    convgrad("explain", tiny_step, "--html", tmp_path / "no" / "report.html").assert_sentence("make it first")
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    path = tmp_path / "report.html"
    convgrad("explain", tiny_step, "--html", path).assert_sentence("vl_convert", "pip install 'tvm-convgrad[report]'")
    assert not path.exists()
