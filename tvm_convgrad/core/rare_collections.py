# SPDX-License-Identifier: Apache-2.0
"""How often Python looks for cycles of objects that nothing uses."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager

_NEW_OBJECTS = 100_000
_YOUNGER_LOOKS = 50


@contextmanager
def rare_collections() -> Iterator[None]:
    """Look for unused cycles after 100,000 new objects instead of Python's 700, and seldom at all of them.

    What a short command makes, it keeps: the modules of PyTorch and TVM, graphs and kernels. Looks at all of it in vain
    are a third of the time to import these packages and to read a model. Python's last look, as the process ends, is
    at none of it.
    """
    before = gc.get_threshold()
    atexit.register(gc.freeze)
    gc.set_threshold(_NEW_OBJECTS, _YOUNGER_LOOKS, _YOUNGER_LOOKS)
    try:
        yield
    finally:
        gc.set_threshold(*before)


__all__ = ["rare_collections"]
