# SPDX-License-Identifier: Apache-2.0
"""The check of the built site finds what is wrong, and pages of the gallery have what their commands gave."""

from __future__ import annotations

from pathlib import Path

import pytest

from site_pages import gallery, links, messages, nav, status, tables
from tvm_convgrad.core.errors import FAMILY

pytest.importorskip("onnx")  # gallery's examples

ROOT = Path(__file__).parents[2]


def test_links_and_loads_are_checked(tmp_path: Path) -> None:
    from site_pages import check

    (tmp_path / "sub").mkdir()
    (tmp_path / "a.css").write_text("")
    (tmp_path / "index.html").write_text(
        '<link href="a.css"><link rel="canonical" href="https://example.org/x"><h1 id="top">x</h1>'
        '<a href="sub/b.html#there">y</a><a href="https://example.org">z</a><a href="#top">t</a>'
    )
    page = tmp_path / "sub" / "b.html"
    page.write_text('<a id="there" href="../index.html#top">x</a><a href="..">y</a>')
    assert list(check.problems(tmp_path)) == []
    page.write_text(
        '<a href="c.html">x</a><a href="../index.html#no">y</a><script src="//cdn.example.org/m.js"></script>'
    )
    found = "\n".join(check.problems(tmp_path))
    for part in ("loads //cdn.example.org/m.js", "c.html, which does not exist", "#no, which has no such anchor"):
        assert part in found
    assert "index.html links to sub/b.html#there, which has no such anchor" in found


def test_a_page_of_the_gallery() -> None:
    text = "# X\n\n```console\n$ python a.py\n$ convgrad env\n```\n\n<!-- picture: p.png: What it drew -->\n"
    shown = gallery.Shown({"python a.py": "one\n", "convgrad env": "two\n"}, {"p.png": b""})
    page = gallery.page("name", text, shown)
    assert "$ python a.py\none\n$ convgrad env\ntwo\n```" in page
    assert "![What it drew](name/p.png)" in page
    source = gallery.page("name", "<!-- source: dp_sgd.py -->\n", shown)
    assert '??? note "examples/dp_sgd.py"' in source
    assert "    def main() -> None:" in source


def test_every_page_of_the_gallery_shows_something() -> None:
    """Each is listed, runs scripts that exist, and shows a picture that a command of it writes."""
    listing = (gallery.PAGES / "README.md").read_text(encoding="utf-8")
    pages = [path for path in gallery.PAGES.glob("*.md") if path.stem != "README"]
    assert len(pages) == 6
    for path in pages:
        text = path.read_text(encoding="utf-8")
        assert f"({path.name})" in listing
        commands = list(gallery._commands(text))
        scripts = [command.split()[1] for command in commands if command.startswith("python ")]
        assert all((gallery.EXAMPLES / script).is_file() for script in scripts)
        pictures = [name for name, _ in gallery.PICTURE.findall(text)]
        assert pictures
        assert all(any(name in command.split() for command in commands) for name in pictures)


def test_messages_are_those_of_the_sources() -> None:
    found = messages.by_class({error.__name__ for error in FAMILY})
    texts = {message for message, _ in found["SetupError"]}
    assert "`--html needs the package …, which is not installed; pip install 'tvm-convgrad[report]'`" in texts
    page = tables.errors()
    assert "## Messages of SetupError" in page
    assert all(len(rows) == len(set(rows)) for rows in found.values())


def test_pages_about_what_is_experimental_exist() -> None:
    made = {*tables.PAGES, "reference/api/torch.md", "reference/api/jax.md"}
    for page in status.EXPERIMENTAL:
        assert page in made or (ROOT / "docs" / page).is_file()
    text = status.marked("# T\n\nfirst", "guides/two-machines.md")
    assert text.startswith('# T\n\n!!! warning "Experimental"\n\n    ')
    assert "(../SUPPORT.md#what-is-stable)" in text
    assert text.endswith("\nfirst")
    assert status.marked("# T\n", "GLOSSARY.md") == "# T\n"
    assert links.in_site(text, "docs/guides/two-machines.md", "guides/two-machines.md") == text
    assert "gallery" in nav.SECTIONS
