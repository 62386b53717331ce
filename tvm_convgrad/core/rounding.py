# SPDX-License-Identifier: Apache-2.0
"""Rounding of sizes up to whole vectors, cache lines and pages."""

from __future__ import annotations


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is at least a value.

    >>> round_up(33, 16)
    48
    """
    return -(-value // multiple) * multiple
