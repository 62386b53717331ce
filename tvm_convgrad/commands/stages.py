# SPDX-License-Identifier: Apache-2.0
"""The stages of a command, such as "compiling": shown while they last, and named in the message of a defect."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_stage: ContextVar[str] = ContextVar("convgrad_stage", default="")


def current_stage() -> str:
    """The stage that the command entered last, such as "compiling"; empty before the first one."""
    return _stage.get()


def reset_stage() -> None:
    """Forget the stages of an earlier command in this process."""
    _stage.set("")


@contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Show the stages of a command on standard error; gives a function that enters the next stage."""
    from rich.live import Live
    from rich.spinner import Spinner

    from tvm_convgrad.report.tables import stderr

    shown = Spinner("dots", first)
    with Live(shown, console=stderr(), refresh_per_second=12.5, transient=True) as live:

        def enter(stage: str) -> None:
            _stage.set(stage)
            shown.update(text=stage)
            live.refresh()  # each stage is seen, however short

        enter(first)
        yield enter


def print_warnings(warnings: Sequence[str]) -> None:
    """Print sentences about a model that do not stop the command."""
    for warning in warnings:
        print(f"convgrad: warning: {warning}", file=sys.stderr)
