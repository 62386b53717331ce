# SPDX-License-Identifier: Apache-2.0
"""The page of the command line, written by typer from the commands themselves."""

from __future__ import annotations

import re

import typer
from typer.cli import get_docs_for_click

from tvm_convgrad.cli import app


def page() -> str:
    """What `typer utils docs` writes for `convgrad`, with one heading of the first level."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="convgrad"), name="convgrad")
    return re.sub(r"^# `convgrad`", "# The command convgrad", text, count=1)
