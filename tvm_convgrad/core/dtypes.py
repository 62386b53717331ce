# SPDX-License-Identifier: Apache-2.0
"""Element types by TVM's names: which are of 16 bits, and what they are in numpy."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

SHORT_FLOATS = ("float16", "bfloat16")


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy element type of TVM's `name`, such as "float32" or "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def wide_dtype(dtype: str) -> str:
    """The type in which to sum elements of `dtype`: float32 for 16-bit floats, `dtype` otherwise."""
    return "float32" if dtype in SHORT_FLOATS else dtype
