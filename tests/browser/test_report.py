# SPDX-License-Identifier: Apache-2.0
"""The report in Chromium, offline: charts, hover, keyboard, sorting, a phone, print, and axe-core's rules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import Open
from tvm_convgrad.codegen.hardware import CPUS
from tvm_convgrad.core.problem import ConvProblem
from tvm_convgrad.kernels.roofline import roofline
from tvm_convgrad.report.gradients import Entry
from tvm_convgrad.report.html.page import Content, page_of
from tvm_convgrad.report.step_graph import graph_of
from tvm_convgrad.training.runtime.dataflow import KernelCall
from tvm_convgrad.training.runtime.memory import Moment, StepMemory

pytestmark = pytest.mark.browser

PHONE = {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True}
OPS = ("relax.nn.conv2d_backward_weight", "relax.nn.conv2d_backward_data", "relax.nn.conv2d")
PROBLEMS = ("mb8ic64ih28oc64oh28kh3ph1", "g64mb8ic64ih28oc64oh28kh3ph1", "mb8ic256ih14oc512oh14kh1")


def entries(op: str) -> list[Entry]:
    """Three convolutions; the first one's forward and wgrad are equally fast, so that their dots coincide."""
    found = []
    for place, text in enumerate(PROBLEMS):
        problem = ConvProblem.from_descriptor(text)
        share = 0.8 - 0.2 * place - (0.1 * OPS.index(op) if place else 0)
        found.append(
            {
                "op": op,
                "descriptor": text,
                "kernel": f"kernel of {text[:4]}",
                "fused": ["bias_grad"] if place == 2 else [],
                "reason": "the least estimate",
                "plan": "tile of 6 x 2 vectors",
                "refused": [{"kernel": "depthwise", "reason": "there is one group"}] if place != 1 else [],
                "seconds": roofline(problem, CPUS["SSE"]) / share,
                "roofline": share,
                "gflop": 2e-9 * problem.macs,
                "bytes": problem.bytes,
                "per": "step",
            }
        )
    return found


