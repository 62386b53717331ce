# SPDX-License-Identifier: Apache-2.0
"""The choice between a kernel and the framework's own operator, by their measured times."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

MARGIN = 0.97
"""A kernel takes over where its time is less than this part of the framework's: noise must not make a step slower."""

CLOSE = 1.3
"""Two best times whose ratio is below this are close: where other programs want the cores, more turns are needed."""

_warned: set[tuple[str, str]] = set()


def is_faster(kernel: float, own: float) -> bool:
    """Whether a kernel of some seconds takes over from the framework's own operator."""
    return kernel < MARGIN * own


def is_open(kernel: Sequence[float], own: Sequence[float], least: int, most: int) -> bool:
    """Whether another turn is wanted: there were fewer than `least`, or fewer than `most` and the best are close."""
    if min(len(kernel), len(own)) < least:
        return True
    ours, theirs = min(kernel), min(own)
    return min(len(kernel), len(own)) < most and max(ours, theirs) < CLOSE * min(ours, theirs)


def measured(kernel: float, own: float, framework: str) -> str:
    """The sentence about a choice, from the seconds of both."""
    return f"measured: the kernel takes {kernel * 1e6:.0f} us, {framework} {own * 1e6:.0f} us"


def warn_once(bridge: str, text: str) -> None:
    """Warn that a bridge's program goes on without kernels, once for a reason."""
    if (bridge, text) not in _warned:
        _warned.add((bridge, text))
        warnings.warn(f"{bridge}: {text}", RuntimeWarning, stacklevel=2)


__all__ = ["CLOSE", "MARGIN", "is_faster", "is_open", "measured", "warn_once"]
