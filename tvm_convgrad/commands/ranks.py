# SPDX-License-Identifier: Apache-2.0
"""The processes of `run --distributed`: how they meet, and how all begin with one state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

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


__all__ = ["joined_ranks", "shared"]
