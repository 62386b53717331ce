# SPDX-License-Identifier: Apache-2.0
"""What the command looks like: in a terminal of 80 columns, in a pipe, without colours; and the groups of --help."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import typer
from tvm.target import Target

from tests.cli.command import MAIN, Command
from tvm_convgrad.cli import app
from tvm_convgrad.commands.help import GROUPS, GroupedCommand
from tvm_convgrad.report.matching import direction_of
from tvm_convgrad.report.tables import short_target, stdout

COMMANDS = typer.main.get_command(app).commands
ESCAPE = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def in_terminal(*arguments: object, **environment: str) -> str:
    """What a command writes, output and errors, into a terminal of 80 columns."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    own = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=own | environment) as process:
        os.close(theirs)
        written = b""
        while True:
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # Linux' end of a terminal
                break
            if not part:
                break
            written += part
        assert process.wait(timeout=300) == 0, written.decode()
    os.close(ours)
    return written.decode().replace("\r\n", "\n")


def widest(text: str) -> int:
    return max(len(line.rstrip()) for part in ESCAPE.sub("", text).split("\r") for line in part.splitlines())


@pytest.mark.parametrize("name", COMMANDS)
def test_each_option_is_in_one_group(name: str) -> None:
    command = COMMANDS[name]
    assert isinstance(command, GroupedCommand)
    grouped = [option for group in GROUPS[name] for option in group.options if option in _options(name)]
    assert sorted(grouped) == sorted(_options(name))
    assert all(len(group.title) <= 74 for group in GROUPS[name])


def _options(name: str) -> set[str]:
    return {each.name for each in COMMANDS[name].params if each.param_type_name == "option"}


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_are_of_their_group_and_accepted(name: str) -> None:
    for group in GROUPS[name]:
        words = shlex.split(group.example)
        flags = {flag: each for each in COMMANDS[name].params for flag in each.opts}
        used = {flags[word].name for word in words if word.startswith("-")}
        assert used <= set(group.options), group.title
        if not words:
            continue
        # what the command needs besides, without which no line is accepted
        needed = [each for each in COMMANDS[name].params if each.required and each.name not in used]
        rest = ["1" if each.param_type_name == "argument" else f"{each.opts[0]}=1" for each in needed]
        COMMANDS[name].make_context(name, [*words, *rest])


def test_help_shows_the_groups(convgrad: Command) -> None:
    shown = convgrad("build", "--help").out
    for group in GROUPS["build"]:
        assert group.title in shown


def test_explain_has_a_line_for_each_convolution(convgrad: Command, tiny_step: Path) -> None:
    entries = convgrad("explain", tiny_step, "--json").json
    shown = convgrad("explain", tiny_step).out
    for entry in [*entries["gradients"], *entries["forward"]]:
        words = direction_of(entry["op"]), entry["descriptor"]
        (line,) = [each for each in shown.splitlines() if set(words) <= set(each.split())]
        assert len(line) <= 80
    whole = convgrad("explain", tiny_step, "--refused").out
    text = " ".join(whole.split())
    assert "not taken" not in shown
    for entry in [*entries["gradients"], *entries["forward"]]:
        assert all(other["reason"] in text for other in entry["refused"])
        assert entry["plan"] in text


def test_a_terminal_of_80_columns(tiny_model: str, tmp_path: Path) -> None:
    """Nothing is wider or cut, and the build says what it does; without colours the same, plain."""
    step = tmp_path / "step.so"
    built = in_terminal("build", tiny_model, "-o", step, "--no-cache")
    assert widest(built) <= 80
    stages = ("reading", "differentiating", "choosing kernels", "compiling kernels: 0 of", "writing")
    places = [built.find(stage) for stage in stages]
    assert -1 not in places, (stages, built)
    assert places == sorted(places)
    assert str(step) in "".join(re.findall(r"library *│ (.*?) *│\n(?:│ +│ (.*?) *│\n)?", ESCAPE.sub("", built))[0])
    for command in (("explain", step, "--refused"), ("profile", step, "--steps", 1), ("env",), ("run", "--help")):
        shown = in_terminal(*command)
        assert widest(shown) <= 80, shown
        assert "…" not in shown or command[0] == "run", shown  # typer cuts long values in its help
    plain = in_terminal("explain", step, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", plain)


def test_a_pipe_is_as_wide_as_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "72")
    assert stdout().width == 72
    monkeypatch.setenv("COLUMNS", "")
    assert stdout().width == 160


def test_targets_are_short_and_can_be_given_again() -> None:
    given = Target({"kind": "llvm", "mcpu": "znver5", "num-cores": 2})
    shown = short_target(str(given))
    assert json.loads(shown) == {"kind": "llvm", "mcpu": "znver5", "num-cores": 2}
    assert str(Target(json.loads(shown))) == str(given)


def test_a_pipe_is_plain(tiny_model: str, tmp_path: Path) -> None:
    step = tmp_path / "step.so"
    for command in (("build", tiny_model, "-o", step), ("explain", step), ("build", "--help")):
        words = [sys.executable, "-c", MAIN, *map(str, command)]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        assert "\x1b" not in done.stdout + done.stderr
        assert "compiling" not in done.stderr
