# SPDX-License-Identifier: Apache-2.0
"""Where along an axis a tap of a convolution is in bounds, that is, reads data and not padding.

Everything that skips padding is derived from this one range: the taps that a tile sums (gemm/taps.py), the regions that
a result is split into (gemm/regions.py), and the parts of the sums of wgrad.
"""

from __future__ import annotations


def valid_range(offset: int, step: int, count: int, extent: int) -> tuple[int, int]:
    """The positions q in [0, count) with 0 <= q * step + offset < extent, as (first, after the last).

    Both are in [0, count], and first <= after the last; they are equal where the tap reads only padding.

    Args:
        offset: of the tap at q = 0, in elements of the source; negative in the padding before it.
        step: of the source from one position to the next.
        count: positions, such as the extent of the result.
        extent: of the source.
    """
    first, end = (min(count, max(0, -((offset - limit) // step))) for limit in (0, extent))
    return first, end


__all__ = ["valid_range"]
