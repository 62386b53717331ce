# SPDX-License-Identifier: Apache-2.0
"""numpy element types by TVM's names."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy element type of TVM's `name`, such as "float32" or "bfloat16"."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
