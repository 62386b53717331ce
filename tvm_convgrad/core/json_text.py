# SPDX-License-Identifier: Apache-2.0
"""JSON texts without NaN and infinity, which JSON does not have."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping


def json_text(value: object, indent: int | None = 2) -> str:
    """The JSON text of `value`; NaN and infinity, which JSON does not have, become null."""
    return json.dumps(_without_nonfinite(value), indent=indent, allow_nan=False)


def _without_nonfinite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _without_nonfinite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(entry) for entry in value]
    return value
