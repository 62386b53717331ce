# SPDX-License-Identifier: Apache-2.0
"""Ranks that torch.distributed connects, as `torchrun` starts them: `gloo`, over TCP."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from time import monotonic
from typing import TypeVar

from tvm_convgrad.core.errors import SetupError, TrainingError, first_line
from tvm_convgrad.training.runtime.ranks import TIMEOUT
from tvm_convgrad.training.runtime.schema import Array

T = TypeVar("T")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class TorchRanks:
    """The ranks of torch.distributed's default process group, which the caller or `joined` has made.

    Attributes:
        rank, size: of the group.

    Raises:
        SetupError: there is no process group.
    """

    def __init__(self) -> None:
        import torch.distributed as distributed

        if not distributed.is_initialized():
            raise SetupError(
                "torch.distributed has no process group; call torch.distributed.init_process_group('gloo') first."
            )
        self.rank = distributed.get_rank()
        self.size = distributed.get_world_size()

    def sum(self, array: Array) -> None:
        """Replace each element of a contiguous array by its sum over all ranks, in its memory."""
        import torch
        import torch.distributed as distributed

        self._try(lambda: distributed.all_reduce(torch.from_numpy(array)))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank; they are pickled."""
        import torch.distributed as distributed

        found: list[T | None] = [None] * self.size
        self._try(lambda: distributed.all_gather_object(found, value))
        return found  # type: ignore[return-value]

    def first(self, value: T) -> T:
        """The value of rank 0; it is pickled."""
        import torch.distributed as distributed

        found = [value]
        self._try(lambda: distributed.broadcast_object_list(found, src=0))
        return found[0]

    def _try(self, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:  # of gloo: a closed connection, or the time is over
            raise TrainingError(
                f"rank {self.rank} of {self.size}: another rank has ended or does not answer ({_cause(error)}); "
                "its own message has the reason."
            ) from error


def _cause(error: RuntimeError) -> str:
    """The first sentence of gloo's message, without the place in its source and the advice that follows."""
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", first_line(error)).partition(". ")[0]


def _check_numbers() -> None:
    """Refuse ranks and ports that are none, for which torch.distributed would wait.

    Raises:
        SetupError: a variable is no number, or out of its range.
    """
    rank, size, _, port = (os.environ[name] for name in _VARIABLES)
    for name, text, least in (("RANK", rank, 0), ("WORLD_SIZE", size, 1), ("MASTER_PORT", port, 0)):
        if not text.isdecimal() or not least <= int(text) <= 65535:
            raise SetupError(f"--distributed: {name}={text}, which must be a number from {least} to 65535.")
    if int(rank) >= int(size):
        raise SetupError(
            f"--distributed: RANK={rank}, but WORLD_SIZE={size}; ranks are numbered from 0 to {int(size) - 1}."
        )


@contextmanager
def joined(timeout: float = TIMEOUT) -> Iterator[TorchRanks]:
    """Connect the processes that were started together, as the environment names them, inside the block.

    Args:
        timeout: seconds to wait for the others in all that they do together, and here for each attempt to connect.

    Raises:
        SetupError: PyTorch is missing, no launcher has named the ranks or their numbers are wrong, or they cannot be
            reached.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # the error that ends a run is one sentence
    try:
        import torch.distributed as distributed
    except ModuleNotFoundError as error:
        raise SetupError("--distributed needs PyTorch: pip install 'tvm-convgrad[torch]'.") from error
    missing = [name for name in _VARIABLES if not os.environ.get(name)]
    if missing:
        raise SetupError(
            f"--distributed: {', '.join(missing)} not set, so the ranks cannot find each other; start them with "
            "`torchrun --nproc-per-node N -m tvm_convgrad run …`, or set these variables as it does."
        )
    _check_numbers()
    begin = monotonic()
    try:
        distributed.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise SetupError(
            f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: the ranks did not connect at "
            f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} within {monotonic() - begin:.0f} s, of which an "
            f"attempt takes {timeout:g} ({first_line(error)})."
        ) from error
    try:
        yield TorchRanks()
    finally:
        distributed.destroy_process_group()


__all__ = ["TorchRanks", "joined"]
