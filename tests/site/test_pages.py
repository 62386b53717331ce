# SPDX-License-Identifier: Apache-2.0
"""The pages that are made from the code say all that it has; `make docs` tests that the site can be built."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path

import pytest

import tvm_convgrad
from relax_ops.rules import operator_rules
from relax_ops.rules.contract import OperatorRules
from site_pages import api, commands, history, links, nav, output, status, tables
from tests.core.test_documents import COMMANDS
from tvm_convgrad.core.errors import FAMILY
from tvm_convgrad.kernels.registry import all_kernels
from tvm_convgrad.offload.registry import ENTRIES

ROOT = Path(__file__).parents[2]


def test_every_operator_has_a_row() -> None:
    page = tables.operators()
    missing = [name for name in operator_rules() if f"| `{name.removeprefix('relax.')}` |" not in page]
    assert missing == []


def test_ticks_are_rules() -> None:
    """A row of an operator of each kind, column by column."""
    lines = {line.split(" | ")[0].strip("| `"): line for line in tables.operators().splitlines() if "✓" in line}
    for name in ("nn.conv2d", "nn.relu", "reshape"):
        rules = operator_rules()[f"relax.{name}"]
        cells = [cell.strip() for cell in lines[name].strip("|").split("|")][1:]
        wanted = {"gradient": rules.gradient, "layout": rules.layout, "vmap": rules.vmap}
        assert {column: bool(value) for column, value in wanted.items()} == {
            column: cell == tables.YES for column, cell in zip(tables.COLUMNS, cells, strict=True) if column in wanted
        }


def test_every_kind_of_rule_is_a_column() -> None:
    shown = {name for names in tables.COLUMNS.values() for name in names}
    left = {"names", "linear_if", "isometric", "always", "declare"}
    assert {field.name for field in fields(OperatorRules)} == shown | left


def test_pages_are_complete() -> None:
    assert all(f"`{kernel.form}`" in tables.kernels() for kernel in all_kernels())
    assert all(entry.install in tables.backends() for entry in ENTRIES.values())
    assert all(f"`{error.__name__}`" in tables.errors() for error in FAMILY)
    page = commands.page()
    for name, command in COMMANDS.items():
        section = page.partition(f"\n## `convgrad {name}`\n")[2].partition("\n## ")[0]
        shown = [option for parameter in command.params for option in parameter.opts if option.startswith("--")]
        assert [option for option in shown if option not in section] == [], name
        assert section


def test_every_public_name_has_an_entry() -> None:
    described = {name for _, page in api.pages() for name in page.names}
    for name in api.public_names():
        value = getattr(tvm_convgrad, name)
        assert f"{value.__module__}.{value.__qualname__}" in described, name
    left = {name for name in tvm_convgrad.__all__ if name not in api.public_names()}
    assert left == {*api.MODULES, "convert_layout", "__version__", *(error.__name__ for error in FAMILY)}


@pytest.mark.parametrize(
    "path", [path for path, page in api.pages() if page.title.rpartition(".")[2] not in api.FRAMEWORKS]
)
def test_what_pages_name_exists(path: str) -> None:
    for name in dict(api.pages())[path].names:
        module, _, attribute = name.rpartition(".")
        assert getattr(importlib.import_module(module), attribute).__doc__, name


def test_pages_of_interfaces_say_whether_they_are_stable() -> None:
    assert status.EXPERIMENTAL.keys().isdisjoint(status.STABLE)
    sources = {page.relative_to(ROOT / "docs").as_posix() for page in (ROOT / "docs").rglob("*.md")}
    made = {*tables.PAGES, *(path for path, _ in api.pages()), "reference/commands.md"}
    assert {*status.EXPERIMENTAL, *status.STABLE} <= sources | made
    assert '!!! success "Stable"' in status.marked("# A\n\ntext\n", "BUILD.md")
    noted = status.marked("# A\n\ntext\n", "reference/kernels.md")
    assert noted.startswith('# A\n\n!!! warning "Experimental"\n')
    assert "../SUPPORT.md#what-is-stable" in noted
    assert status.marked("# A\n", "BENCH.md") == "# A\n"
    assert {path for path, _ in api.pages()} <= {*status.EXPERIMENTAL, *status.STABLE}


def test_results_are_called_by_their_files() -> None:
    made = nav.completed([{"Results": ["results/README.md"]}], ["results/README.md", "results/b-batch8.md"])
    assert made == [{"Results": ["results/README.md", {"b-batch8": "results/b-batch8.md"}]}]


def test_earlier_versions_are_listed_and_kept() -> None:
    earlier = [history.Version("669417b", "2026-11-22", "old")]
    assert history.name_of("results/a.md", earlier[0]) == "results/history/a-669417b.txt"
    shown = history.with_history("# A\n", "results/a.md", earlier)
    assert "- [2026-11-22, commit 669417b](history/a-669417b.txt)" in shown
    assert history.with_history("# A\n", "results/a.md", []) == "# A\n"
    page = "docs/results/layers-intel-batch8.md"
    found = history.versions(page)
    assert len({version.text for version in found}) == len(found)
    assert (ROOT / page).read_text(encoding="utf-8") not in {version.text for version in found}
    assert all(version.text.startswith("#") for version in found)


def test_commands_have_whole_sentences() -> None:
    listed = commands.page().partition("**Commands**:")[2].partition("## ")[0]
    assert "..." not in listed
    assert all(f"* [`{name}`](#convgrad-{name}): " in listed for name in COMMANDS)


def test_links_lead_to_pages() -> None:
    text = "[a](../CONTRIBUTING.md#style) [b](OFFLOAD.md) [c](../examples/cpp/train.cc) [d](https://x.org/y) [e](#here)"
    assert links.in_site(text, "docs/BENCH.md", "BENCH.md") == (
        "[a](CONTRIBUTING.md#style) [b](OFFLOAD.md) `examples/cpp/train.cc` [d](https://x.org/y) [e](#here)"
    )
    assert (
        links.in_site('a\n<!-- site: <a href="r.html">r</a>. -->\nb', "docs/a.md", "a.md")
        == 'a\n<a href="r.html">r</a>.\nb'
    )
    assert links.in_site("![p](docs/pictures/front.svg)", "README.md", "index.md") == "![p](pictures/front.svg)"
    picture = '<picture><source media="(x)" srcset="docs/pictures/b.svg"><img src="docs/pictures/a.svg"></picture>'
    assert links.in_site(picture, "README.md", "index.md") == picture.replace("docs/", "")
    assert links.in_site("[r](../../README.md)", "docs/results/a.md", "results/a.md") == "[r](../index.md)"


def test_pages_that_are_not_named_are_added() -> None:
    given: nav.Nav = [{"Start": ["index.md"]}, {"Guides": ["guides/a.md"]}, {"Reference": [{"P": ["X.md"]}]}]
    made = nav.completed(given, ["index.md", "X.md", "Y.md", "guides/b.md", "guides/a.md"])
    assert made == [
        {"Start": ["index.md"]},
        {"Guides": ["guides/a.md", "guides/b.md"]},
        {"Reference": [{"P": ["X.md"]}, "Y.md"]},
    ]
    with pytest.raises(KeyError):
        nav.completed(given, ["elsewhere/z.md"])


def test_output_is_put_behind_commands() -> None:
    text = "before\n\n```console\n$ convgrad --version\n```\n\nafter `$ x`\n"
    assert output.with_output(text) == text.replace("--version\n", f"--version\n{tvm_convgrad.__version__}\n")
    with pytest.raises(RuntimeError, match="no-such"):
        output.with_output("```console\n$ convgrad no-such\n```\n")