def calls() -> list[KernelCall]:
    """A chain through the convolutions, with a call of a long name before each of them."""
    words = ("forward", "backward_data", "backward_weight")
    found: list[KernelCall] = []
    for phase, directions in (("forward", words[:1]), ("backward", words[1:])):
        for text in PROBLEMS:
            shapes = tuple(shape for shape, _ in ConvProblem.from_descriptor(text).tensors.values())
            for name in ("fused_less_equal_where1_subtract1", *(f"conv2d_{word}_kernel" for word in directions)):
                found.append(KernelCall(name, phase, shapes, (len(found) - 1,) if found else ()))
    return [*found, KernelCall("update", "optimizer", (), (len(found) - 1,))]


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A report of nine convolutions and forty calls with long names."""
    pytest.importorskip("vl_convert")
    moments = (Moment(f"fused_less_equal_where1_subtract1_multiply{n}_sum", (n % 23) << 20) for n in range(40))
    memory = StepMemory(3 << 20, 1 << 18, tuple(moments))
    gradients = [*entries(OPS[0]), *entries(OPS[1])]
    forward = entries(OPS[2])
    graph = graph_of(calls(), [*gradients, *forward])
    target = '{"kind": "llvm", "mtriple": "x86_64-linux-gnu"}'
    content = Content("model.onnx", target, 8, gradients, forward, memory, graph=graph)
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(page_of(content), encoding="utf-8")
    return path.as_uri()


def drawn(visit: Open, address: str, **settings: Any) -> Any:
    """The page, offline, once its charts are there."""
    page = visit(address, offline=True, **settings)
    page.wait_for_selector("html[data-drawn]")
    return page


def test_charts_are_drawn_without_a_network(visit: Open, address: str, screenshots: Path) -> None:
    page = drawn(visit, address)
    assert page.locator("#roofline .dots_marks path").count() == 9
    assert page.locator("#roofline .limits_marks path").count() == 1
    assert page.locator("#memory svg").count() == 1
    assert page.locator("#memory .mark-area path").count() == 2
    page.screenshot(path=screenshots / "report.png", full_page=True)


def test_pointing_at_a_dot_shows_what_it_is(visit: Open, address: str) -> None:
    page = drawn(visit, address, viewport={"width": 1200, "height": 900})
    dot = page.locator('#roofline path[aria-label^="3: wgrad"]')
    dot.hover(force=True)
    tooltip = page.locator("#vg-tooltip-element").inner_text()
    for part in (PROBLEMS[2], "kernel of mb8i + bias_grad", "tile of 6 x 2 vectors", "depthwise: there is one group"):
        assert part in tooltip
    detail = page.locator("#detail").inner_text()
    assert detail.startswith(f"3: wgrad of {PROBLEMS[2]}")
    assert "there is one group" in detail
    assert page.locator("tr.chosen").get_attribute("id") == "row-3"


def test_dots_that_coincide_are_all_named(visit: Open, address: str) -> None:
    page = drawn(visit, address)
    page.locator('#roofline path[aria-label^="1: wgrad"]').hover(force=True)
    assert "At the same place: 7: forward" in page.locator("#detail").inner_text()


def test_dots_are_reached_by_keyboard(visit: Open, address: str) -> None:
    """The chart is one stop of the Tab key, and arrow keys go through all dots."""
    page = drawn(visit, address)
    assert page.locator('#roofline path[tabindex="0"]').count() == 1
    page.locator('#roofline path[tabindex="0"]').focus()
    seen = []
    for _ in range(9):
        seen.append(page.locator("tr.chosen").get_attribute("id"))
        page.keyboard.press("ArrowRight")
    assert sorted(seen) == sorted(f"row-{number}" for number in range(1, 10))
    page.keyboard.press("Home")
    assert page.locator("tr.chosen").get_attribute("id") == seen[0]


def test_the_graph_is_walked_by_keyboard(visit: Open, address: str) -> None:
    """One stop of the Tab key; arrows stay in the column or cross to the next one, and each box says what it reads."""
    page = drawn(visit, address)
    assert page.locator("#graph .box").count() == 16
    assert page.locator('#graph .box[tabindex="0"]').count() == 1
    page.locator('#graph .box[tabindex="0"]').focus()
    page.keyboard.press("Home")

    def here() -> str:
        return str(page.evaluate("document.activeElement.getAttribute('aria-label')"))

    assert here().startswith("1 other call")
    page.keyboard.press("ArrowDown")
    assert here() == f"7: forward of {PROBLEMS[0]}"
    assert page.locator("tr.chosen").get_attribute("id") == "row-7"
    assert "reads from: 1 other call" in page.locator("#node").inner_text()
    assert page.locator(".line.on").count() == 2
    page.keyboard.press("ArrowRight")
    assert here() == f"1: wgrad of {PROBLEMS[0]}"
    page.keyboard.press("ArrowRight")
    assert here() == f"4: dgrad of {PROBLEMS[0]}"
    page.keyboard.press("End")
    assert here().startswith("update")
    page.keyboard.press("Tab")
    assert page.locator("#graph .box:focus").count() == 0


def test_the_graph_follows_the_roofline(visit: Open, address: str) -> None:
    page = drawn(visit, address)
    page.locator('#roofline path[aria-label^="3: wgrad"]').focus()
    assert page.locator(".box.on").get_attribute("data-row") == "3"


@pytest.mark.parametrize(("key", "numeric"), [("gflop", True), ("roofline", True), ("problem", False)])
def test_headings_sort_the_table(visit: Open, address: str, key: str, numeric: bool) -> None:
    page = drawn(visit, address)
    button = page.locator(f'th[data-key="{key}"] button')

    def column() -> list[Any]:
        found = page.locator(f'td[data-key="{key}"]').evaluate_all("cells => cells.map(cell => cell.dataset.sort)")
        return [float(each) for each in found] if numeric else found

    before = column()
    button.focus()
    page.keyboard.press("Enter")
    assert column() == sorted(before) != before
    assert page.locator("th[aria-sort]").get_attribute("data-key") == key
    button.click()
    assert column() == sorted(before, reverse=True)
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"


def test_a_phone_is_wide_enough(visit: Open, address: str, screenshots: Path) -> None:
    page = drawn(visit, address, **PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for chart in ("#roofline", "#graph"):
        assert page.locator(f"{chart} svg").bounding_box()["width"] <= 390
    assert page.locator("#graph .box").first.bounding_box()["width"] > 80
    page.locator("#graph .box").first.tap()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator('#roofline path[aria-label^="6: dgrad"]').tap(force=True)
    assert page.locator("#detail").inner_text().startswith("6: dgrad")
    page.screenshot(path=screenshots / "report-phone.png", full_page=True)


def test_print_is_light_and_whole(visit: Open, address: str, screenshots: Path) -> None:
    page = drawn(visit, address, color_scheme="dark")
    page.screenshot(path=screenshots / "report-dark.png", full_page=True)
    back = "getComputedStyle(document.body).backgroundColor"
    label = "getComputedStyle(document.querySelector('.role-axis-label text')).fill"
    assert page.evaluate(back) == "rgb(22, 24, 29)"
    assert page.evaluate(label) == "rgb(232, 234, 237)"
    page.emulate_media(media="print", color_scheme="dark")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(back) == "rgb(255, 255, 255)"
    assert page.evaluate(label) == "rgb(27, 31, 36)"
    assert page.locator("details:not([open])").count() == 0
    assert (
        page.evaluate("document.getElementById('graph').scrollHeight - document.getElementById('graph').clientHeight")
        <= 0
    )
    assert page.pdf(path=screenshots / "report.pdf").startswith(b"%PDF")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit: Open, address: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page = drawn(visit, address, color_scheme=scheme)
    page.locator('#roofline path[aria-label^="3: wgrad"]').focus()
    found = axe.run(page)
    assert found.violations_count == 0, found.generate_report()
