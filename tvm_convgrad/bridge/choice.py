# SPDX-License-Identifier: Apache-2.0
"""The choice between a kernel and the framework's own operator, by their measured times."""

from __future__ import annotations

import warnings

MARGIN = 0.97
"""A kernel takes over where its time is less than this part of the framework's: noise must not make a step slower."""

_warned: set[tuple[str, str]] = set()


def is_faster(kernel: float, own: float) -> bool:
    """Whether a kernel of some seconds takes over from the framework's own operator."""
    return kernel < MARGIN * own


def measured(kernel: float, own: float, framework: str) -> str:
    """The sentence about a choice, from the seconds of both."""
    return f"measured: the kernel takes {kernel * 1e6:.0f} us, {framework} {own * 1e6:.0f} us"


def warn_once(bridge: str, text: str) -> None:
    """Warn that a bridge's program goes on without kernels, once for a reason."""
    if (bridge, text) not in _warned:
        _warned.add((bridge, text))
        warnings.warn(f"{bridge}: {text}", RuntimeWarning, stacklevel=2)


__all__ = ["MARGIN", "is_faster", "measured", "warn_once"]
