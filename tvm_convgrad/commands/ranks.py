# SPDX-License-Identifier: Apache-2.0
"""The processes of `run --distributed`: how they meet, how many threads each has, and how all begin with one state."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tvm_convgrad.threads import VARIABLE, available_cores

if TYPE_CHECKING:  # loads numpy
    from tvm_convgrad.training.runtime.checkpoint import Progress
    from tvm_convgrad.training.runtime.ranks import Ranks
    from tvm_convgrad.training.runtime.session import Session


@contextmanager
def joined_ranks(distributed: bool, timeout: float) -> Iterator[Ranks]:
    """The ranks that a launcher started, connected inside the block; this process alone if not `distributed`.

    Raises:
        SetupError: PyTorch is missing, nobody has named the ranks, or they cannot be reached.
    """
    from tvm_convgrad.training.runtime.ranks import Alone
    from tvm_convgrad.training.runtime.torch_ranks import joined

    if not distributed:
        yield Alone()
        return
    with joined(timeout) as ranks:
        yield ranks


def threads_of_rank(wanted: int | None, distributed: bool) -> int | None:
    """How many threads this process is to have, for `use_threads`: ranks share the cores of their machine.

    Threads of several ranks must not be bound to cores, as each would take the first ones.
    """
    from tvm_convgrad.training.runtime.torch_ranks import local_ranks

    if distributed:
        os.environ.setdefault("TVM_BIND_THREADS", "0")
        if wanted is None and not os.environ.get(VARIABLE):
            return max(available_cores() // local_ranks(), 1)
    return wanted


def shared(session: Session, progress: Progress, ranks: Ranks) -> Progress:
    """The progress of the first rank, whose state all have then."""
    from tvm_convgrad.report.tables import stderr

    progress = ranks.first(progress)
    if progress.losses:
        state = ranks.first(session.state if ranks.rank == 0 else None)
        if state is not None:
            session.state = state
    idle = ranks.size - progress.micro_batches
    if ranks.rank == 0 and idle > 0:
        stderr().print(
            f"{idle} of {ranks.size} processes have nothing to do, as an update is of {progress.micro_batches} batches",
            markup=False,
        )
    return progress


__all__ = ["joined_ranks", "shared", "threads_of_rank"]
