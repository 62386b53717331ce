# SPDX-License-Identifier: Apache-2.0
"""Linking: for other machines, with a compiler that is named, and with the compiler's own words when it fails."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import tvm

from tests.cli.command import Command
from tvm_convgrad.codegen.hardware import machine_of
from tvm_convgrad.core.errors import SetupError, UnsupportedError
from tvm_convgrad.targets import NAMED, required_features
from tvm_convgrad.training.compile import linking
from tvm_convgrad.training.compile.linking import Linker, architecture_of, linker_for
from tvm_convgrad.training.compile.targets import parse_target

AARCH64 = 183
"""The number of the architecture in the header of an ELF file."""


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("name", "architecture", "features", "lanes"),
    [
        ("aarch64-linux", "aarch64", [], 4),
        ("armv8.2-a+fp16+dotprod", "aarch64", ["dotprod", "fullfp16"], 4),
        ("x86-64-v2-linux", "x86_64", ["sse4.1", "sse4.2"], 4),
        ("x86-64-v3-linux", "x86_64", ["avx", "avx2", "f16c", "fma", "sse4.1", "sse4.2"], 8),
        ("x86-64-v4-linux", "x86_64", None, 16),
    ],
)
def test_named_targets(name: str, architecture: str, features: list[str] | None, lanes: int) -> None:
    """They say all that code depends on: equal text on any machine that builds."""
    target = parse_target(name)
    assert architecture_of(target) == architecture
    found = required_features(target)
    assert found == features if features is not None else {"avx512f", "avx512bw", "avx512vl"} <= set(found)
    assert json.loads(str(target))["mtriple"] == f"{architecture}-linux-gnu"
    machine = machine_of(target)
    assert machine is not None
    assert machine.lanes("float32") == lanes
    assert machine == machine_of(tvm.target.Target(json.loads(str(target))))
    assert name in NAMED


def test_a_linker_that_fails_says_why(tmp_path: Path) -> None:
    words = (
        "echo 'warning: old'; echo '/usr/bin/ld: cannot find -lmissing'; echo 'collect2: error: ld returned 1'; exit 1"
    )
    linker = Linker((str(script(tmp_path / "cc", words)), "-O2"))
    with pytest.raises(SetupError) as raised:
        linker(str(tmp_path / "out.so"), ["a.o"])
    text = str(raised.value)
    assert text.endswith("ended with code 1: /usr/bin/ld: cannot find -lmissing; collect2: error: ld returned 1")
    silent = Linker((str(script(tmp_path / "silent", "exit 3")),))
    with pytest.raises(SetupError, match="ended with code 3: it printed nothing"):
        silent(str(tmp_path / "out.so"), [])


def test_long_words_are_cut(tmp_path: Path) -> None:
    long = script(tmp_path / "long", "for i in $(seq 200); do echo undefined reference to symbol_$i; done; exit 1")
    with pytest.raises(SetupError) as raised:
        Linker((str(long),))(str(tmp_path / "out.so"), [])
    assert "undefined reference to symbol_1;" in str(raised.value)
    assert len(str(raised.value)) < 800


def test_which_linker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--cc before CXX before what is installed; none is said with what to install."""
    one, two = script(tmp_path / "one", ""), script(tmp_path / "two", "")
    aarch64 = parse_target("aarch64-linux")
    monkeypatch.setenv("CXX", str(two))
    assert linker_for(aarch64, f"{one} -flag").command == (str(one), "-flag")
    assert linker_for(aarch64).command == (str(two),)
    with pytest.raises(SetupError, match="'no-such-compiler', but there is no such program"):
        linker_for(aarch64, "no-such-compiler")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    cross = script(tmp_path / "aarch64-linux-gnu-g++", "")
    assert linker_for(aarch64).command == (str(cross),)
    cross.unlink()
    monkeypatch.setattr(linking.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(SetupError, match=r"links for aarch64; pip install 'tvm-convgrad\[cross\]', or name one"):
        linker_for(aarch64)


def test_commands_show_the_linkers_words(convgrad: Command, tiny_model: str, tmp_path: Path) -> None:
    failing = script(tmp_path / "cc", "echo 'ld: error: disk full'; exit 1")
    output = tmp_path / "step.so"
    build = ["build", tiny_model, "-o", output, "--no-cache", "--cc"]
    convgrad(*build, failing).assert_sentence("step.so: the compiled step could not be linked", "ld: error: disk full.")
    convgrad(*build, "no-such-compiler").assert_sentence("no such program")
    assert not output.exists()


@pytest.mark.cross
def test_a_step_for_another_architecture(convgrad: Command, tiny_model: str, tiny_data: Path, tmp_path: Path) -> None:
    """It can be explained here, and only be run there."""
    pytest.importorskip("ziglang")
    output = tmp_path / "step.so"
    report = convgrad("build", tiny_model, "-o", output, "--target", "armv8.2-a+fp16+dotprod", "--json").json
    assert report["cpu_features"] == ["dotprod", "fullfp16"]
    (machine,) = struct.unpack_from("<H", output.read_bytes(), 18)
    assert machine == AARCH64
    explained = convgrad("explain", output, "--json").json
    assert len(explained["gradients"]) == 1
    assert "aarch64" in explained["target"]
    convgrad("run", output, "--data", tiny_data, "--epochs", 1).assert_sentence("not a shared library for x86_64")


@pytest.mark.parametrize(
    "name",
    [
        "x86-64-windows",
        "aarch64-macos",
        "arm64-apple-darwin",
        '{"kind": "llvm", "mtriple": "arm64-apple-macosx"}',
        '{"kind": "llvm", "mtriple": "x86_64-w64-mingw32"}',
        '{"kind": "llvm", "mtriple": "wasm32-unknown-unknown"}',
    ],
)
def test_other_systems_are_refused_at_once(name: str) -> None:
    with pytest.raises(UnsupportedError, match=r"built for Linux only.* use aarch64-linux"):
        parse_target(name)
