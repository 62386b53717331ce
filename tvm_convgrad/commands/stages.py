# SPDX-License-Identifier: Apache-2.0
"""What a command is doing: shown while it lasts, and named in the message if it ends in an unexpected error."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

_stage: ContextVar[str] = ContextVar("convgrad_stage", default="")


def current_stage() -> str:
    """What the command was doing when it was last asked, such as "compiling"; empty before the first stage."""
    return _stage.get()


def reset_stage() -> None:
    """Forget the stages of an earlier command in this process."""
    _stage.set("")


@contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Show the stages of a command on standard error; the function that is given enters the next one."""
    from tvm_convgrad.report.tables import stderr

    with stderr().status(first) as status:

        def enter(stage: str) -> None:
            _stage.set(stage)
            status.update(stage)

        enter(first)
        yield enter


def print_warnings(warnings: Sequence[str]) -> None:
    """Print sentences about a model that do not stop the command."""
    for warning in warnings:
        print(f"convgrad: warning: {warning}", file=sys.stderr)
