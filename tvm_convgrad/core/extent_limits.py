# SPDX-License-Identifier: Apache-2.0
"""The least and the largest extent of an axis that a model takes."""

from __future__ import annotations

Limits = tuple[int, int]
"""The least and the largest extent."""

MOST_EXTENT = 2**31 - 1
"""The largest one where none is stated: kernels count in 32 bits."""


def shown_limits(limits: Limits) -> str:
    """Limits in words: "4 to 20", or "at least 4"."""
    low, high = limits
    return f"{low} to {high}" if high < MOST_EXTENT else f"at least {low}"


__all__ = ["MOST_EXTENT", "Limits", "shown_limits"]
