# SPDX-License-Identifier: Apache-2.0
"""Options that were given and would change nothing."""

from __future__ import annotations

from collections.abc import Iterable

import typer


def refuse_given(context: typer.Context, options_of: Iterable[str], why: str) -> None:
    """Refuse those of some options that were given.

    Args:
        context: of the command.
        options_of: names of parameters of the command.
        why: what stands between "--name is" and the names again, and ends with the remedy: "…: leave out".

    Raises:
        typer.BadParameter: there is one.
    """
    sources = {name: context.get_parameter_source(name) for name in options_of}
    # by its name, as click's class is typer's own in newer versions
    given = [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name == "COMMANDLINE"
    ]
    if given:
        verb = "is" if len(given) == 1 else "are"
        raise typer.BadParameter(f"{' and '.join(given)} {verb} {why} {' and '.join(given)}.")
