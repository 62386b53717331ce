# SPDX-License-Identifier: Apache-2.0
"""Every guide works as it is written: its commands and programs are run in order, in a folder of its own."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import Command

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
BLOCK = re.compile(r"^```(bash|python|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
BATCH, SAMPLES = 16, 64
NEEDS = {"cross-compile-arm": "cross", "offload-to-cudnn": "cuda"}
"""Guides whose commands need a library or a compiler, and the mark of tests that need it."""

PACKAGES = {"cross-compile-arm": "ziglang"}
"""Guides whose commands need a package of an extra."""

ELSEWHERE = ("raspberry-pi",)
"""Guides whose commands need another machine: `tests/device/test_aarch64.py` runs this one."""

NAMES = [
    pytest.param(page.stem, marks=getattr(pytest.mark, NEEDS[page.stem]) if page.stem in NEEDS else ())
    for page in sorted(GUIDES.glob("*.md"))
    if page.stem not in ("README", *ELSEWHERE)
]


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what guides take for given."""
    folder = tmp_path_factory.mktemp("digits")
    command = [sys.executable, ROOT / "examples" / "digits_cnn.py", "--out", folder, "--batch", str(BATCH)]
    subprocess.run(command, check=True)
    (folder / "digits_cnn.onnx").rename(folder / "model.onnx")
    with np.load(folder / "digits.npz") as whole:
        np.savez(folder / "data.npz", **{name: whole[name][:SAMPLES] for name in whole})
    return folder


def run_commands(text: str, convgrad: Command) -> None:
    """Run command lines: `cat > FILE <<'WORD'` writes the lines that follow, all others are convgrad's."""
    lines = iter(text.splitlines())
    for line in lines:
        words = shlex.split(re.sub(r" \| (head|tail) .*", "", line.removeprefix("$ ")), comments=True)
        if words[0] == "cat":
            end = words[-1].removeprefix("<<")
            Path(words[2]).write_text("".join(f"{each}\n" for each in iter(lines.__next__, end)), encoding="utf-8")
            continue
        assert words[0] == "convgrad", line
        done = convgrad(*words[1:])
        assert done.code == 0, (line, done.err)


@pytest.mark.parametrize("name", NAMES)
def test_guide(name: str, convgrad: Command, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in PACKAGES:
        pytest.importorskip(PACKAGES[name])
    for path in digits.iterdir():
        shutil.copy(path, tmp_path)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    blocks = BLOCK.findall((GUIDES / f"{name}.md").read_text(encoding="utf-8"))
    assert blocks
    for language, text in blocks:
        if language == "python":
            exec(compile(text, f"docs/guides/{name}.md", "exec"), names)
        else:
            run_commands(text, convgrad)


def test_every_guide_is_listed() -> None:
    listed = re.findall(r"\]\(([\w-]+)\.md\)", (GUIDES / "README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(page.stem for page in GUIDES.glob("*.md") if page.stem != "README")
