# SPDX-License-Identifier: Apache-2.0
"""The page of the command line, written by typer from the commands themselves."""

from __future__ import annotations

import re

import typer
import typer.core
from typer.cli import get_docs_for_click

from tvm_convgrad.cli import app


def page() -> str:
    """What `typer utils docs` writes for `convgrad`, with one heading of the first level."""
    command = typer.main.get_command(app)
    assert isinstance(command, typer.core.TyperGroup)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="convgrad"), name="convgrad")
    for name, each in command.commands.items():  # of which typer shows the first words only
        text = re.sub(
            rf"^\* `{name}`: .*$", f"* [`{name}`](#convgrad-{name}): {_first_line(each.help)}", text, flags=re.M
        )
    return re.sub(r"^# `convgrad`", "# The command convgrad", text, count=1)


def _first_line(text: str | None) -> str:
    """The first paragraph of a help text, on one line."""
    return " ".join((text or "").partition("\n\n")[0].split())
