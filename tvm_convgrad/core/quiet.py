# SPDX-License-Identifier: Apache-2.0
"""Suppression of what native code writes to standard error where it does not help a user."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def native_stderr_discarded() -> Iterator[None]:
    """Discard what is written to file descriptor 2 meanwhile, also by C++ code, of all threads. For short spans."""
    sys.stderr.flush()
    kept = os.dup(2)
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 2)
        os.close(sink)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)


def release(error: BaseException) -> None:
    """Drop what the frames of an error and of its causes hold; their places in the sources stay.

    A block builder of TVM that dies with open blocks writes a warning, which follows the message about the error
    itself, when the last frame that holds it goes.
    """
    chain: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in chain:
        chain.append(found)
        found = found.__cause__ or found.__context__
    with native_stderr_discarded():
        for each in chain:
            traceback.clear_frames(each.__traceback__)
        gc.collect()
