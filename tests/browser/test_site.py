# SPDX-License-Identifier: Apache-2.0
"""The site in Chromium: every page of the navigation opens without an error, and the search finds functions by name."""

from __future__ import annotations

import functools
import http.server
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.conftest import Open

pytestmark = pytest.mark.browser
SITE = Path(os.environ.get("CONVGRAD_SITE", Path(__file__).parents[2] / "out" / "site"))


class Quiet(http.server.SimpleHTTPRequestHandler):
    """Serves files and logs nothing."""

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    if not (SITE / "index.html").is_file():
        pytest.skip("the site is not built; make docs")
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_every_page_opens(visit: Open, address: str) -> None:
    found = (page for page in SITE.rglob("*.html") if page.name not in ("404.html", "report.html"))
    pages = sorted(page.relative_to(SITE).as_posix() for page in found)
    assert len(pages) > 30
    page = visit("about:blank")  # one page for all, whose cache has the scripts
    for name in pages:
        page.goto(f"{address}/{name}")
        assert page.locator("h1").count() == 1, name
        assert page.locator(".md-nav__link--active").count() > 0, name


@pytest.mark.parametrize(
    ("words", "page"),
    [
        ("conv2d_backward_weight", "reference/api/op.html"),
        ("from_relay", "reference/api/functions.html"),
        ("per_sample_module", "reference/api/training.html"),
        ("UnsupportedError", "reference/errors.html"),
    ],
)
def test_the_search_finds_names(visit: Open, address: str, words: str, page: str) -> None:
    opened = visit(f"{address}/index.html")
    field = opened.locator("input.md-search__input")
    field.focus()
    # Until a worker has the index, the text is "Initializing search". The search reads the field when a key goes up.
    opened.wait_for_function("/^Type/.test(document.querySelector('.md-search-result__meta').textContent.trim())")
    field.press_sequentially(words)
    opened.locator(f'a.md-search-result__link[href*="{page}"]').first.wait_for(state="attached")


def test_tables_sort_and_filter(visit: Open, address: str) -> None:
    page = visit(f"{address}/results/layers-intel-batch8.html")
    field, table = page.locator(".filters input").first, page.locator("table[data-filtered]").first
    every = table.locator("tbody tr").count()
    word = table.locator("tbody tr").first.locator("td").first.inner_text().split()[0]
    field.fill(word)
    assert 0 < table.locator("tbody tr:visible").count() <= every
    assert all(word in text for text in table.locator("tbody tr:visible").all_inner_texts())
    field.fill("no such words")
    assert table.locator("tbody tr:visible").count() == 0
    field.fill("")
    button = table.locator("th button").last
    button.click()
    assert table.locator("th").last.get_attribute("aria-sort") == "ascending"
    column = table.locator("tbody tr td:last-child").all_inner_texts()
    button.click()
    assert table.locator("tbody tr td:last-child").all_inner_texts() != column or len(set(column)) == 1


def test_tables_sort_by_keyboard(visit: Open, address: str) -> None:
    page = visit(f"{address}/results/layers-intel-batch8.html")
    table = page.locator("table[data-filtered]").first
    heading, button = table.locator("th").last, table.locator("th button").last
    button.focus()
    for order in ("ascending", "descending"):
        page.keyboard.press("Enter")
        assert heading.get_attribute("aria-sort") == order
        assert table.locator("th[aria-sort]").count() == 1


def test_a_page_is_light_and_from_one_host(visit: Open, address: str) -> None:
    """Requests, bytes and nodes of the first page have bounds; times are printed only."""
    page = visit("about:blank")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    protocol = page.context.new_cdp_session(page)
    sizes: list[float] = []
    protocol.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    protocol.send("Network.enable")
    page.goto(f"{address}/index.html", wait_until="networkidle")
    nodes = page.evaluate("document.querySelectorAll('*').length")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)")
    print(f"{len(requests)} requests, {sum(sizes) / 1024:.0f} KiB, {nodes} nodes, first paint after {paint} ms")
    assert [url for url in requests if not url.startswith((address, "data:", "blob:"))] == []
    assert 0 < len(requests) <= 20
    assert 0 < sum(sizes) <= 2 * 2**20
    assert nodes <= 2000


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(visit: Open, address: str, scheme: str) -> None:
    """A page of each kind: links, programs, sessions of a terminal, tables with and without headings, signatures."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    names = ("index", "guides/read-explain", "reference/operators", "reference/api/op", "gallery/unet", "OFFLOAD", "C")
    for name in names:
        page = visit(f"{address}/{name}.html", color_scheme=scheme)
        page.wait_for_load_state("networkidle")
        found = axe.run(page)
        assert found.violations_count == 0, f"{name}: {found.generate_report()}"
        page.context.close()


def test_copy_takes_commands_only(visit: Open, address: str) -> None:
    page = visit(f"{address}/gallery/digits.html", permissions=["clipboard-read", "clipboard-write"])
    page.locator(".md-code__nav[aria-label] button").first.click()
    page.wait_for_selector(".md-dialog--active")
    copied = page.evaluate("navigator.clipboard.readText()").splitlines()
    assert len(copied) == 4
    assert all(line.startswith(("python ", "convgrad ")) for line in copied)


def test_a_phone_is_wide_enough(visit: Open, address: str, screenshots: Path) -> None:
    phone = {"viewport": {"width": 390, "height": 800}, "is_mobile": True, "has_touch": True}
    for name in ("index", "SUPPORT", "reference/operators", "results/layers-intel-batch8", "gallery/digits"):
        page = visit(f"{address}/{name}.html", **phone)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390, name
        page.screenshot(path=screenshots / f"site-phone-{name.replace('/', '-')}.png")
        page.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_of_the_first_picture_is_readable_on_a_phone(
    visit: Open, address: str, screenshots: Path, scheme: str
) -> None:
    """A phone gets the picture that is drawn for it, in its own size or nearly: its text has 8.5 points there."""
    page = visit(f"{address}/index.html", color_scheme=scheme, viewport={"width": 360, "height": 760}, is_mobile=True)
    picture = page.locator("picture img")
    assert picture.evaluate("image => image.currentSrc").endswith("/front-phone.svg")
    shown, own = picture.evaluate("image => [image.width, image.naturalWidth]")
    assert 8.5 * 4 / 3 * shown / own >= 11
    picture.screenshot(path=screenshots / f"front-phone-{scheme}.png")
    page = visit(f"{address}/index.html", color_scheme=scheme)
    assert page.locator("picture img").evaluate("image => image.currentSrc").endswith("/front.svg")


def test_dark_and_light(visit: Open, address: str, screenshots: Path) -> None:
    colours = set()
    for scheme in ("light", "dark"):
        page = visit(f"{address}/index.html", color_scheme=scheme)
        page.wait_for_load_state("networkidle")
        colours.add(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.screenshot(path=screenshots / f"site-{scheme}.png")
    assert len(colours) == 2
