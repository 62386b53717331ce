# SPDX-License-Identifier: Apache-2.0
"""The word that a choice of measured plans carries, apart from their files, which `import tvm` must not load."""

from __future__ import annotations

TUNED = "tuned"
"""The first word of the reason of a tuned choice."""
