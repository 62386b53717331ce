# SPDX-License-Identifier: Apache-2.0
"""Every place that names this package's version and its date names the same."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import tvm_convgrad
from tvm_convgrad.device.files import CMAKE, INCLUDE

ROOT = Path(__file__).parents[2]
HEADING = re.compile(r"^## \[(\d+\.\d+\.\d+)\](?: - (\S+))?$", re.MULTILINE)


def only(pattern: str, path: Path) -> str:
    """What the pattern's group matches in a file, in which it stands once."""
    (found,) = re.findall(pattern, path.read_text(encoding="utf-8"), re.MULTILINE)
    return str(found)


def test_header_citation_and_changelog_name_the_packages_version() -> None:
    newest, date = HEADING.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))[0]
    citation = ROOT / "CITATION.cff"
    named = {
        "convgrad.h": only(r'^#define CONVGRAD_VERSION "(.*?)"', INCLUDE / "convgrad.h"),
        "CITATION.cff": only(r"^version: (\S+)$", citation),
        "CHANGELOG.md": newest,
    }
    assert named == dict.fromkeys(named, tvm_convgrad.__version__)
    assert only(r"^date-released: (\S+)$", citation) == date


def test_the_policy_names_this_minor_version() -> None:
    major, minor, _ = tvm_convgrad.__version__.split(".")
    policy = only(r"Until 1\.0 a minor version \((.*?)\)", ROOT / "docs" / "SUPPORT.md")
    assert policy == f"{major}.{minor} to {major}.{int(minor) + 1}"


def test_the_wheel_takes_the_packages_version() -> None:
    """setuptools reads the attribute; no second number stands in pyproject.toml."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in text
    assert 'version = { attr = "tvm_convgrad.__version__" }' in text


def test_released_changes_are_in_order_and_each_is_there_once() -> None:
    """The kinds of changes follow Keep a Changelog; no entry of a version begins as another one does."""
    order = ["Added", "Changed", "Deprecated", "Fixed", "Removed"]
    for part in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[2:]:
        kinds = re.findall(r"^### (.*)$", part, re.MULTILINE)
        assert kinds == [kind for kind in order if kind in kinds], part.splitlines()[0]
        entries = [" ".join(entry.split())[:60] for entry in re.split(r"^- ", part, flags=re.MULTILINE)[1:]]
        assert sorted(set(entries)) == sorted(entries), part.splitlines()[0]


@pytest.mark.parametrize(
    ("wanted", "taken"),
    [("", True), ("0", True), ("0.2", True), ("0.2.0 EXACT", True), ("0.1", False), ("0.3", False), ("1", False)],
)
def test_cmake_takes_the_header_s_version(tmp_path: Path, wanted: str, taken: bool) -> None:
    """The version file alone is asked: the languages of the project are none, so that no compiler is looked for."""
    cmake = shutil.which("cmake")
    if cmake is None:
        pytest.skip("there is no cmake")
    assert tvm_convgrad.__version__.startswith("0.2."), "the list of wanted versions is that of 0.2"
    package = tmp_path / "package"
    (package / "cmake").mkdir(parents=True)
    shutil.copytree(INCLUDE, package / "include")
    shutil.copy(CMAKE / "convgrad-config-version.cmake", package / "cmake")
    (package / "cmake" / "convgrad-config.cmake").write_text("", encoding="utf-8")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\n"
        "project(test LANGUAGES NONE)\n"
        f"find_package(convgrad {wanted} CONFIG QUIET)\n"
        'message(STATUS "found=${convgrad_FOUND} version=${convgrad_VERSION}")\n',
        encoding="utf-8",
    )
    words = [cmake, "-S", str(tmp_path), "-B", str(tmp_path / "build"), f"-Dconvgrad_ROOT={package / 'cmake'}"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert f"found={int(taken)}" in said
    assert not taken or f"version={tvm_convgrad.__version__}" in said
