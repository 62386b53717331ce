# SPDX-License-Identifier: Apache-2.0
"""The process that decodes images: it takes jobs from a connection, and answers with what could not be used.

A job is `("keep", first, end)` or `("batch", slot, numbers, seeds)`; the images go to shared memory.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from multiprocessing.connection import Connection

from tvm_convgrad.training.runtime.images.decoder import decoder_of


def serve(descriptor: int, cpus: list[int]) -> None:
    """Do the jobs of the connection until the parent closes it, or ends."""
    os.sched_setaffinity(0, cpus)  # the parent may be bound to one CPU, and children inherit that
    with suppress(OSError):  # where a sandbox forbids it; it changes no result
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # who wakes up then does not interrupt a step
    with Connection(descriptor) as connection:
        try:
            decoder = decoder_of(connection.recv())
            while True:
                kind, *job = connection.recv()
                if kind == "keep":
                    connection.send(decoder.keep(range(*job)))
                else:
                    slot, numbers, seeds = job
                    connection.send(decoder.batch(numbers, seeds, decoder.arrays["slots"][slot][: len(numbers)]))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            sys.exit(0)


__all__ = ["serve"]
